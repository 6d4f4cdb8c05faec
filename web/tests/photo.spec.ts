/** What a photo becomes, against examples by hand; and what pixels alone tell. */
import { describe, expect, it } from 'vitest'
import { pixelGuesses } from '../src/baseline'
import { safeRate } from '../src/learner'
import { levelled, PhotoError } from '../src/photo'

const SIZE = 20

/** Paper of a brightness that `light` gives, with a bar of ink in rows 9 and 10, columns 5 to 14. */
function photo(light: (column: number) => number, ink: number): Uint8Array {
  return Uint8Array.from({ length: SIZE * SIZE }, (_, i) => {
    const [row, column] = [Math.floor(i / SIZE), i % SIZE]
    return row >= 9 && row < 11 && column >= 5 && column < 15 ? light(column) - ink : light(column)
  })
}
const at = (grey: Uint8Array, row: number, column: number) => grey[row * SIZE + column]

describe('levels of a photo', () => {
  it('make grey paper white and grey ink black, and stretch what is between', () => {
    const grey = photo(() => 180, 100)
    for (const [column, darkness] of [[0, 20], [1, 30], [2, 50], [3, 60], [18, 70], [19, 80]] as const) grey[2 * SIZE + column] = 180 - darkness // prettier-ignore
    const found = levelled(grey, SIZE)
    expect(at(found, 0, 0)).toBe(255)
    expect(at(found, 9, 9)).toBe(0)
    // Ink is 100 darker than the paper. Up to 30 counts as paper, from 70 on as ink: 50 is half, 60 is three quarters.
    expect([0, 1, 2, 3, 18, 19].map((column) => at(found, 2, column))).toEqual([255, 255, 255 - 128, 255 - 191, 0, 0])
  })

  it('take a shadow away', () => {
    const shadow = photo((column) => 240 - 6 * column, 60) // the paper on the right is darker than ink on the left
    expect(at(shadow, 0, 19)).toBeLessThan(at(shadow, 9, 5)!)
    const ink = (grey: Uint8Array) => levelled(grey, SIZE).map((value) => Number(value < 128))
    expect(ink(shadow)).toEqual(ink(photo(() => 240, 60)))
    expect(ink(shadow).reduce((a, b) => a + b, 0)).toBe(20)
  })

  it('invert chalk on a board', () => {
    const board = photo(() => 40, -150)
    expect(levelled(board, SIZE)).toEqual(levelled(photo(() => 200, 150), SIZE))
  })

  it('are refused where there is nothing but noise', () => {
    const noise = Uint8Array.from({ length: SIZE * SIZE }, (_, i) => 200 + (i % 7))
    expect(() => levelled(noise, SIZE)).toThrow(PhotoError)
  })
})

describe('a head on raw pixels', () => {
  it('guesses what gradient descent on all of its numbers gives', () => {
    const value = (i: number, j: number) => Math.fround(Math.abs(Math.sin(12.9898 * i + 78.233 * j)))
    const rows = (from: number, n: number) => Array.from({ length: n }, (_, i) => Float32Array.from({ length: 9 }, (_, j) => value(from + i, j)))
    const [x, others] = [rows(0, 8), rows(100, 40)]
    const labels = [0, 1, 2, 0, 1, 2, 0, 1]
    const all = new Float32Array(8 * 9)
    x.forEach((row, i) => all.set(row, 9 * i))
    const rate = safeRate(all, 8)
    const kernel = Array.from({ length: 9 }, () => [0, 0, 0])
    const bias = [0, 0, 0]
    const logits = (row: Float32Array) => bias.map((b, k) => b + row.reduce((sum, v, j) => sum + v * kernel[j]![k]!, 0))
    for (let step = 0; step < 60; step++) {
      const errors = x.map((row, i) => {
        const parts = logits(row).map(Math.exp)
        const sum = parts.reduce((a, b) => a + b)
        return parts.map((part, k) => part / sum - Number(labels[i] === k))
      })
      errors.forEach((error, i) =>
        error.forEach((e, k) => {
          bias[k]! -= (rate * e) / 8
          for (let j = 0; j < 9; j++) kernel[j]![k]! -= (rate * e * x[i]![j]!) / 8
        }),
      )
    }
    const expected = others.map((row) => logits(row)).map((l) => l.indexOf(Math.max(...l)))
    expect(new Set(expected).size).toBe(3) // or else nothing is compared
    expect(pixelGuesses(x, labels, others, 3, 60)).toEqual(expected)
  })
})
