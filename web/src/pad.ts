/** The drawing pad. It shows strokes by finger, pen or mouse, or a picture, and returns the grey drawing. */
import type { DrawingSettings } from './preprocess'

type Point = readonly [number, number] // x and y in [0, 1], as a part of the pad's side
const SHARPNESS = 4 // each pixel of the drawing is shown with this many pixels a side

export class Pad {
  private strokes: Point[][] = []
  private picture: Uint8Array | null = null
  /** The finger, pen or mouse that draws; a second one does nothing meanwhile. */
  private pointer: number | null = null
  private readonly small: CanvasRenderingContext2D
  private readonly shown: CanvasRenderingContext2D

  /**
   * @param changed called while a stroke is drawn.
   * @param finished called when it ends.
   */
  constructor(
    canvas: HTMLCanvasElement,
    private readonly settings: DrawingSettings,
    changed: () => void,
    finished: () => void,
  ) {
    const { size } = settings
    canvas.width = canvas.height = size * (size < 200 ? SHARPNESS : 2)
    this.shown = context(canvas)
    const hidden = document.createElement('canvas')
    hidden.width = hidden.height = size
    this.small = context(hidden)
    const at = (event: PointerEvent): Point => {
      const box = canvas.getBoundingClientRect()
      return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height]
    }
    canvas.addEventListener('pointerdown', (event) => {
      if (event.button !== 0 || this.pointer !== null) return
      event.preventDefault()
      canvas.setPointerCapture(event.pointerId)
      if (this.picture) this.clear()
      this.pointer = event.pointerId
      this.strokes.push([at(event)])
      this.paint()
      changed()
    })
    canvas.addEventListener('pointermove', (event) => {
      if (event.pointerId !== this.pointer) return
      const events = event.getCoalescedEvents?.() ?? []
      this.strokes.at(-1)?.push(...(events.length ? events : [event]).map(at))
      this.paint()
      changed()
    })
    for (const end of ['pointerup', 'pointercancel'] as const) {
      canvas.addEventListener(end, (event) => {
        if (event.pointerId !== this.pointer) return
        this.pointer = null
        finished()
      })
    }
    this.paint()
  }

  get empty(): boolean {
    return this.strokes.length === 0 && !this.picture
  }

  clear(): void {
    this.strokes = []
    this.picture = null
    this.paint()
  }

  /** Removes the last stroke, or the picture. Returns false if there is none. */
  undo(): boolean {
    if (this.empty) return false
    if (this.picture) this.picture = null
    else this.strokes.pop()
    this.paint()
    return true
  }

  /** Shows a picture, grey [size, size], instead of strokes: dark on light, as one would draw. */
  show(grey: Uint8Array): void {
    this.strokes = []
    this.picture = grey
    this.paint()
  }

  /** The drawing, uint8 [size, size], black on white. */
  grey(): Uint8Array {
    if (this.picture) return this.picture
    const { size, pen } = this.settings
    draw(this.small, this.strokes, size, pen)
    return greyOf(this.small, size)
  }

  private paint(): void {
    const side = this.shown.canvas.width
    if (this.picture) {
      const { size } = this.settings
      const image = this.small.createImageData(size, size)
      this.picture.forEach((value, i) => image.data.set([value, value, value, 255], 4 * i))
      this.small.putImageData(image, 0, 0)
      this.shown.drawImage(this.small.canvas, 0, 0, side, side)
    } else {
      draw(this.shown, this.strokes, side, (this.settings.pen * side) / this.settings.size)
    }
  }
}

/** A small picture of a raw example: black ink on white, in the pixels that the backbone sees. */
export function thumbnail(canvas: HTMLCanvasElement, raw: Uint8Array | Float32Array, pixels: number, most: number): void {
  canvas.width = canvas.height = pixels
  const ctx = context(canvas)
  const image = ctx.createImageData(pixels, pixels)
  raw.forEach((value, i) => {
    const grey = 255 - (255 * value) / most
    image.data.set([grey, grey, grey, 255], 4 * i)
  })
  ctx.putImageData(image, 0, 0)
}

function draw(ctx: CanvasRenderingContext2D, strokes: Point[][], side: number, pen: number): void {
  ctx.fillStyle = 'white'
  ctx.fillRect(0, 0, side, side)
  ctx.strokeStyle = ctx.fillStyle = 'black'
  ctx.lineWidth = pen
  ctx.lineCap = ctx.lineJoin = 'round'
  for (const points of strokes) {
    ctx.beginPath()
    const [[left, top]] = points as [Point]
    if (points.every(([x, y]) => x === left && y === top)) {
      ctx.arc(left * side, top * side, pen / 2, 0, 2 * Math.PI) // a dot: browsers paint no line of length 0
      ctx.fill()
      continue
    }
    points.forEach(([x, y], i) => (i === 0 ? ctx.moveTo(x * side, y * side) : ctx.lineTo(x * side, y * side)))
    ctx.stroke()
  }
}

function greyOf(ctx: CanvasRenderingContext2D, size: number): Uint8Array {
  const { data } = ctx.getImageData(0, 0, size, size)
  // The mean of the three channels, rounded down; strokes have three equal ones.
  return Uint8Array.from({ length: size * size }, (_, i) => (data[4 * i]! + data[4 * i + 1]! + data[4 * i + 2]!) / 3)
}

function context(canvas: HTMLCanvasElement): CanvasRenderingContext2D {
  const found = canvas.getContext('2d', { willReadFrequently: true })
  if (!found) throw new Error('this browser has no canvas')
  return found
}
