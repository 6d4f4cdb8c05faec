/** Secure aggregation: what a browser computes is that of Python, bit for bit; and what it refuses. */
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { describe, expect, it } from 'vitest'
import { Codec } from '../src/secure_codec'
import { answer, checkPeer, checkThreshold, openBoxes, type Secrets } from '../src/secure_exchange'
import { bytesOfNumber, drawn, fromHex, newExchange, numberOf, ORDER, agree, privateKey, publicPoint, split, type Attempt } from '../src/secure_masks'
import { secureVectors, type Vectors } from './harness/secure_vectors'
import { harness, launch, noBrowser } from './browser'
import { serve } from './server'

type Entries = Record<string, unknown>
const FILE = join(import.meta.dirname, '../../tests/device/secure_vectors.json')
const FOUND = JSON.parse(readFileSync(FILE, 'utf8')) as Vectors
const ATTEMPT: Attempt = { run: FOUND.run, round: FOUND.round, number: FOUND.attempt }
const bytes = (text: string) => new Uint8Array(Buffer.from(text, 'base64'))

/** All that was computed is in the file, and is the same there. */
function compare(computed: Record<string, unknown>): void {
  const clients = computed.clients as Record<string, Entries>
  expect(Object.keys(clients)).toEqual(Object.keys(FOUND.clients))
  for (const [client, about] of Object.entries(clients)) {
    const wanted = FOUND.clients[client] as unknown as Entries
    expect(Object.keys(about).length).toBe(Number(client) === FOUND.dropped ? 9 : 10)
    for (const [name, value] of Object.entries(about)) expect(value, `${name} of client ${client}`).toEqual(wanted[name])
  }
  expect(computed.pairs).toEqual(FOUND.pairs.flatMap((pair) => [pair, pair])) // from the side of either
  expect(computed.codec_cases).toEqual((FOUND.codec_cases as unknown as Entries[]).map(({ norm, words }) => ({ norm, words })))
}

describe('the test vectors', () => {
  it('are computed by Node.js', async () => compare(await secureVectors(FOUND)))

  it.skipIf(noBrowser)('are computed by Chromium', async () => {
    const browser = await launch()
    const host = await serve(harness())
    const page = await browser.newPage()
    await page.goto(host.url)
    await page.waitForFunction(() => globalThis.harness)
    compare(await page.evaluate((found) => globalThis.harness.secureVectors(found), FOUND))
    await browser.close()
    await host.close()
  })
})

