/**
 * What a client computes in a round, by the exported program: tflite_export/device/client.py for a browser.
 *
 * The program has fixed shapes. Fewer examples are filled up with examples of weight 0. More examples are computed in
 * chunks, whose sums are exact. A head with fewer classes gets closed columns (see head.ts).
 */
import { CLOSED, resized, type Head } from './head'
import type { Arrays, Ran, Runtime } from './runtime'

export interface Fitted {
  head: Head
  lossBefore: number
  loss: number
}

export interface RoundResult {
  dtheta: Float32Array
  head: Head
  loss: number
  /** Milliseconds of each part; only `round` if one call computed everything. */
  parts: Record<string, number>
}

export interface RoundSettings {
  steps: number
  beta: number
  /** Learning rate of the head's last step, the joint one. */
  rate: number
  safeguard: boolean
}

type Part = 'features' | 'steps on the head' | 'joint gradient' | 'round'

export class Device {
  /** Number of numbers of an example. */
  readonly pixels: number
  /** The largest number of classes that a head can have. */
  readonly room: number
  /** Number of examples that the program takes at a time. */
  readonly batch: number
  private readonly headBatch: number
  private parts: Partial<Record<Part, number>> = {}

  private constructor(
    private readonly runtime: Runtime,
    readonly features: number,
  ) {
    const x = runtime.shape('x', 'features')
    this.batch = x[0]!
    this.pixels = x.slice(1).reduce((a, b) => a * b, 1)
    this.headBatch = runtime.shape('phi', 'personalize')[0]!
    this.room = runtime.shape('bias', 'personalize')[0]!
  }

  /** @param theta null: `receive` gives it later. */
  static async open(runtime: Runtime, theta: Float32Array | null): Promise<Device> {
    const device = new Device(runtime, runtime.shape('kernel', 'personalize')[0]!)
    if (theta) await device.receive(theta)
    return device
  }

  /** Replaces theta. */
  async receive(theta: Float32Array): Promise<void> {
    await this.runtime.keep('theta', theta)
  }

  get canTakePart(): boolean {
    return this.runtime.has('round')
  }

  /** The features phi(x; theta), [N, M], of examples x, [N, ...]. */
  async phi(x: Float32Array): Promise<Float32Array> {
    const n = x.length / this.pixels
    const found = new Float32Array(n * this.features)
    if (n === 1) {
      found.set(floats(await this.run('features', 'features_one', { x }), 'phi'))
      return found
    }
    for (const [from, to] of chunks(n, this.batch)) {
      const part = filled(x.subarray(from * this.pixels, to * this.pixels), this.pixels, this.batch)
      const phi = floats(await this.run('features', 'features', { x: part }), 'phi')
      found.set(phi.subarray(0, (to - from) * this.features), from * this.features)
    }
    return found
  }

  /** Makes gradient steps on the head. If they raised the loss, the old head is returned. */
  async fitHead(phi: Float32Array, labels: Int32Array, head: Head, steps: number, beta: number, safeguard = true): Promise<Fitted> {
    const n = labels.length
    if (n > this.headBatch) {
      const { head: fitted, losses } = await this.stepByStep(phi, labels, head, steps, beta)
      const [lossBefore, loss] = [losses[0]!, losses.at(-1)!]
      if (safeguard && !(loss <= lossBefore)) return { head, lossBefore, loss: lossBefore }
      return { head: fitted, lossBefore, loss }
    }
    const inputs = { ...this.headExamples(phi, labels, n, 0, n), ...this.open(head), ...scalars({ beta }), steps: Int32Array.of(steps) }
    const { outputs } = await this.run('steps on the head', 'personalize', inputs)
    return { head: this.closed(outputs, head), lossBefore: outputs.loss_before![0]!, loss: outputs.loss![0]! }
  }

  /** Makes the steps one at a time; also returns the loss before each step and after the last. */
  async stepByStep(phi: Float32Array, labels: Int32Array, head: Head, steps: number, beta: number): Promise<{ head: Head; losses: number[] }> {
    const n = labels.length
    const losses: number[] = []
    let at = this.open(head)
    for (let step = 0; step <= steps; step++) {
      const moved = { kernel: Float64Array.from(at.kernel), bias: Float64Array.from(at.bias) }
      let loss = 0
      for (const [from, to] of chunks(n, this.headBatch)) {
        const inputs = { ...this.headExamples(phi, labels, n, from, to), ...at, ...scalars({ beta }) }
        const { outputs } = await this.run('steps on the head', 'head_step', inputs)
        for (const name of ['kernel', 'bias'] as const) {
          outputs[name]!.forEach((value, i) => (moved[name][i]! += value - at[name][i]!)) // the chunk's part of the step
        }
        loss += outputs.loss_before![0]!
      }
      losses.push(loss)
      if (step < steps) at = { kernel: Float32Array.from(moved.kernel), bias: Float32Array.from(moved.bias) }
    }
    return { head: this.closed(at, head), losses }
  }

