/** Reads a .safetensors file: a header in JSON, and arrays one after the other. */
import { floatsOf, intsOf } from './bytes'

export interface Stored {
  shape: number[]
  data: Float32Array | Int32Array | Uint8Array
}

export function readSafetensors(bytes: Uint8Array): Map<string, Stored> {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength)
  const length = bytes.length < 8 ? 0n : view.getBigUint64(0, true)
  if (length === 0n || length > BigInt(bytes.length - 8)) throw new Error('this is not a safetensors file')
  const start = 8 + Number(length)
  type Header = Record<string, { dtype: string; shape: number[]; data_offsets: [number, number] }>
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, start))) as Header
  const found = new Map<string, Stored>()
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(header)) {
    if (name === '__metadata__') continue
    const part = bytes.subarray(start + from, start + to)
    const data = dtype === 'F32' ? floatsOf(part) : dtype === 'I32' ? intsOf(part) : dtype === 'U8' ? part.slice() : null
    if (!data || data.length !== shape.reduce((a, b) => a * b, 1)) throw new Error(`${name}: ${dtype} cannot be read`)
    found.set(name, { shape, data })
  }
  return found
}
