/** What a client computes in a secure round, from the secrets of the test vectors, with the names of their file. */
import { Codec, type CodecNumbers } from '../../src/secure_codec'
import { answer, checkPeer, close, mask, openBoxes, randomWords, type Peer, type Secrets } from '../../src/secure_exchange'
import { addStream, agree, derive, fromHex, hex, info, keystream, numberOf, pairKey, privateKey, shareKey, type Attempt } from '../../src/secure_masks'

export interface ClientVectors {
  private: Record<'mask' | 'share' | 'seed' | 'rounding', string>
  told: { client: number; identity: string; mask: string; share: string; signature: string }
  coefficients: string[]
  boxes: Record<string, string>
  weight: number
  examples: number
  loss: number
  gradient: number[]
  unmask?: { self: Record<string, string>; mask: Record<string, string> }
}
export interface Vectors {
  run: string
  round: number
  attempt: number
  threshold: number
  dropped: number
  codec: CodecNumbers
  clients: Record<string, ClientVectors>
  pairs: { clients: [number, number] }[]
  codec_cases: (CodecNumbers & { weight: number; examples: number; loss: number; gradient: number[]; random: number[] })[]
}

const fromText = (text: string) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))
const floats = (bits: number[]) => new Float32Array(Uint32Array.from(bits).buffer)

export async function secureVectors(found: Vectors): Promise<Record<string, unknown>> {
  const attempt: Attempt = { run: found.run, round: found.round, number: found.attempt }
  const peers = new Map<number, Peer>()
  for (const { told } of Object.values(found.clients)) {
    const peer = { client: told.client, mask: fromText(told.mask), share: fromText(told.share) }
    await checkPeer(attempt, peer, fromText(told.identity), fromText(told.signature))
    peers.set(peer.client, peer)
  }
  const secretsOf = (client: number): Secrets => {
    const { mask, share, seed, rounding } = found.clients[client]!.private
    const { mask: maskPoint, share: sharePoint } = peers.get(client)!
    return { mask: { secret: fromHex(mask), point: maskPoint }, share: { secret: fromHex(share), point: sharePoint }, seed: fromHex(seed), rounding: fromHex(rounding) }
  }
  const clients: Record<string, unknown> = {}
  for (const [name, about] of Object.entries(found.clients)) {
    const [client, secrets] = [Number(name), secretsOf(Number(name))]
    const others = [...peers.values()].filter((peer) => peer.client !== client)
    const [draws, nonces] = [about.coefficients.map((text) => numberOf(fromHex(text))), Object.values(about.boxes).map((box) => fromHex(box.slice(0, 24)))]
    const boxes = await close(attempt, client, secrets, others, found.threshold, () => draws.shift()!, () => nonces.shift()!)
    const given = new Map(others.map((peer) => [peer.client, fromHex(found.clients[peer.client]!.boxes[client]!)]))
    const held = await openBoxes(attempt, client, secrets, new Map(others.map((peer) => [peer.client, peer])), given)
    const codec = new Codec(found.codec)
    const random = await randomWords(attempt, client, secrets, codec.words)
    const { words, norm } = codec.encode(floats(about.gradient), about.weight, about.examples, about.loss, random)
    const masked = await mask(attempt, client, secrets, others, words)
    const own = await derive(secrets.seed, info(attempt, 'self', client))
    const texts = (shares: Map<number, Uint8Array>) => Object.fromEntries([...shares].map(([i, share]) => [i, hex(share)]))
    const survivors = others.map((peer) => peer.client).filter((i) => i !== found.dropped)
    const told = answer(held, survivors, found.threshold)
    clients[name] = {
      self_key: hex(own),
      self_words: [...(await keystream(own, 4))],
      rounding_key: hex(await derive(secrets.rounding, info(attempt, 'rounding', client))),
      boxes: texts(boxes),
      holds: Object.fromEntries([...held].map(([i, both]) => [i, [hex(both.seed), hex(both.mask)]])),
      random: [...random],
      norm,
      words: [...words],
      masked: [...masked],
      ...(client === found.dropped ? {} : { unmask: { self: texts(told.self), mask: texts(told.mask) } }),
    }
  }
  const pairs = []
  for (const { clients: both } of found.pairs) {
    for (const [client, other] of [both, [...both].reverse()] as [number, number][]) {
      const [mine, theirs] = [secretsOf(client), peers.get(other)!]
      const [maskKey, share] = [await privateKey(mine.mask), await privateKey(mine.share)]
      const key = await pairKey(attempt, maskKey, client, theirs.mask, other)
      const words = new Uint32Array(4)
      await addStream(words, key, 1)
      pairs.push({
        clients: both,
        mask_agreement: hex(await agree(maskKey, theirs.mask)),
        mask_key: hex(key),
        mask_words: [...words],
        share_agreement: hex(await agree(share, theirs.share)),
        share_keys: [hex(await shareKey(attempt, share, theirs.share, ...both)), hex(await shareKey(attempt, share, theirs.share, both[1], both[0]))],
      })
    }
  }
  const cases = found.codec_cases.map(({ weight, examples, loss, gradient, random, ...numbers }) => {
    const { words, norm } = new Codec(numbers).encode(floats(gradient), weight, examples, loss, Uint32Array.from(random))
    return { norm, words: [...words] }
  })
  return { clients, pairs, codec_cases: cases }
}
