/**
 * A browser in secure rounds: which message it sends when it is asked for one, and what it refuses;
 * tflite_export/device/live/secure/visits.py for a browser.
 *
 * What it has said once in an attempt, it says again and never otherwise: one vector with its masks, one list of survivors.
 */
import type { LiveStore, SecureAttempt, SecureVisit } from './live_store'
import { fromText, packUpdate, sign, toText, type SecureWork } from './live_wire'
import { Codec, type CodecNumbers } from './secure_codec'
import { answer, checkPeer, checkThreshold, close, keysText, mask, openBoxes, randomWords, type Peer } from './secure_exchange'
import { BOX, bytesOfNumber, bytesOfWords, drawn, newExchange, POINT, SECRET, type Attempt } from './secure_masks'

/** Something is not as it must be: the client takes no part in this attempt. */
export class NoPart extends Error {}

const CODEC = ['size', 'clients', 'clip', 'max_weight', 'max_examples', 'exponent', 'loss_exponent'] as const
const LONGEST_RUN = 200
const encoder = new TextEncoder()

export class SecureVisits {
  constructor(
    private readonly store: LiveStore,
    private readonly client: number,
    private readonly key: CryptoKeyPair,
  ) {}

  /**
   * What the client sends for this work; it is in the store when the promise is fulfilled.
   *
   * @param visit what it has computed in this round; needed in the first and the third phase.
   * @throws NoPart
   */
  async message(work: SecureWork, visit: SecureVisit | undefined): Promise<Uint8Array> {
    const key: [number, number] = [whole(work, 'round'), whole(work, 'attempt')]
    let kept = await this.store.attempt()
    if (!kept || order(kept.key, key) !== 0) {
      if (work.kind !== 'keys') throw new NoPart('the browser has no keys of this attempt: it was started anew, or joined later')
      if (kept && order(kept.key, key) > 0) throw new NoPart(`the server asks for attempt ${key}, after ${kept.key}: attempts never come back`)
      kept = await this.begin(key, work, visit)
      await this.store.keepAttempt(kept)
    }
    if (kept.refused) throw new NoPart(kept.refused)
    if (work.kind === 'unmask' && kept.survivors && String(kept.survivors) !== String(survivors(work))) {
      throw new NoPart('the server names other survivors than before: the browser does not answer twice')
    }
    const before = kept.messages[work.kind]
    if (before) return before
    const attempt: Attempt = { run: kept.run, round: key[0], number: key[1] }
    let made: { body: Uint8Array; kept: SecureAttempt }
    try {
      made = await this.make(work, attempt, kept, visit)
    } catch (error) {
      throw error instanceof NoPart ? error : new NoPart(error instanceof Error ? error.message : String(error))
    }
    await this.store.keepAttempt({ ...made.kept, messages: { ...kept.messages, [work.kind]: made.body } })
    return made.body
  }

  /** Takes no part in the present attempt any more. */
  async refuse(why: string): Promise<void> {
    const kept = await this.store.attempt()
    if (kept && !kept.refused) await this.store.keepAttempt({ ...kept, refused: why })
  }

  private async begin(key: [number, number], work: SecureWork & { kind: 'keys' }, visit: SecureVisit | undefined): Promise<SecureAttempt> {
    const told = work.codec as CodecNumbers | undefined
    if (!told || CODEC.some((name) => typeof told[name] !== 'number')) throw new NoPart('the server’s work has no codec')
    const codec = Object.fromEntries(CODEC.map((name) => [name, told[name]])) as unknown as CodecNumbers
    const { weight, run } = work
    try {
      new Codec(codec)
    } catch (error) {
      throw new NoPart((error as Error).message)
    }
    if (!visit) throw new NoPart('the visit of this round is gone')
    if (!(weight > 0 && weight <= codec.max_weight) || visit.examples > codec.max_examples || visit.gradient.length !== codec.size) {
      throw new NoPart('the codec of this round is not made for this client’s gradient, weight and examples')
    }
    // A line feed in it would make two names of one.
    if (typeof run !== 'string' || !/^[ -~]+$/.test(run) || run.length > LONGEST_RUN) throw new NoPart('the server’s work has no id of its run')
    let seed = drawn()
    while (seed === 0n) seed = drawn()
    const secrets = { mask: await newExchange(), share: await newExchange(), seed: bytesOfNumber(seed), rounding: crypto.getRandomValues(new Uint8Array(SECRET)) }
    return { key, run, codec, weight, secrets, messages: {} }
  }

