/** Zip files: reads their entries, and writes small ones without compression. */
import { crc32 } from './crc32'

const [LOCAL, CENTRAL, END] = [0x04034b50, 0x02014b50, 0x06054b50]
const DAY = (2020 - 1980) * 512 + 1 * 32 + 1 // zip files have a date: always the same, so that equal content gives equal files

/** The entries of a zip file, {name: content}, by its directory at the end; null if it is none or is damaged. */
export async function unzipped(bytes: Uint8Array): Promise<Map<string, Uint8Array> | null> {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength)
  const found = new Map<string, Uint8Array>()
  try {
    let end = bytes.length - 22
    while (end >= 0 && view.getUint32(end, true) !== END) end--
    if (end < 0) return null
    let at = view.getUint32(end + 16, true)
    for (let entries = view.getUint16(end + 10, true); entries > 0; entries--) {
      if (view.getUint32(at, true) !== CENTRAL) return null
      const [method, size, local] = [view.getUint16(at + 10, true), view.getUint32(at + 20, true), view.getUint32(at + 42, true)]
      const checksum = view.getUint32(at + 16, true)
      const length = view.getUint16(at + 28, true)
      const name = new TextDecoder().decode(bytes.subarray(at + 46, at + 46 + length))
      at += 46 + length + view.getUint16(at + 30, true) + view.getUint16(at + 32, true)
      const start = local + 30 + view.getUint16(local + 26, true) + view.getUint16(local + 28, true)
      if (start + size > bytes.length || (method !== 0 && method !== 8)) return null
      const content = bytes.slice(start, start + size)
      const whole = method === 0 ? content : await inflated(content)
      if (crc32(whole) !== checksum) return null
      found.set(name, whole)
    }
  } catch {
    return null // an address outside of the file, or damaged compression
  }
  return found
}

/** A zip file of these entries, {name: content}. */
export function zipped(entries: Map<string, Uint8Array>): Uint8Array {
  const parts: Uint8Array[] = []
  const directory: Uint8Array[] = []
  let at = 0
  for (const [name, content] of entries) {
    const text = new TextEncoder().encode(name)
    const facts = (signature: number, extra: number[]) => {
      const numbers = [20, 0x0800, 0, 0, DAY] // version; names in UTF-8; stored; time; day
      const header = new DataView(new ArrayBuffer(signature === LOCAL ? 30 : 46))
      header.setUint32(0, signature, true)
      let to = 4
      if (signature === CENTRAL) header.setUint16((to += 2) - 2, 20, true)
      for (const number of numbers) header.setUint16((to += 2) - 2, number, true)
      for (const number of [crc32(content), content.length, content.length]) header.setUint32((to += 4) - 4, number, true)
      header.setUint16(to, text.length, true)
      for (const number of extra) header.setUint32(42, number, true)
      return new Uint8Array(header.buffer)
    }
    directory.push(facts(CENTRAL, [at]), text)
    for (const part of [facts(LOCAL, []), text, content]) {
      parts.push(part)
      at += part.length
    }
  }
  const size = directory.reduce((sum, part) => sum + part.length, 0)
  const end = new DataView(new ArrayBuffer(22))
  end.setUint32(0, END, true)
  for (const to of [8, 10]) end.setUint16(to, entries.size, true)
  end.setUint32(12, size, true)
  end.setUint32(16, at, true)
  return joined([...parts, ...directory, new Uint8Array(end.buffer)])
}

function joined(parts: Uint8Array[]): Uint8Array {
  const found = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0))
  let at = 0
  for (const part of parts) {
    found.set(part, at)
    at += part.length
  }
  return found
}

async function inflated(content: Uint8Array<ArrayBuffer>): Promise<Uint8Array> {
  const stream = new Blob([content]).stream().pipeThrough(new DecompressionStream('deflate-raw'))
  return new Uint8Array(await new Response(stream).arrayBuffer())
}
