/** Encodes the gradient that a device sends in a round, in the format of tflite_export/device/payload.py. */
import { bytesOf } from './bytes'
import { crc32 } from './crc32'
import { halfToEven } from './rounding'

export const BLOCK = 1024
export type Kind = 'float32' | 'int8'

/** @throws Error: the gradient is not finite. */
export function encodeGradient(gradient: Float32Array, kind: Kind): Uint8Array {
  if (!gradient.every(Number.isFinite)) throw new Error('a gradient that is not finite must not be sent')
  const body = kind === 'float32' ? bytesOf(gradient) : int8(gradient)
  const file = new Uint8Array(16 + body.length)
  const view = new DataView(file.buffer)
  file.set(new TextEncoder().encode('TFPG'))
  view.setUint32(4, kind === 'float32' ? 0 : 1, true)
  view.setUint32(8, gradient.length, true)
  view.setUint32(12, crc32(body), true)
  file.set(body, 16)
  return file
}

/** int8: a scale for each block of 1024 numbers, then the numbers divided by their scale. */
function int8(gradient: Float32Array): Uint8Array {
  const scales = new Float32Array(Math.ceil(gradient.length / BLOCK))
  const steps = new Int8Array(gradient.length)
  for (let block = 0; block < scales.length; block++) {
    const part = gradient.subarray(block * BLOCK, (block + 1) * BLOCK)
    const scale = (scales[block] = Math.fround(part.reduce((top, value) => Math.max(top, Math.abs(value)), 0) / 127))
    if (scale === 0) continue // too small for float32: sent as zeros
    part.forEach((value, i) => {
      const step = halfToEven(Math.fround(value / scale))
      steps[block * BLOCK + i] = Math.max(-127, Math.min(127, step))
    })
  }
  const bytes = new Uint8Array(4 * scales.length + steps.length)
  bytes.set(bytesOf(scales))
  bytes.set(new Uint8Array(steps.buffer), 4 * scales.length)
  return bytes
}
