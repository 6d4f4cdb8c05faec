/** Loads files of the site: as compressed copies where the browser can unpack them, with progress, and checked. */
import { sha256Of } from './sha256'

/** A file of the site. */
export interface Listed {
  bytes: number
  sha256: string
  /** The size of the copy NAME.gz, if there is one. */
  gzip?: number
}

/** Called with the number of bytes that have come since the last call. */
export type Progress = (bytes: number) => void

export class TransferError extends Error {}

/** Whether the compressed copy is taken. */
export function packed({ gzip }: Partial<Listed>): boolean {
  return gzip !== undefined && 'DecompressionStream' in globalThis
}

/** The bytes that travel. */
export function travels(file: Listed): number {
  return packed(file) ? file.gzip! : file.bytes
}

/** The content of an answer, which may be the compressed copy. @throws TransferError: it is not the file that site.json describes. */
export async function content(name: string, response: Response, file: Listed | undefined, progress: Progress = () => {}): Promise<Uint8Array> {
  if (!response.ok) throw new TransferError(`${name} is missing.`)
  const bytes = await unpacked(await received(response, progress), file)
  if (file && (bytes?.length !== file.bytes || (await sha256Of(bytes)) !== file.sha256)) {
    throw new TransferError(`${name} is damaged: its sha256 is not the one in site.json.`)
  }
  return bytes!
}

/** The bytes of an answer. */
export async function received(response: Response, progress: Progress): Promise<Uint8Array> {
  const reader = response.body?.getReader()
  if (!reader) return new Uint8Array(await response.arrayBuffer())
  const parts: Uint8Array<ArrayBuffer>[] = []
  for (;;) {
    const { done, value } = await reader.read()
    if (done) return new Uint8Array(await new Blob(parts).arrayBuffer())
    parts.push(value)
    progress(value.length)
  }
}

/** The file itself. A host may have unpacked the copy already (Content-Encoding). Null where the copy is damaged. */
async function unpacked(bytes: Uint8Array, file: Listed | undefined): Promise<Uint8Array | null> {
  if (!file || !packed(file) || bytes.length === file.bytes || bytes[0] !== 0x1f || bytes[1] !== 0x8b) return bytes
  try {
    const stream = new Blob([bytes as Uint8Array<ArrayBuffer>]).stream().pipeThrough(new DecompressionStream('gzip'))
    return new Uint8Array(await new Response(stream).arrayBuffer())
  } catch {
    return null
  }
}
