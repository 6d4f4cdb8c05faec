/** Makes a drawing of a photo: cropped to a square, paper white and ink black. */

/** The grid on which the brightness of the paper is measured: shadows are larger than its cells. */
const CELLS = 5
/** The part of a cell's pixels that are darker than its paper: ink covers less than that. */
const PAPER = 0.75
/** The part of all pixels that are lighter than the darkest ink; a short line of a thin pen covers 1.4 percent. */
const INK = 0.995
/** Below this part of the ink's darkness, a pixel is paper; above the other, it is ink. */
const [LIGHT, DARK] = [0.3, 0.7]
/** Below this difference of grey values there is no ink, but only noise. */
const FAINTEST = 16

export class PhotoError extends Error {}

/** The middle square of a picture, as grey values [size, size]. */
export function cropped(image: ImageBitmap | HTMLCanvasElement, size: number): Uint8Array {
  const canvas = document.createElement('canvas')
  canvas.width = canvas.height = size
  const context = canvas.getContext('2d', { willReadFrequently: true })
  if (!context) throw new PhotoError('This browser has no canvas.')
  const side = Math.min(image.width, image.height)
  context.fillStyle = 'white' // behind a picture with transparent parts
  context.fillRect(0, 0, size, size)
  context.imageSmoothingQuality = 'high'
  context.drawImage(image, (image.width - side) / 2, (image.height - side) / 2, side, side, 0, 0, size, size)
  const { data } = context.getImageData(0, 0, size, size)
  return Uint8Array.from({ length: size * size }, (_, i) => (data[4 * i]! + data[4 * i + 1]! + data[4 * i + 2]!) / 3)
}

/**
 * Paper becomes 255 and ink 0, whatever the light was. A dark background is inverted first.
 *
 * @throws PhotoError: nothing on the picture is darker or lighter than the rest.
 */
export function levelled(grey: Uint8Array, size: number): Uint8Array {
  const upright = inkIsLight(grey) ? grey.map((value) => 255 - value) : grey
  const paper = paperOf(upright, size)
  const darkness = Float32Array.from(upright, (value, i) => Math.max(0, paper[i]! - value))
  const ink = quantile(darkness, INK)
  if (ink < FAINTEST) throw new PhotoError('There is no ink to be seen on the picture: take it closer, and with more light.')
  return Uint8Array.from(darkness, (dark) => 255 - Math.round(255 * Math.min(1, Math.max(0, (dark / ink - LIGHT) / (DARK - LIGHT)))))
}

/** Ink is what is far from the middle: lighter than it, if the lightest pixels are farther away than the darkest. */
function inkIsLight(grey: Uint8Array): boolean {
  const [dark, middle, light] = [1 - INK, 0.5, INK].map((part) => quantile(grey, part)) as [number, number, number]
  return light - middle > middle - dark
}

/** The brightness of the paper at each pixel, between those of the cells. */
function paperOf(grey: Uint8Array, size: number): Float32Array {
  const edge = (cell: number) => Math.round((cell * size) / CELLS)
  const cells = Array.from({ length: CELLS * CELLS }, (_, cell) => {
    const [row, column] = [Math.floor(cell / CELLS), cell % CELLS]
    const values: number[] = []
    for (let i = edge(row); i < edge(row + 1); i++) values.push(...grey.subarray(i * size + edge(column), i * size + edge(column + 1)))
    return quantile(values, PAPER)
  })
  const near = (pixel: number) => {
    const at = ((pixel + 0.5) * CELLS) / size - 0.5
    const first = Math.min(Math.max(0, Math.floor(at)), CELLS - 2) // at the edge, the line goes on
    return [first, at - first] as const
  }
  return Float32Array.from({ length: size * size }, (_, i) => {
    const [[row, down], [column, across]] = [near(Math.floor(i / size)), near(i % size)]
    const line = (r: number) => cells[r * CELLS + column]! * (1 - across) + cells[r * CELLS + column + 1]! * across
    return line(row) * (1 - down) + line(row + 1) * down
  })
}

/** The smallest value that is not below so large a part of the values. */
function quantile(values: ArrayLike<number>, part: number): number {
  const sorted = Float32Array.from(values).sort()
  return sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))]!
}
