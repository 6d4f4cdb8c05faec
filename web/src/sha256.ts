/** SHA-256 without crypto.subtle, which browsers have on https and localhost only. */
import { sha256 as digest } from '@noble/hashes/sha2.js'
import { bytesToHex } from '@noble/hashes/utils.js'

export function sha256(bytes: Uint8Array): string {
  return bytesToHex(digest(bytes))
}
