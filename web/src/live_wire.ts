/** What a device and the server of live rounds agree on: tflite_export/device/live/wire.py for a browser. */
import { sha256 } from './sha256'

export const PROTOCOL = 1

/** What a client has to do; see docs/live.md. */
export type Work =
  | { kind: 'none' | 'done' }
  | { kind: 'visit'; round: number; theta: string; settings: Settings; payload: 'float32' | 'int8'; splits: string[] }
  | { kind: 'score'; round: number; theta: string; splits: string[] }

export interface Settings {
  tau: number
  beta: number
  head_rate: number
  safeguard: boolean
}

/** Loss and score on a split. */
export interface ScoreRow {
  split: string
  examples: number
  loss: number
  score: number
}

const encoder = new TextEncoder()
const algorithm = { name: 'ECDSA', namedCurve: 'P-256' } as const

/** A device's private key; the browser keeps it, and gives it to nobody, this page included. */
export async function newKey(): Promise<CryptoKeyPair> {
  return crypto.subtle.generateKey(algorithm, false, ['sign', 'verify'])
}

/** The public key as it is sent: the uncompressed point, 65 bytes, in base64. */
export async function publicText(key: CryptoKeyPair): Promise<string> {
  return toText(new Uint8Array(await crypto.subtle.exportKey('raw', key.publicKey)))
}

/** The headers of a signed request. `seconds` since 1970. */
export async function stamp(
  key: CryptoKeyPair, client: number, method: string, target: string, body: Uint8Array, seconds: number,
): Promise<Record<string, string>> {
  const time = String(Math.floor(seconds))
  const nonce = toText(crypto.getRandomValues(new Uint8Array(12)))
  const digest = sha256(body)
  const text = encoder.encode([`tfpfl-${PROTOCOL}`, method, target, time, nonce, digest, ''].join('\n'))
  const signature = await crypto.subtle.sign({ name: 'ECDSA', hash: 'SHA-256' }, key.privateKey, text)
  return {
    'Tfpfl-Client': String(client),
    'Tfpfl-Time': time,
    'Tfpfl-Nonce': nonce,
    'Tfpfl-Signature': toText(new Uint8Array(signature)),
    'Tfpfl-Body': digest,
  }
}

/** The body of an update: what the device says of it, and the payload. */
export function packUpdate(about: object, payload: Uint8Array): Uint8Array {
  const told = encoder.encode(JSON.stringify(about))
  const body = new Uint8Array(4 + told.length + payload.length)
  new DataView(body.buffer).setUint32(0, told.length, true)
  body.set(told, 4)
  body.set(payload, 4 + told.length)
  return body
}

export function toText(bytes: Uint8Array): string {
  return btoa(String.fromCharCode(...bytes))
}
