/** SHA-256, also without crypto.subtle, which browsers have on https and localhost only. */
import { sha256 as digest } from '@noble/hashes/sha2.js'
import { bytesToHex } from '@noble/hashes/utils.js'

export function sha256(bytes: Uint8Array): string {
  return bytesToHex(digest(bytes))
}

/** The same, computed beside the page where the browser can: for megabytes. */
export async function sha256Of(bytes: Uint8Array): Promise<string> {
  if (!globalThis.crypto?.subtle) return sha256(bytes)
  return bytesToHex(new Uint8Array(await crypto.subtle.digest('SHA-256', bytes as Uint8Array<ArrayBuffer>)))
}