  private async make(work: SecureWork, attempt: Attempt, kept: SecureAttempt, visit?: SecureVisit): Promise<{ body: Uint8Array; kept: SecureAttempt }> {
    switch (work.kind) {
      case 'keys': {
        const { mask, share } = kept.secrets
        const signature = await sign(this.key, keysText(attempt, this.client, mask.point, share.point))
        return { body: json({ attempt: attempt.number, mask: toText(mask.point), share: toText(share.point), signature }), kept }
      }
      case 'shares':
        return this.shares(work, attempt, kept)
      case 'masked':
        return this.masked(work, attempt, kept, visit)
      case 'unmask': {
        if (!kept.messages.masked) throw new NoPart('the server asks for shares before this browser has sent its words')
        const here = survivors(work)
        const shares = answer(new Map(kept.held), here, kept.threshold!)
        return { body: json({ attempt: attempt.number, self: texts(shares.self), mask: texts(shares.mask) }), kept: { ...kept, survivors: here } }
      }
    }
  }

  private async shares(work: SecureWork & { kind: 'shares' }, attempt: Attempt, kept: SecureAttempt) {
    if (!Array.isArray(work.peers)) throw new NoPart('the server’s work has no list of peers')
    const peers: Peer[] = []
    for (const about of work.peers) {
      const peer = { client: whole(about, 'client', 0), mask: fromText(about.mask, POINT), share: fromText(about.share, POINT) }
      await checkPeer(attempt, peer, fromText(about.identity, POINT), fromText(about.signature, 64))
      peers.push(peer)
    }
    if (new Set([this.client, ...peers.map((peer) => peer.client)]).size <= peers.length) throw new NoPart('a neighbour is there twice, or it is this browser')
    if (new Set(peers.flatMap((peer) => [toText(peer.mask), toText(peer.share)])).size < 2 * peers.length) throw new NoPart('two neighbours have the same key')
    const threshold = whole(work, 'threshold')
    checkThreshold(threshold, peers.length)
    const boxes = await close(attempt, this.client, kept.secrets, peers, threshold)
    return { body: json({ attempt: attempt.number, boxes: texts(boxes) }), kept: { ...kept, threshold, peers } }
  }

  private async masked(work: SecureWork & { kind: 'masked' }, attempt: Attempt, kept: SecureAttempt, visit?: SecureVisit) {
    if (!kept.messages.shares) throw new NoPart('the server asks for words before this browser has sent its shares')
    if (typeof work.boxes !== 'object' || work.boxes === null) throw new NoPart('the server’s work has no boxes')
    const boxes = new Map(Object.entries(work.boxes).map(([client, text]) => [Number(client), fromText(text, BOX)]))
    const peers = new Map(kept.peers!.map((peer) => [peer.client, peer]))
    const held = await openBoxes(attempt, this.client, kept.secrets, peers, boxes)
    if (held.size < kept.threshold!) throw new NoPart(`${held.size} neighbours are left, and ${kept.threshold} must be`)
    if (!visit) throw new NoPart('the visit of this round is gone')
    const codec = new Codec(kept.codec)
    const random = await randomWords(attempt, this.client, kept.secrets, codec.words)
    const { words } = codec.encode(visit.gradient, kept.weight, visit.examples, visit.loss, random)
    const masked = await mask(attempt, this.client, kept.secrets, [...held.keys()].map((i) => peers.get(i)!), words) // prettier-ignore
    return { body: packUpdate({ attempt: attempt.number, theta: visit.theta }, bytesOfWords(masked)), kept: { ...kept, held: [...held] } }
  }
}

function order(a: [number, number], b: [number, number]): number {
  return a[0] - b[0] || a[1] - b[1]
}

function whole(about: object, name: string, low = 1): number {
  const value = (about as Record<string, unknown>)[name]
  if (!Number.isSafeInteger(value) || (value as number) < low) throw new NoPart(`the server’s work has no ${name}`)
  return value as number
}

/** Each once, and in order. */
function survivors(work: SecureWork & { kind: 'unmask' }): number[] {
  if (!Array.isArray(work.survivors) || !work.survivors.every(Number.isSafeInteger)) throw new NoPart('the server’s work has no survivors')
  return [...new Set(work.survivors)].sort((a, b) => a - b)
}

function texts(shares: Map<number, Uint8Array>): Record<string, string> {
  return Object.fromEntries([...shares].map(([client, share]) => [client, toText(share)]))
}

function json(about: object): Uint8Array {
  return encoder.encode(JSON.stringify(about))
}
