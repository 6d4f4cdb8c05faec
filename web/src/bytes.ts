/** Numbers as little-endian bytes, whatever the machine is. */

const LITTLE = new Uint8Array(Uint16Array.of(1).buffer)[0] === 1

export function floatsOf(bytes: Uint8Array): Float32Array {
  return new Float32Array(numbers(bytes))
}

export function intsOf(bytes: Uint8Array): Int32Array {
  return new Int32Array(numbers(bytes))
}

export function bytesOf(numbers: Float32Array): Uint8Array {
  const bytes = new Uint8Array(numbers.buffer.slice(numbers.byteOffset, numbers.byteOffset + numbers.byteLength))
  return LITTLE ? bytes : swapped(bytes)
}

/** A copy of the bytes that is aligned, in the byte order of the machine. */
function numbers(bytes: Uint8Array): ArrayBuffer {
  const copy = bytes.slice()
  return (LITTLE ? copy : swapped(copy)).buffer as ArrayBuffer
}

function swapped(bytes: Uint8Array): Uint8Array {
  for (let i = 0; i + 3 < bytes.length; i += 4) bytes.subarray(i, i + 4).reverse()
  return bytes
}