  /** A client's work in a PFLEGO round: gradient steps on the head, then the joint step. */
  async round(x: Float32Array, labels: Int32Array, head: Head, settings: RoundSettings): Promise<RoundResult> {
    const { steps, beta, rate, safeguard } = settings
    const n = labels.length
    this.parts = {}
    if (n <= this.batch) {
      const inputs = { ...this.examples(x, labels, n, 0, n), ...this.open(head), ...scalars({ beta, rate }), steps: Int32Array.of(steps) }
      const { outputs } = await this.run('round', 'round', inputs)
      return { dtheta: outputs.dtheta as Float32Array, head: this.closed(outputs, head), loss: outputs.loss![0]!, parts: { ...this.parts } }
    }
    const fitted = await this.fitHead(await this.phi(x), labels, head, steps, beta, safeguard)
    const sums: Record<string, Float64Array> = {}
    for (const [from, to] of chunks(n, this.batch)) {
      const inputs = { ...this.examples(x, labels, n, from, to), ...this.open(fitted.head) }
      const { outputs } = await this.run('joint gradient', 'joint_gradient', inputs)
      for (const [name, values] of Object.entries(outputs)) {
        const sum = (sums[name] ??= new Float64Array(values.length))
        values.forEach((value, i) => (sum[i]! += value))
      }
    }
    const gradient = this.closed({ kernel: Float32Array.from(sums.dkernel!), bias: Float32Array.from(sums.dbias!) }, head)
    const kernel = fitted.head.kernel.map((value, i) => value - Math.fround(rate) * gradient.kernel[i]!)
    const bias = fitted.head.bias.map((value, i) => value - Math.fround(rate) * gradient.bias[i]!)
    return { dtheta: Float32Array.from(sums.dtheta!), head: { kernel, bias }, loss: sums.loss![0]!, parts: { ...this.parts } }
  }

  /** Memory of WebAssembly, in bytes. */
  get memory(): number {
    return this.runtime.memory
  }

  get threads(): number {
    return this.runtime.threads
  }

  private async run(part: Part, signature: string, inputs: Arrays): Promise<Ran> {
    const ran = await this.runtime.run(signature, inputs)
    this.parts[part] = (this.parts[part] ?? 0) + ran.milliseconds
    return ran
  }

  private examples(x: Float32Array, labels: Int32Array, n: number, from: number, to: number): Arrays {
    const part = x.subarray(from * this.pixels, to * this.pixels)
    return { x: filled(part, this.pixels, this.batch), ...weighted(labels, n, from, to, this.batch) }
  }

  private headExamples(phi: Float32Array, labels: Int32Array, n: number, from: number, to: number): Arrays {
    const part = phi.subarray(from * this.features, to * this.features)
    return { phi: filled(part, this.features, this.headBatch), ...weighted(labels, n, from, to, this.headBatch) }
  }

  private open(head: Head): { kernel: Float32Array; bias: Float32Array } {
    if (head.bias.length > this.room) throw new Error(`a head can have ${this.room} classes here`)
    return resized(head, this.room, CLOSED)
  }

  private closed(outputs: Arrays, like: Head): Head {
    return resized({ kernel: outputs.kernel as Float32Array, bias: outputs.bias as Float32Array }, like.bias.length)
  }
}

function chunks(n: number, size: number): [number, number][] {
  return Array.from({ length: Math.ceil(n / size) }, (_, i) => [i * size, Math.min((i + 1) * size, n)])
}

/** The weights of examples: 1 / N each, and 0 for those that only fill up the batch. */
function weighted(labels: Int32Array, n: number, from: number, to: number, batch: number): Arrays {
  const found = { labels: new Int32Array(batch), weights: new Float32Array(batch) }
  found.labels.set(labels.subarray(from, to))
  found.weights.fill(1 / n, 0, to - from)
  return found
}

/** Rows of `size` numbers each, with copies of the first up to `rows`: of zeros a network may make NaN, and NaN times a weight of 0 is NaN. */
function filled(values: Float32Array, size: number, rows: number): Float32Array {
  const found = new Float32Array(size * rows)
  found.set(values)
  for (let at = values.length; at < found.length; at += size) found.set(values.subarray(0, size), at)
  return found
}

function floats(ran: Ran, name: string): Float32Array {
  return ran.outputs[name] as Float32Array
}

function scalars(values: Record<string, number>): Arrays {
  return Object.fromEntries(Object.entries(values).map(([name, value]) => [name, Float32Array.of(value)]))
}
