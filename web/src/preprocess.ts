/** Makes an example of a drawing, with the same numbers as tflite_export/device/drawing.py. */
import { halfToEven } from './rounding'

export interface DrawingSettings {
  /** Side of the square drawing, in pixels. */
  size: number
  /** Width of a line, in pixels. */
  pen: number
  resample: 'area' | 'bilinear'
  levels: number
}

export interface Preprocessing {
  scale: number
  shift: number
}

/** The raw example, [pixels, pixels], of a grey drawing [size, size]; black is ink. */
export function exampleOfDrawing(grey: Uint8Array, settings: DrawingSettings, pixels: number): Uint8Array {
  const { size, levels } = settings
  if (grey.length !== size * size) throw new Error(`a drawing must have ${size} x ${size} pixels`)
  const shrink = settings.resample === 'area' ? blockMean(grey, size, pixels) : interpolated(grey, size, pixels)
  return Uint8Array.from({ length: pixels * pixels }, (_, i) =>
    halfToEven((shrink(Math.floor(i / pixels), i % pixels) * levels) / 255),
  )
}

/** x = raw * scale + shift, each step in float32; a manifest may leave out a scale of 1 and a shift of 0. */
export function decoded(raw: Uint8Array | Float32Array, { scale = 1, shift = 0 }: Partial<Preprocessing>): Float32Array {
  const [a, b] = [Math.fround(scale), Math.fround(shift)]
  return Float32Array.from(raw, (value) => Math.fround(value * a) + b)
}

function blockMean(grey: Uint8Array, size: number, pixels: number): (row: number, column: number) => number {
  const block = Math.floor(size / pixels)
  return (row, column) => {
    let ink = 0
    for (let i = row * block; i < (row + 1) * block; i++) {
      for (let j = column * block; j < (column + 1) * block; j++) ink += 255 - grey[i * size + j]!
    }
    return ink / (block * block)
  }
}

function interpolated(grey: Uint8Array, size: number, pixels: number): (row: number, column: number) => number {
  const near = Array.from({ length: pixels }, (_, i) => {
    const centre = (i + 0.5) * (size / pixels) - 0.5
    const first = Math.floor(centre)
    return { first: Math.max(first, 0), second: Math.min(first + 1, size - 1), weight: centre - first }
  })
  const ink = (row: number, column: number) => 255 - grey[row * size + column]!
  return (row, column) => {
    const [down, across] = [near[row]!, near[column]!]
    const at = (c: number) => ink(down.first, c) * (1 - down.weight) + ink(down.second, c) * down.weight
    return at(across.first) * (1 - across.weight) + at(across.second) * across.weight
  }
}
