/**
 * What a visitor's pixels tell without the backbone: the same head, fitted to raw pixels by the same rule.
 *
 * A head that starts at 0 stays a sum of the examples it was fitted to. So the steps are computed on their inner
 * products, [N, N] numbers instead of [pixels, K]: the same result, in milliseconds.
 */
import { safeRate, STEPS } from './learner'

/**
 * The class that a head on raw pixels says for each of the other examples.
 *
 * @param x the examples to fit to, N of them.
 * @param others the examples to guess.
 */
export function pixelGuesses(x: readonly Float32Array[], labels: readonly number[], others: readonly Float32Array[], classes: number, steps = STEPS): number[] {
  const n = x.length
  const size = x[0]?.length ?? 0
  const all = new Float32Array(n * size)
  x.forEach((row, i) => all.set(row, i * size))
  const rate = safeRate(all, n)
  const inner = x.map((row) => Float64Array.from(x, (other) => product(row, other)))
  const weights = x.map(() => new Float64Array(classes)) // the kernel is the sum of weights[i] times x[i]
  const bias = new Float64Array(classes)
  const logits = (products: ArrayLike<number>) => {
    const found = Array.from(bias)
    for (let i = 0; i < n; i++) for (let k = 0; k < classes; k++) found[k]! += products[i]! * weights[i]![k]!
    return found
  }
  for (let step = 0; step < steps; step++) {
    const errors = inner.map((products, i) => {
      const found = logits(products)
      const top = Math.max(...found)
      const parts = found.map((logit) => Math.exp(logit - top))
      const sum = parts.reduce((a, b) => a + b, 0)
      return parts.map((part, k) => part / sum - Number(k === labels[i]))
    })
    errors.forEach((error, i) =>
      error.forEach((value, k) => {
        weights[i]![k]! -= (rate * value) / n
        bias[k]! -= (rate * value) / n
      }),
    )
  }
  return others.map((other) => {
    const found = logits(x.map((row) => product(row, other)))
    return found.indexOf(Math.max(...found))
  })
}

function product(a: Float32Array, b: Float32Array): number {
  let sum = 0
  for (let i = 0; i < a.length; i++) sum += a[i]! * b[i]!
  return sum
}
