/** A head, its file (the head.bin of a bundle, see tflite_export/device/head_file.py), and heads of more or fewer classes. */
import { bytesOf, floatsOf } from './bytes'
import { crc32 } from './crc32'

export interface Head {
  /** [M, K], row-major. */
  kernel: Float32Array
  /** [K]. */
  bias: Float32Array
  /** The names of the K classes, if the file has them: a device's own, or those of its bundle. */
  names?: readonly string[]
}

export class HeadError extends Error {}

const MAGIC = 'TFPFLH01'
/** Heads with names: a device's own, or those of its bundle when the head was saved. */
const MAGIC_NAMES = ['TFPFLH02', 'TFPFLH03']
const HEADER = 52
/** The bias of a column that is closed: its probability is exactly 0, and 0 times it is 0. */
export const CLOSED = -1e30

export function headBytes(head: Head, thetaSha256: string): Uint8Array {
  const k = head.bias.length
  const numbers = new Uint8Array(4 * (head.kernel.length + k))
  numbers.set(bytesOf(head.kernel))
  numbers.set(bytesOf(head.bias), 4 * head.kernel.length)
  const file = new Uint8Array(HEADER + numbers.length)
  const view = new DataView(file.buffer)
  file.set(new TextEncoder().encode(MAGIC))
  view.setUint32(8, head.kernel.length / k, true)
  view.setUint32(12, k, true)
  for (let i = 0; i < 32; i++) file[16 + i] = parseInt(thetaSha256.slice(2 * i, 2 * i + 2), 16)
  view.setUint32(48, crc32(numbers), true)
  file.set(numbers, HEADER)
  return file
}

/** The sha256 of the theta that a head file names. */
export function thetaOf(file: Uint8Array): string {
  return [...file.subarray(16, 48)].map((byte) => byte.toString(16).padStart(2, '0')).join('')
}

/** Whether a file is a head, and is not damaged; of whatever backbone. */
export function isHead(file: Uint8Array): boolean {
  try {
    return whole(file).k > 0
  } catch {
    return false
  }
}

/** The parts of a head file: m features, k classes, and what follows the header, of which `size` bytes are the numbers. */
function whole(file: Uint8Array): { m: number; k: number; numbers: Uint8Array; size: number; named: boolean } {
  const magic = new TextDecoder().decode(file.subarray(0, 8))
  if (file.length < HEADER || (magic !== MAGIC && !MAGIC_NAMES.includes(magic))) {
    throw new HeadError('This is not a head that tfpfl saved.')
  }
  const view = new DataView(file.buffer, file.byteOffset, file.byteLength)
  const [m, k] = [view.getUint32(8, true), view.getUint32(12, true)]
  const [numbers, size] = [file.subarray(HEADER), 4 * (m * k + k)]
  const fits = magic === MAGIC ? numbers.length === size : numbers.length >= size + 4
  if (!fits || crc32(numbers) !== view.getUint32(48, true)) {
    throw new HeadError('The head is damaged or cut off: its checksum is not that of its numbers.')
  }
  return { m, k, numbers, size, named: magic !== MAGIC }
}

/**
 * Reads a head file.
 *
 * @throws HeadError: it is not a head, is damaged, has another number of features, is not finite, or was fitted to
 *   another backbone.
 */
export function readHead(file: Uint8Array, features: number, thetaSha256: string): Head {
  const { m, k, numbers, size, named } = whole(file)
  const theta = thetaOf(file)
  if (theta !== thetaSha256) {
    throw new HeadError(
      `The head belongs to another backbone (${theta.slice(0, 8)}…); the one of this page is ${thetaSha256.slice(0, 8)}….`,
    )
  }
  if (m !== features || k < 1) throw new HeadError(`The head has ${m} features; the backbone of this page has ${features}.`)
  const values = floatsOf(numbers.subarray(0, size))
  if (!values.every(Number.isFinite)) throw new HeadError('The head holds numbers that are not finite.')
  const names = named ? namesOf(numbers.subarray(size), k) : null
  return { kernel: values.slice(0, m * k), bias: values.slice(m * k), ...(names && { names }) }
}

/** The names of k classes, from what follows the numbers: a list of texts in JSON, after its number of bytes. */
function namesOf(content: Uint8Array, k: number): string[] {
  const size = new DataView(content.buffer, content.byteOffset, content.byteLength).getUint32(0, true)
  let names: unknown = null
  try {
    if (content.length === 4 + size) names = JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(content.subarray(4)))
  } catch {
    // told below
  }
  if (!Array.isArray(names) || names.length !== k || !names.every((n) => typeof n === 'string' && n) || new Set(names).size < k) {
    throw new HeadError(`The head is damaged: it has no names for its ${k} classes.`)
  }
  return names as string[]
}

/** A head of `columns` classes with the first columns of `head`; new ones are 0, with this bias. */
export function resized(head: Head, columns: number, bias = 0): Head {
  const k = head.bias.length
  const m = head.kernel.length / k
  const kernel = new Float32Array(m * columns)
  for (let row = 0; row < m; row++) kernel.set(head.kernel.subarray(row * k, row * k + Math.min(k, columns)), row * columns)
  const found = new Float32Array(columns).fill(bias)
  found.set(head.bias.subarray(0, Math.min(k, columns)))
  return { kernel, bias: found }
}

/** A head of these columns of `head`, in this order; a column that it does not have (-1) is 0. */
export function ordered(head: Head, columns: readonly number[]): Head {
  const k = head.bias.length
  const m = head.kernel.length / k
  const kernel = new Float32Array(m * columns.length)
  columns.forEach((from, to) => {
    for (let row = 0; row < m && from >= 0; row++) kernel[row * columns.length + to] = head.kernel[row * k + from]!
  })
  return { kernel, bias: Float32Array.from(columns, (column) => head.bias[column] ?? 0) }
}

/** The head without one of its classes. */
export function withoutColumn(head: Head, column: number): Head {
  const k = head.bias.length
  return { kernel: head.kernel.filter((_, i) => i % k !== column), bias: head.bias.filter((_, i) => i !== column) }
}

export function zeroHead(features: number, classes: number): Head {
  return { kernel: new Float32Array(features * classes), bias: new Float32Array(classes) }
}