describe('a client', () => {
  const told = (client: number, change: Partial<Vectors['clients'][string]['told']> = {}) => {
    const about = { ...FOUND.clients[client]!.told, ...change }
    return [{ client: about.client, mask: bytes(about.mask), share: bytes(about.share) }, bytes(about.identity), bytes(about.signature)] as const
  }

  it('refuses keys that others signed, or in another attempt', async () => {
    await checkPeer(ATTEMPT, ...told(2))
    for (const name of ['mask', 'signature', 'client'] as const) {
      await expect(checkPeer(ATTEMPT, ...told(2, { [name]: FOUND.clients[5]!.told[name] }))).rejects.toThrow('signature')
    }
    await expect(checkPeer({ ...ATTEMPT, number: 2 }, ...told(2))).rejects.toThrow('signature')
    const point = bytes(FOUND.clients[2]!.told.mask)
    point[40]! ^= 1
    await expect(publicPoint(point)).rejects.toThrow('no point of the curve')
    await expect(publicPoint(point.slice(1))).rejects.toThrow('no point of the curve')
  })

  it('refuses boxes that were changed, or are of others', async () => {
    const { private: secret, told: own } = FOUND.clients[5]!
    const secrets: Secrets = {
      mask: { secret: fromHex(secret.mask), point: bytes(own.mask) },
      share: { secret: fromHex(secret.share), point: bytes(own.share) },
      seed: fromHex(secret.seed),
      rounding: fromHex(secret.rounding),
    }
    const peers = new Map([2, 7].map((client) => [client, told(client)[0]]))
    const box = fromHex(FOUND.clients[2]!.boxes[5]!)
    const changed = box.slice()
    changed[20]! ^= 1
    const opened = (sender: number, content: Uint8Array) => openBoxes(ATTEMPT, 5, secrets, peers, new Map([[sender, content]]))
    expect((await opened(2, box)).get(2)!.seed.length).toBe(32)
    for (const [sender, content] of [[2, changed], [2, box.slice(0, 20)], [7, box]] as const) await expect(opened(sender, content)).rejects.toThrow('changed on its way') // prettier-ignore
    await expect(opened(9, box)).rejects.toThrow('no neighbour')
  })

  it('refuses thresholds with which a half could open its masks, and survivors with whom the sum would say too much', () => {
    for (const [t, k] of [[1, 2], [1, 1], [2, 1], [4, 3], [2, 5], [5, 10]] as const) expect(() => checkThreshold(t, k)).toThrow('not safe') // prettier-ignore
    for (const [t, k] of [[2, 2], [2, 3], [6, 10]] as const) expect(() => checkThreshold(t, k)).not.toThrow() // prettier-ignore
    const [seed, mask] = [Uint8Array.of(1), Uint8Array.of(2)]
    const held = new Map([2, 7, 11].map((i) => [i, { seed, mask }]))
    expect(answer(held, [2, 7], 2)).toEqual({ self: new Map([[2, seed], [7, seed]]), mask: new Map([[11, mask]]) }) // prettier-ignore
    expect(() => answer(held, [2, 2], 2)).toThrow('nothing is revealed')
    expect(() => answer(held, [2, 3], 2)).toThrow('closed no box')
  })

  it('makes keys that agree, and shares of which so many give the secret', async () => {
    const [a, b] = [await newExchange(), await newExchange()]
    expect(await agree(await privateKey(a), b.point)).toEqual(await agree(await privateKey(b), a.point))
    expect(a.secret).not.toEqual(b.secret)
    const secret = bytesOfNumber(drawn())
    const shares = split(secret, [0, 3, 8, 20], 3)
    const some = [3, 20, 0].map((i) => [BigInt(i) + 1n, numberOf(shares.get(i)!)] as const)
    const modulo = (x: bigint) => ((x % ORDER) + ORDER) % ORDER
    const power = (x: bigint, n: bigint): bigint => (n === 0n ? 1n : modulo(power(modulo(x * x), n >> 1n) * (n & 1n ? x : 1n)))
    const parts = some.map(([x, value]) => some.reduce((product, [y]) => (x === y ? product : modulo(product * y * power(modulo(y - x), ORDER - 2n))), value))
    expect(bytesOfNumber(modulo(parts.reduce((sum, part) => sum + part)))).toEqual(secret)
    expect(() => split(new Uint8Array(32).fill(255), [1, 2], 2)).toThrow('below the order')
  })

  it('encodes only what fits into 32 bits', () => {
    const numbers = { ...FOUND.codec, size: 2 }
    const encode = (gradient: number[], weight = 0.1, examples = 1, loss = 1) => new Codec(numbers).encode(Float32Array.from(gradient), weight, examples, loss, new Uint32Array(5))
    expect(encode([1, 2]).words.length).toBe(5)
    expect(() => encode([1, NaN])).toThrow('not finite')
    expect(() => encode([1, 2], 0.6)).toThrow('out of range')
    expect(() => encode([1, 2], 0.1, 101)).toThrow('out of range')
    expect(() => encode([1, 2, 3])).toThrow('2 numbers')
    for (const change of [{ exponent: 29 }, { loss_exponent: 17 }, { clip: 0 }, { clients: 2 ** 30 }, { exponent: 1.5 }, { size: 0 }]) {
      expect(() => new Codec({ ...numbers, ...change }), JSON.stringify(change)).toThrow()
    }
  })
})
