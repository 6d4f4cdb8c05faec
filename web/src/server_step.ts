/** The server's step on theta: the optimizers of tfpfl/algorithms/parts/optimizers.py that a run of PFLEGO may have. */

export type ServerSettings =
  | { name: 'sgd' | 'momentum'; rate: number; momentum: number }
  | { name: 'adam'; rate: number; beta_1: number; beta_2: number; epsilon: number }

export class ServerStep {
  private steps = 0
  private readonly first: Float32Array
  private readonly second: Float32Array

  constructor(
    private readonly settings: ServerSettings,
    size: number,
  ) {
    this.first = new Float32Array(size)
    this.second = new Float32Array(size)
  }

  /** The new theta. */
  step(theta: Float32Array, gradient: Float32Array): Float32Array {
    const { settings, first, second } = this
    this.steps++
    if (settings.name !== 'adam') {
      const { rate, momentum } = settings
      return theta.map((value, i) => value - rate * (first[i] = momentum * first[i]! + gradient[i]!))
    }
    const { rate, beta_1, beta_2, epsilon } = settings
    // Both bias corrections, as float32: 1 - 0.999 there differs from 0.001 by a part of 1e-5.
    const [unbias1, unbias2] = [beta_1, beta_2].map((beta) => Math.fround(1 - Math.fround(Math.fround(beta) ** this.steps))) as [number, number]
    return theta.map((value, i) => {
      const g = gradient[i]!
      first[i] = beta_1 * first[i]! + (1 - beta_1) * g
      second[i] = beta_2 * second[i]! + (1 - beta_2) * g * g
      return value - (rate * (first[i]! / unbias1)) / (Math.sqrt(second[i]! / unbias2) + epsilon)
    })
  }
}
