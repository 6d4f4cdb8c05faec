/**
 * Keys, key agreement, masks and shares: tflite_export/device/live/secure/masks.py and shamir.py for a browser. All
 * cryptography is the browser's (crypto.subtle); docs/secure.md has the protocol.
 */
import { toText } from './live_wire'

/** An attempt of a round. If too few clients are left in it, the round begins again, with other keys. */
export interface Attempt {
  run: string
  round: number
  number: number
}

/** A private key of P-256 that can be shared: its number, and its public key. */
export interface Exchange {
  /** 32 bytes, most significant first. */
  secret: Uint8Array
  /** An uncompressed point: 65 bytes. */
  point: Uint8Array
}

export const POINT = 65
export const SECRET = 32
export const NONCE = 12
export const BOX = NONCE + 2 * SECRET + 16
/** The order of P-256 (FIPS 186-5). */
export const ORDER = 0xffffffff00000000ffffffffffffffffbce6faada7179e84f3b9cac2fc632551n

const CURVE = { name: 'ECDH', namedCurve: 'P-256' } as const
const encoder = new TextEncoder()
type Bytes = Uint8Array<ArrayBuffer>

/** What a key is for: HKDF's info, and the text before which names a signature. */
export function info(attempt: Attempt, purpose: string, ...clients: number[]): Bytes {
  return encoder.encode(['tfpfl-secure-1', attempt.run, attempt.round, attempt.number, purpose, ...clients, ''].join('\n'))
}

/** A new key. */
export async function newExchange(): Promise<Exchange> {
  const pair = await crypto.subtle.generateKey(CURVE, true, ['deriveBits'])
  const { d } = await crypto.subtle.exportKey('jwk', pair.privateKey)
  return { secret: fromUrl(d!), point: new Uint8Array(await crypto.subtle.exportKey('raw', pair.publicKey)) }
}

export function privateKey({ secret, point }: Exchange): Promise<CryptoKey> {
  const [x, y] = [point.subarray(1, 33), point.subarray(33)]
  const jwk = { kty: 'EC', crv: 'P-256', d: toUrl(secret), x: toUrl(x), y: toUrl(y) }
  return crypto.subtle.importKey('jwk', jwk, CURVE, false, ['deriveBits'])
}

/** @throws Error: it is no point of the curve. */
export async function publicPoint(point: Uint8Array): Promise<CryptoKey> {
  try {
    if (point.length !== POINT || point[0] !== 4) throw new Error('no uncompressed point')
    return await crypto.subtle.importKey('raw', point as Bytes, CURVE, false, [])
  } catch {
    throw new Error('this is no point of the curve P-256')
  }
}

/** The secret that only the two owners know: 32 bytes. */
export async function agree(mine: CryptoKey, point: Uint8Array): Promise<Uint8Array> {
  return new Uint8Array(await crypto.subtle.deriveBits({ name: 'ECDH', public: await publicPoint(point) }, mine, 256))
}

/** A key for one purpose: HKDF-SHA256 without a salt, 32 bytes. */
export async function derive(secret: Uint8Array, about: Bytes): Promise<Uint8Array> {
  const key = await crypto.subtle.importKey('raw', secret as Bytes, 'HKDF', false, ['deriveBits'])
  return new Uint8Array(await crypto.subtle.deriveBits({ name: 'HKDF', hash: 'SHA-256', salt: new Uint8Array(), info: about }, key, 256))
}

/** Random words of a key: AES-256 in counter mode from 0, read as little-endian. */
export async function keystream(key: Uint8Array, size: number): Promise<Uint32Array> {
  const aes = await crypto.subtle.importKey('raw', key as Bytes, 'AES-CTR', false, ['encrypt'])
  const stream = await crypto.subtle.encrypt({ name: 'AES-CTR', counter: new Uint8Array(16), length: 128 }, aes, new Uint8Array(4 * size))
  return wordsOf(new Uint8Array(stream))
}

/** Adds the random words of a key to others, or takes them away, modulo 2^32. */
export async function addStream(words: Uint32Array, key: Uint8Array, sign: 1 | -1): Promise<void> {
  const stream = await keystream(key, words.length)
  for (let j = 0; j < words.length; j++) words[j]! += sign * stream[j]!
}

/** The key of the mask that two clients share. */
export async function pairKey(attempt: Attempt, mine: CryptoKey, client: number, point: Uint8Array, other: number): Promise<Uint8Array> {
  return derive(await agree(mine, point), info(attempt, 'mask', Math.min(client, other), Math.max(client, other)))
}

