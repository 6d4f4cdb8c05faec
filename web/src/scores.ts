/** Probabilities, loss and accuracy of a head on features. */
import type { Head } from './head'

export interface Score {
  correct: number
  examples: number
  /** Mean cross-entropy. */
  loss: number
}

/** The probabilities of the classes, from the features of one example. */
export function probabilities(head: Head, phi: Float32Array): number[] {
  return logProbabilities(head, phi).map(Math.exp)
}

export function score(head: Head, features: Float32Array[], labels: number[]): Score {
  let [correct, loss] = [0, 0]
  features.forEach((phi, i) => {
    const logs = logProbabilities(head, phi)
    const label = labels[i]!
    loss -= (logs[label] ?? -Infinity) / features.length
    if (logs.indexOf(Math.max(...logs)) === label) correct++
  })
  return { correct, examples: features.length, loss }
}

/** Whether a new head replaces the old one: a higher accuracy on held-out examples, or the same and a lower loss. */
export function isBetter(after: Score, before: Score): boolean {
  if (!Number.isFinite(after.loss)) return false
  return after.correct > before.correct || (after.correct === before.correct && after.loss < before.loss)
}

function logProbabilities({ kernel, bias }: Head, phi: Float32Array): number[] {
  const k = bias.length
  const logits = Array.from(bias, Number)
  phi.forEach((value, row) => {
    if (value !== 0) for (let j = 0; j < k; j++) logits[j]! += value * kernel[row * k + j]!
  })
  const top = Math.max(...logits)
  const sum = Math.log(logits.reduce((total, logit) => total + Math.exp(logit - top), 0))
  return logits.map((logit) => logit - top - sum)
}
