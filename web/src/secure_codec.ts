/** Fixed-point numbers in Z_2^32: tflite_export/device/live/secure/codec.py for a browser, and the same bits. */

export interface CodecNumbers {
  /** P, how many numbers a gradient has. */
  size: number
  /** r, the most clients that can be in the sum. */
  clients: number
  /** A gradient with a larger norm is made shorter, to this norm. */
  clip: number
  max_weight: number
  /** The largest N_i. */
  max_examples: number
  exponent: number
  loss_exponent: number
}

export interface Encoded {
  /** [P + 3], modulo 2^32. */
  words: Uint32Array
  norm: number
}

export const TAIL = 3 // words behind those of the gradient
const BITS = 18 // of the integers that the norm is made of
const SLACK = 1 + 2 ** -20
const MOST_LOSS = 64
const LARGEST = 2 ** 26
const TINY = 2 ** -126 // numbers below it count as 0: some processors take them for it
const BLOCK = 2 ** 16 // squares of 2^36 that a float64 adds without rounding

export class Codec {
  /** M, the largest integer of a client. */
  readonly most: number

  /** @throws Error: sums could wrap with these numbers. */
  constructor(readonly numbers: CodecNumbers) {
    const { size, clients, clip, max_weight: weight, max_examples: examples, exponent, loss_exponent: lossExponent } = numbers
    if (![size, clients, examples].every((n) => Number.isInteger(n) && n >= 1) || size > LARGEST) {
      throw new Error(`no codec for ${size} numbers, ${clients} clients and ${examples} examples`)
    }
    if (!(clip > 0 && clip < Infinity && weight > 0 && weight < Infinity)) throw new Error('the clip and the weights must be positive')
    this.most = Math.floor((2 ** 31 - 1) / clients)
    const fits = (bound: number, e: number) => Number.isInteger(e) && Math.abs(e) <= 100 && bound * 2 ** e <= this.most - 1
    if (!fits(weight * clip, exponent) || !fits(examples * MOST_LOSS, lossExponent) || examples > this.most) {
      throw new Error(`the sum of ${clients} clients would not fit into 32 bits with clip ${clip}`)
    }
  }

  /** How many words a message has. */
  get words(): number {
    return this.numbers.size + TAIL
  }

  /**
   * What one client sends, before its masks.
   *
   * @param loss the mean over its examples.
   * @param random [P + 3] words, used once.
   * @throws Error: the gradient has another size or is not finite, or a number is out of its range.
   */
  encode(gradient: Float32Array, weight: number, examples: number, loss: number, random: Uint32Array): Encoded {
    const { size, clip, max_weight: most, max_examples: mostExamples, exponent, loss_exponent: lossExponent } = this.numbers
    if (gradient.length !== size || random.length !== this.words) throw new Error(`a gradient of ${size} numbers is expected, found ${gradient.length}`)
    if (!gradient.every(Number.isFinite) || !Number.isFinite(loss)) throw new Error('the gradient or the loss is not finite: it cannot be sent')
    if (!(weight > 0 && weight <= most) || !(examples >= 1 && examples <= mostExamples)) {
      throw new Error(`a weight of ${weight} and ${examples} examples are out of range`)
    }
    const norm = normOf(gradient)
    const h = norm * SLACK
    const scaled = weight * (h > clip ? clip / h : 1) * 2 ** exponent
    if (!(scaled > 2 ** -100 && scaled < 2 ** 100)) throw new Error(`a gradient of norm ${norm} cannot be clipped to ${clip}`)
    const factor = Math.fround(scaled)
    const words = new Uint32Array(this.words)
    for (let j = 0; j < size; j++) words[j] = this.rounded(Math.fround(factor * sizeable(gradient[j]!)), random[j]!)
    const bounded = Math.min(Math.max(Math.fround(loss), -MOST_LOSS), MOST_LOSS)
    words[size] = examples
    words[size + 1] = Number(h > clip)
    words[size + 2] = this.rounded(Math.fround(bounded * examples * 2 ** lossExponent), random[size + 2]!)
    return { words, norm }
  }

  /** Rounds a float32 number at random, away from 0 with a probability that is its fraction. */
  private rounded(value: number, random: number): number {
    const size = Math.abs(value)
    const floor = Math.floor(size)
    const up = (random >>> 8) + 1 <= (size - floor) * 2 ** 24
    const integer = Math.min(floor + Number(up), this.most)
    return value < 0 ? -integer : integer // modulo 2^32, once it is in an array of uint32
  }
}

function sizeable(value: number): number {
  return Math.abs(value) < TINY ? 0 : value
}

/** The norm of a gradient as the codec finds it: of integers, so that the order of the sum is of no account. */
export function normOf(gradient: Float32Array): number {
  const largest = gradient.reduce((top, value) => Math.max(top, Math.abs(sizeable(value))), 0)
  if (largest === 0) return 0
  const bits = new DataView(Float32Array.of(largest).buffer).getUint32(0, LITTLE)
  const e = ((bits >>> 23) & 255) - 126 // 2^(e-1) <= largest < 2^e
  let sum = 0n
  for (let start = 0; start < gradient.length; start += BLOCK) {
    let part = 0
    for (const value of gradient.subarray(start, start + BLOCK)) part += Math.ceil(Math.abs(sizeable(value)) * 2 ** (BITS - e)) ** 2
    sum += BigInt(part)
  }
  return Math.sqrt(Number(sum)) * 2 ** (e - BITS)
}

const LITTLE = new Uint8Array(Uint16Array.of(1).buffer)[0] === 1