/** The key with which `sender` closes its one box for `receiver`. */
export async function shareKey(attempt: Attempt, mine: CryptoKey, point: Uint8Array, sender: number, receiver: number): Promise<Uint8Array> {
  return derive(await agree(mine, point), info(attempt, 'share', sender, receiver))
}

/** A content that only the owner of the key can read: the nonce, and AES-256-GCM of the content with `about`. */
export async function closeBox(key: Uint8Array, nonce: Uint8Array, content: Uint8Array, about: Bytes): Promise<Uint8Array> {
  const aes = await crypto.subtle.importKey('raw', key as Bytes, 'AES-GCM', false, ['encrypt'])
  const closed = await crypto.subtle.encrypt({ name: 'AES-GCM', iv: nonce as Bytes, additionalData: about }, aes, content as Bytes)
  return joined(nonce, new Uint8Array(closed))
}

/** @throws Error: it was closed with another key, or changed on its way. */
export async function openBox(key: Uint8Array, box: Uint8Array, about: Bytes): Promise<Uint8Array> {
  const aes = await crypto.subtle.importKey('raw', key as Bytes, 'AES-GCM', false, ['decrypt'])
  const [iv, closed] = [box.slice(0, NONCE), box.slice(NONCE)]
  try {
    return new Uint8Array(await crypto.subtle.decrypt({ name: 'AES-GCM', iv, additionalData: about }, aes, closed))
  } catch {
    throw new Error('a share was changed on its way, or is not for this client')
  }
}

/** @throws Error: the text was not signed by this identity. */
export async function verify(identity: Uint8Array, text: Bytes, signature: Uint8Array): Promise<void> {
  const algorithm = { name: 'ECDSA', namedCurve: 'P-256' }
  await publicPoint(identity)
  const key = await crypto.subtle.importKey('raw', identity as Bytes, algorithm, false, ['verify'])
  if (!(await crypto.subtle.verify({ name: 'ECDSA', hash: 'SHA-256' }, key, signature as Bytes, text))) {
    throw new Error('the signature is not this client’s, or what it signed was changed on its way')
  }
}

// Shamir's shares

/** A number that is uniform in 0 to n - 1, with n the order of P-256. */
export function drawn(): bigint {
  for (;;) {
    const number = numberOf(crypto.getRandomValues(new Uint8Array(SECRET)))
    if (number < ORDER) return number
  }
}

/**
 * Shares of a secret: {client: 32 bytes}. Any `threshold` of them give the secret, and fewer say nothing about it.
 *
 * @param draw is called threshold - 1 times, for the coefficients of x, x^2, ...
 */
export function split(secret: Uint8Array, clients: number[], threshold: number, draw: () => bigint = drawn): Map<number, Uint8Array> {
  const coefficients = [numberOf(secret), ...Array.from({ length: threshold - 1 }, draw)]
  if (coefficients[0]! >= ORDER) throw new Error('a secret is below the order of P-256')
  const value = (x: bigint) => coefficients.reduceRight((sum, c) => (sum * x + c) % ORDER, 0n)
  return new Map(clients.map((client) => [client, bytesOfNumber(value(BigInt(client) + 1n))]))
}

export function numberOf(bytes: Uint8Array): bigint {
  return BigInt(`0x${hex(bytes)}`)
}

export function bytesOfNumber(number: bigint): Uint8Array {
  return fromHex(number.toString(16).padStart(2 * SECRET, '0'))
}

// Bytes

export function hex(bytes: Uint8Array): string {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('')
}

export function fromHex(text: string): Uint8Array {
  return Uint8Array.from(text.match(/../g) ?? [], (byte) => parseInt(byte, 16))
}

export function joined(...parts: Uint8Array[]): Uint8Array {
  const all = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0))
  let at = 0
  for (const part of parts) {
    all.set(part, at)
    at += part.length
  }
  return all
}

/** Little-endian, whatever the machine is. */
export function wordsOf(bytes: Uint8Array): Uint32Array {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength)
  return Uint32Array.from({ length: bytes.length / 4 }, (_, j) => view.getUint32(4 * j, true))
}

export function bytesOfWords(words: Uint32Array): Uint8Array {
  const bytes = new Uint8Array(4 * words.length)
  const view = new DataView(bytes.buffer)
  words.forEach((word, j) => view.setUint32(4 * j, word, true))
  return bytes
}

function toUrl(bytes: Uint8Array): string {
  return toText(bytes).replaceAll('+', '-').replaceAll('/', '_').replaceAll('=', '')
}

function fromUrl(text: string): Uint8Array {
  return Uint8Array.from(atob(text.replaceAll('-', '+').replaceAll('_', '/')), (letter) => letter.charCodeAt(0))
}
