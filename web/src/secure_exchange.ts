/** What a client computes for its four messages: tflite_export/device/live/secure/exchange.py. It knows no network and no disk. */
import { toText } from './live_wire'
import {
  addStream, closeBox, derive, drawn, info, joined, keystream, NONCE, openBox, pairKey, privateKey, publicPoint, SECRET,
  shareKey, split, verify, type Attempt, type Exchange,
} from './secure_masks' // prettier-ignore

/** What a client draws for an attempt. None of it is ever used in another one. */
export interface Secrets {
  /** The private mask key, from which the masks of pairs come; it is shared. */
  mask: Exchange
  /** The private share key, with which boxes are closed; it is never shared. */
  share: Exchange
  /** Of the own mask; it is shared. */
  seed: Uint8Array
  /** Of the random rounding. */
  rounding: Uint8Array
}

/** A neighbour's public keys. */
export interface Peer {
  client: number
  mask: Uint8Array
  share: Uint8Array
}

/** What a client holds for a neighbour: shares of its secrets. */
export interface Held {
  seed: Uint8Array
  mask: Uint8Array
}

const LEAST = 3 // clients in a sum; the sum over two says to each of them what the other one sent

/** What a client signs, so that its neighbours know whose keys they have. */
export function keysText(attempt: Attempt, client: number, mask: Uint8Array, share: Uint8Array): Uint8Array<ArrayBuffer> {
  const lines = new TextEncoder().encode(`${toText(mask)}\n${toText(share)}\n`)
  return joined(info(attempt, 'keys', client), lines) as Uint8Array<ArrayBuffer>
}

/** @throws Error: the keys were not signed by this identity, or are no points of the curve. */
export async function checkPeer(attempt: Attempt, peer: Peer, identity: Uint8Array, signature: Uint8Array): Promise<void> {
  await verify(identity, keysText(attempt, peer.client, peer.mask, peer.share), signature)
  await publicPoint(peer.mask)
  await publicPoint(peer.share)
}

/** @throws Error: the server, and fewer clients than a half, could open what this client sends. */
export function checkThreshold(threshold: number, peers: number): void {
  if (peers < LEAST - 1 || !(peers < 2 * threshold && threshold <= peers)) {
    throw new Error(`${peers} neighbours of which ${threshold} can open a client’s masks: this is not safe`)
  }
}

/** The second message: a box for each neighbour. `draw` gives coefficients: first for the seed, then for the mask key. */
export async function close(
  attempt: Attempt, client: number, secrets: Secrets, peers: Peer[], threshold: number,
  draw: () => bigint = drawn, nonce: () => Uint8Array = () => crypto.getRandomValues(new Uint8Array(NONCE)),
): Promise<Map<number, Uint8Array>> {
  const ids = peers.map((peer) => peer.client)
  const seeds = split(secrets.seed, ids, threshold, draw)
  const keys = split(secrets.mask.secret, ids, threshold, draw)
  const mine = await privateKey(secrets.share)
  const boxes = new Map<number, Uint8Array>()
  for (const { client: other, share } of peers) {
    const key = await shareKey(attempt, mine, share, client, other)
    boxes.set(other, await closeBox(key, nonce(), joined(seeds.get(other)!, keys.get(other)!), info(attempt, 'share', client, other)))
  }
  return boxes
}

/** What a client's neighbours have closed for it. @throws Error: a box is not of a neighbour, or cannot be opened. */
export async function openBoxes(
  attempt: Attempt, client: number, secrets: Secrets, peers: Map<number, Peer>, boxes: Map<number, Uint8Array>,
): Promise<Map<number, Held>> {
  const mine = await privateKey(secrets.share)
  const held = new Map<number, Held>()
  for (const [sender, box] of boxes) {
    const peer = peers.get(sender)
    if (!peer) throw new Error(`client ${sender} is no neighbour, and there is a box of it`)
    const key = await shareKey(attempt, mine, peer.share, sender, client)
    const content = await openBox(key, box, info(attempt, 'share', sender, client))
    if (content.length !== 2 * SECRET) throw new Error(`the box of client ${sender} does not hold two shares`)
    held.set(sender, { seed: content.slice(0, SECRET), mask: content.slice(SECRET) })
  }
  return held
}

/** The words with which a client rounds. */
export async function randomWords(attempt: Attempt, client: number, secrets: Secrets, size: number): Promise<Uint32Array> {
  return keystream(await derive(secrets.rounding, info(attempt, 'rounding', client)), size)
}

/** The third message: the words with all masks. `peers` are the neighbours whose boxes came. */
export async function mask(attempt: Attempt, client: number, secrets: Secrets, peers: Peer[], words: Uint32Array): Promise<Uint32Array> {
  const masked = words.slice()
  await addStream(masked, await derive(secrets.seed, info(attempt, 'self', client)), 1)
  const mine = await privateKey(secrets.mask)
  for (const { client: other, mask: point } of peers) {
    await addStream(masked, await pairKey(attempt, mine, client, point, other), client < other ? 1 : -1)
  }
  return masked
}

/**
 * The fourth message: shares of the seeds of the survivors, and of the mask keys of the other neighbours.
 *
 * @throws Error: a survivor is no neighbour whose box came, or there are too few: the sum would say too much.
 */
export function answer(held: Map<number, Held>, survivors: number[], threshold: number): Record<'self' | 'mask', Map<number, Uint8Array>> {
  const here = new Set(survivors)
  const strange = survivors.find((client) => !held.has(client))
  if (strange !== undefined) throw new Error(`client ${strange} is said to be in the sum, and has closed no box`)
  if (here.size < threshold) throw new Error(`${here.size} neighbours are in the sum, and ${threshold} must be: nothing is revealed`)
  const ids = [...held.keys()].sort((a, b) => a - b)
  return {
    self: new Map(ids.filter((i) => here.has(i)).map((i) => [i, held.get(i)!.seed])),
    mask: new Map(ids.filter((i) => !here.has(i)).map((i) => [i, held.get(i)!.mask])),
  }
}
