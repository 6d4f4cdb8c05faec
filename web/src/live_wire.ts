/** What a device and the server of live rounds agree on: tflite_export/device/live/wire.py for a browser. */
import type { CodecNumbers } from './secure_codec'
import { sha256 } from './sha256'

export const PROTOCOL = 1

/** What a client has to do; see docs/live_protocol.md. */
export type Work =
  | { kind: 'none' | 'done' }
  | { kind: 'visit'; round: number; theta: string; settings: Settings; payload: 'float32' | 'int8'; splits: string[] }
  | { kind: 'score'; round: number; theta: string; splits: string[] }
  | SecureWork

/** The phases of a secure round, in their order. */
export const PHASES = ['keys', 'shares', 'masked', 'unmask'] as const
export type Phase = (typeof PHASES)[number]

interface InAttempt {
  round: number
  attempt: number
  /** Until the phase is over. */
  seconds: number
}

/** A message that a secure round needs; see docs/secure.md. */
export type SecureWork = InAttempt &
  (
    | { kind: 'keys'; run: string; theta: string; settings: Settings; codec: CodecNumbers; weight: number }
    | { kind: 'shares'; threshold: number; peers: Record<'identity' | 'mask' | 'share' | 'signature', string>[] }
    | { kind: 'masked'; boxes: Record<string, string> }
    | { kind: 'unmask'; survivors: number[] }
  )

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
  return {
    'Tfpfl-Client': String(client),
    'Tfpfl-Time': time,
    'Tfpfl-Nonce': nonce,
    'Tfpfl-Signature': await sign(key, text),
    'Tfpfl-Body': digest,
  }
}

/** The signature of a text, as headers and JSON have it. */
export async function sign(key: CryptoKeyPair, text: Uint8Array<ArrayBuffer>): Promise<string> {
  return toText(new Uint8Array(await crypto.subtle.sign({ name: 'ECDSA', hash: 'SHA-256' }, key.privateKey, text)))
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

/** @throws Error: the text is not so many bytes in base64. */
export function fromText(text: unknown, size: number): Uint8Array {
  const bytes = typeof text === 'string' && /^[\w+/]*=*$/.test(text) && text.length % 4 === 0 ? Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)) : null
  if (bytes?.length !== size) throw new Error(`${size} bytes in base64 are expected`)
  return bytes
}

export function toText(bytes: Uint8Array): string {
  return btoa(String.fromCharCode(...bytes))
}
