/** A client in live rounds without a browser: signatures, files of examples, and what is counted when it dies anywhere. */
import { execFileSync } from 'node:child_process'
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { deflateRawSync } from 'node:zlib'
import { describe, expect, it, vi } from 'vitest'
import { floatsOf } from '../src/bytes'
import { crc32 } from '../src/crc32'
import type { RoundResult, RoundSettings } from '../src/device'
import { headBytes, readHead, thetaOf, type Head } from '../src/head'
import { begin, LiveClient, type LiveEvent } from '../src/live_client'
import { bytesOf, counted, NO_COUNTS, type Counts, type Identity, type LiveBundle, type LiveStore, type Pending, type SecureAttempt, type SecureVisit } from '../src/live_store'
import { manifestHash } from '../src/manifest_hash'
import { newKey, packUpdate, publicText, stamp } from '../src/live_wire'
import { readExamples, type Examples } from '../src/npz'
import { readSafetensors } from '../src/safetensors'
import { sha256 } from '../src/sha256'
import { fixture, harness, launch, noBrowser } from './browser'
import { serve } from './server'

const bytes = (...path: string[]) => new Uint8Array(readFileSync(fixture('live', ...path)))
const python = process.env.TFPFL_WEB_PYTHON ?? join(import.meta.dirname, '../../.venv/bin/python')

interface Signed {
  key: string
  headers: Record<string, string>
  method: string
  target: string
  sha256: string
}

/** Which of the signatures the server would take. */
function verified(requests: Signed[]): boolean[] {
  const input = JSON.stringify(requests)
  return JSON.parse(execFileSync(python, [join(import.meta.dirname, 'live.py'), 'verify'], { input }).toString()) as boolean[]
}

/** A signed request, and what must not pass for it. */
async function requests(sign: (method: string, target: string, body: number[]) => Promise<Signed>): Promise<Signed[]> {
  const good = await sign('PUT', '/v1/update/3', [1, 2, 250])
  const empty = await sign('GET', '/v1/work?wait=25', [])
  const nonce = Buffer.alloc(12, 1).toString('base64')
  return [
    good,
    empty,
    { ...good, target: '/v1/update/4' },
    { ...good, method: 'POST' },
    { ...good, sha256: empty.sha256 },
    { ...good, key: (await sign('GET', '/', [])).key },
    { ...good, headers: { ...good.headers, 'Tfpfl-Nonce': nonce } },
    { ...good, headers: { ...good.headers, 'Tfpfl-Time': '1790000001' } },
  ]
}
const EXPECTED = [true, true, false, false, false, false, false, false]

describe('signatures', () => {
  const sign = async (key: CryptoKeyPair, method: string, target: string, body: number[]): Promise<Signed> => {
    const sent = Uint8Array.from(body)
    const headers = await stamp(key, 7, method, target, sent, 1790000000.9)
    return { key: await publicText(key), headers, method, target, sha256: sha256(sent) }
  }

  it('of Node.js are what Python checks, and of nothing else', async () => {
    const [key, other] = [await newKey(), await newKey()]
    const all = await requests((method, target, body) => sign(target === '/' ? other : key, method, target, body))
    expect(all[0]!.headers).toMatchObject({ 'Tfpfl-Client': '7', 'Tfpfl-Time': '1790000000' })
    expect(new Set(all.slice(0, 2).map(({ headers }) => headers['Tfpfl-Nonce'])).size).toBe(2)
    expect(verified(all)).toEqual(EXPECTED)
    expect(key.privateKey.extractable).toBe(false)
  })

  it.skipIf(noBrowser)('of Chromium are, too, with a key that was kept and cannot be read', async () => {
    const browser = await launch()
    const host = await serve(harness())
    const page = await browser.newPage()
    await page.goto(host.url)
    await page.waitForFunction(() => globalThis.harness)
    const all = await page.evaluate(async () => {
      const { newKey, publicText, stamp, BrowserStore } = globalThis.harness
      const store = await BrowserStore.open()
      await store.keepIdentity({ key: await newKey(), token: null, member: null })
      const { key } = (await (await BrowserStore.open()).identity())!
      const read = await crypto.subtle.exportKey('pkcs8', key.privateKey).then(() => 'read', () => 'refused') // prettier-ignore
      const other = await newKey()
      const sign = async (key: CryptoKeyPair, method: string, target: string, body: number[]) => ({
        key: await publicText(key),
        headers: await stamp(key, 7, method, target, Uint8Array.from(body), 1790000000.9),
        method,
        target,
      })
      return {
        read,
        good: await sign(key, 'PUT', '/v1/update/3', [1, 2, 250]),
        empty: await sign(key, 'GET', '/v1/work?wait=25', []),
        other: await sign(other, 'GET', '/', []),
      }
    })
    expect(all.read).toBe('refused')
    const signed: Record<string, Signed> = {
      '/v1/update/3': { ...all.good, sha256: sha256(Uint8Array.of(1, 2, 250)) },
      '/v1/work?wait=25': { ...all.empty, sha256: sha256(new Uint8Array()) },
      '/': { ...all.other, sha256: '' },
    }
    expect(verified(await requests((_, target) => Promise.resolve(signed[target]!)))).toEqual(EXPECTED)
    await browser.close()
    await host.close()
  })
})

describe('examples', () => {
  const small = () => {
    const stored = readSafetensors(bytes('small.safetensors'))
    return { x: stored.get('x')!.data, y: stored.get('y')!.data }
  }
  const data = (name: string) => bytes('data', '9', name)

  it('are read as Python wrote them, compressed or not', async () => {
    const files = new Map(['train.npz', 'test.npz', 'about.json'].map((name) => [name, data(name)]))
    const found = await readExamples(files)
    expect(found.classes).toBe((JSON.parse(readFileSync(fixture('live', 'data', '9', 'about.json'), 'utf8')) as { classes: number }).classes)
    expect(found.splits.train).toEqual(small())
    expect(found.splits.test!.x.length).toBe(64 * found.splits.test!.y.length)
    const compressed = await readExamples(new Map([['small.npz', bytes('small.npz')]]))
    expect(compressed.splits.train).toEqual(small())
    expect(compressed.classes).toBe(Math.max(...small().y) + 1)
  })

  it('that are something else are refused by name', async () => {
    const refused = (files: [string, Uint8Array][], why: RegExp) => expect(readExamples(new Map(files))).rejects.toThrow(why)
    const train = data('train.npz')
    await refused([], /Choose train.npz/)
    await refused([['test.npz', data('test.npz')], ['other.npz', train]], /other.npz: the files of a client are/)
    await refused([['train.npz', train.slice(0, -30)]], /train.npz is no .npz file/)
    await refused([['train.npz', train.map((byte, at) => (at === 240 ? byte ^ 0x40 : byte))]], /train.npz is no .npz file, or is damaged/)
    await refused([['train.npz', train.slice(100)]], /train.npz is no .npz file/)
    await refused([['train.npz', new Uint8Array(10)]], /train.npz is no .npz file/)
    await refused([['train.npz', zipped({ 'x.npy': npy('<f4', '(2, 1)', 8) })]], /has no array y/)
    await refused([['train.npz', zipped({ 'x.npy': npy('<f4', '(2, 1)', 8), 'y.npy': npy('<i8', '(3,)', 24) })]], /found \[2, 1\] and \[3\]/)
    await refused([['train.npz', zipped({ 'x.npy': npy('<f4', '(2, 1)', 8), 'y.npy': npy('<U1', '(2,)', 8) })]], /array of <U1 cannot be read/)
    await refused([['train.npz', zipped({ 'x.npy': npy('<f4', '(2, 1)', 8, 0xff), 'y.npy': npy('<i8', '(2,)', 16) })]], /NaN/)
    await refused([['train.npz', zipped({ 'x.npy': npy('<f4', '(2, 1)', 8), 'y.npy': npy('<i8', '(2,)', 16, 0xff) })]], /labels from 0/)
    await refused([['train.npz', train], ['about.json', new TextEncoder().encode('{"classes": 0}')]], /no number of classes/)
    await refused([['train.npz', train], ['about.json', new TextEncoder().encode('{')]], /not JSON/)
  })
})

/** A NumPy array, all of whose bytes are `fill`. */
function npy(kind: string, shape: string, size: number, fill = 0): Uint8Array {
  const header = Buffer.from(`{'descr': '${kind}', 'fortran_order': False, 'shape': ${shape}, }\n`)
  const length = Buffer.from([header.length & 255, header.length >> 8])
  return Buffer.concat([Buffer.from([0x93]), Buffer.from('NUMPY'), Buffer.from([1, 0]), length, header, Buffer.alloc(size, fill)])
}

function zipped(entries: Record<string, Uint8Array>): Uint8Array {
  const [files, directory]: [Buffer[], Buffer[]] = [[], []]
  let at = 0
  for (const [name, content] of Object.entries(entries)) {
    const packed = deflateRawSync(content)
    const local = Buffer.alloc(30)
    local.writeUInt32LE(0x04034b50)
    local.writeUInt16LE(name.length, 26)
    const central = Buffer.alloc(46)
    central.writeUInt32LE(0x02014b50)
    central.writeUInt16LE(8, 10)
    central.writeUInt32LE(crc32(content), 16)
    central.writeUInt32LE(packed.length, 20)
    central.writeUInt16LE(name.length, 28)
    central.writeUInt32LE(at, 42)
    files.push(local, Buffer.from(name), packed)
    directory.push(central, Buffer.from(name))
    at += 30 + name.length + packed.length
  }
  const end = Buffer.alloc(22)
  end.writeUInt32LE(0x06054b50)
  end.writeUInt16LE(directory.length / 2, 10)
  end.writeUInt32LE(at, 16)
  return Buffer.concat([...files, ...directory, end])
}

/** The store of a browser that lives on when a tab is closed. */
class MemoryStore implements LiveStore {
  private kept: { identity?: Identity; bundle?: LiveBundle; examples?: Examples; head?: Uint8Array; pending?: Pending; counts?: Counts; visit?: SecureVisit; attempt?: SecureAttempt } = {}
  identity = async () => this.kept.identity
  keepIdentity = async (identity: Identity) => void (this.kept.identity = identity)
  bundle = async () => this.kept.bundle
  keepBundle = async (bundle: LiveBundle) => void (this.kept.bundle = bundle)
  examples = async () => this.kept.examples
  keepExamples = async (examples: Examples) => void (this.kept.examples = examples)
  head = async () => this.kept.head
  keepHead = async (head: Uint8Array) => void (this.kept.head = head)
  pending = async () => this.kept.pending
  keepPending = async (pending: Pending) => void (this.kept.pending = pending)
  counts = async () => this.kept.counts ?? NO_COUNTS
  forget = async () => void (this.kept = {})
  async settle(pending: Pending, taken: boolean): Promise<void> {
    const { pending: _, ...rest } = this.kept
    this.kept = { ...rest, ...(taken ? { head: pending.head } : {}), counts: counted(await this.counts(), pending.body.length, taken) }
  }
  visit = async () => this.kept.visit
  keepVisit = async (visit: SecureVisit) => void (this.kept.visit = visit)
  attempt = async () => this.kept.attempt
  keepAttempt = async (attempt: SecureAttempt) => void (this.kept.attempt = attempt)
  async settleVisit(visit: SecureVisit, taken: boolean): Promise<void> {
    const { visit: _, attempt, ...rest } = this.kept
    this.kept = { ...rest, ...(taken ? { head: visit.head } : {}), counts: counted(await this.counts(), bytesOf(attempt), taken) }
  }
}

const ROUNDS = 5
const EXAMPLES: Examples = { classes: 2, splits: { train: { x: Float32Array.of(1, 2, 3), y: Int32Array.of(0, 1, 1) } } }
const MANIFEST = { hash: '', model: { num_features: 1, num_classes: 2, num_backbone_weights: 1 }, files: {} as Record<string, { sha256: string }> }
const PROGRAM = Uint8Array.of(1, 2, 3)
MANIFEST.files['program_browser.tflite'] = { sha256: sha256(PROGRAM) }
MANIFEST.hash = manifestHash(JSON.stringify(MANIFEST))

const thetaBytes = (round: number) => new Uint8Array(Float32Array.of(round).buffer)
const json = (status: number, value: unknown) => new Response(JSON.stringify(value), { status })

/** A server of one client. It notes what it counts, and takes nothing in the rounds of `late`. */
class OneClient {
  round = 1
  /** {round: the bytes that were counted}. */
  readonly counted = new Map<number, string>()
  /** The head with which each counted update was computed, as the update says. */
  readonly heads: number[] = []
  joins = 0
  /** What it answers to scores, which it then asks for once. */
  scoring: number | null = null
  readonly scored: unknown[] = []
  /** The scores that come with an update. */
  rows: unknown = [{ split: 'train', examples: 3, loss: expect.closeTo(Math.log(2), 6), score: 1 / 3 }]

  constructor(private readonly late: Record<number, number> = {}) {}

  answer(method: string, path: string, body: Uint8Array): Response {
    if (path === '/v1/join') {
      this.joins++
      const about = JSON.parse(new TextDecoder().decode(body)) as Record<string, unknown>
      expect(about).toMatchObject({ protocol: 1, token: 'a token', examples: 3, classes: 2 })
      return json(200, { client: 4, classes: 2, rounds: ROUNDS })
    }
    if (path === '/v1/bundle/manifest.json') return json(200, MANIFEST)
    if (path === '/v1/bundle/program_browser.tflite') return new Response(PROGRAM)
    if (path === '/v1/head') return new Response(headBytes({ kernel: Float32Array.of(0, 0), bias: Float32Array.of(0, 0) }, '00'.repeat(32)) as Uint8Array<ArrayBuffer>)
    if (path === '/v1/work') {
      if (this.round > ROUNDS) return json(200, { kind: 'done' })
      if (this.scoring && this.round === 3 && !this.scored.length) return json(200, { kind: 'score', round: 2, theta: sha256(thetaBytes(3)), splits: ['train'] })
      const settings = { tau: 3, beta: 0.5, head_rate: 0.25, safeguard: false }
      return json(200, { kind: 'visit', round: this.round, theta: sha256(thetaBytes(this.round)), settings, payload: 'float32', splits: ['train'] })
    }
    const theta = /^\/v1\/theta\/(\w+)$/.exec(path)
    if (theta) return theta[1] === sha256(thetaBytes(this.round)) ? new Response(thetaBytes(this.round)) : json(410, { error: 'old' })
    if (path === '/v1/score/2') {
      this.scored.push((JSON.parse(new TextDecoder().decode(body)) as { scores: unknown }).scores)
      return json(this.scoring!, { error: 'these scores are not taken' })
    }
    const update = /^\/v1\/update\/(\d+)$/.exec(path)
    expect(update && method, path).toBe('PUT')
    const [round, sent] = [Number(update![1]), sha256(body)]
    if (this.counted.has(round)) return this.counted.get(round) === sent ? json(200, { counted: true, round }) : json(409, { error: 'another' })
    if (round !== this.round) return json(410, { error: 'over' })
    this.round++
    if (this.late[round]) return json(this.late[round], { error: 'late' })
    const told = JSON.parse(new TextDecoder().decode(body.slice(4, 4 + new DataView(body.buffer, body.byteOffset).getUint32(0, true)))) as Record<string, unknown>
    expect(told).toMatchObject({ theta: sha256(thetaBytes(round)), examples: 3, loss: 0.5 })
    expect(told.scores).toEqual(this.rows)
    this.counted.set(round, sent)
    this.heads.push(floatsOf(body.slice(-4))[0]!)
    return json(200, { counted: true, round })
  }
}

/** The head after a round is 10 times the head before, and the round: it says which rounds it has seen, in order. */
const after = (head: number, round: number) => 10 * head + round
function computing() {
  let theta = 0
  return {
    pixels: 1,
    room: 2,
    receive: async (found: Float32Array) => void (theta = found[0]!),
    phi: async (x: Float32Array) => new Float32Array(x.length),
    round: async (x: Float32Array, y: Int32Array, head: Head, settings: RoundSettings): Promise<RoundResult> => {
      expect([x.length, y.length, settings]).toEqual([3, 3, { steps: 2, beta: 0.5, rate: 0.25, safeguard: false }])
      const kernel = Float32Array.of(after(head.kernel[0]!, theta), 0)
      return { dtheta: Float32Array.of(head.kernel[0]!), head: { kernel, bias: head.bias }, loss: 0.5, parts: {} }
    },
  }
}

/**
 * Runs a client to its end. It dies whenever `dies` says so: then nothing it began goes on, and another one starts with
 * what the store has. `dies` is asked before and after everything that is written or sent.
 */
async function untilDone(server: OneClient, dies: () => boolean, faults: () => boolean = () => false): Promise<{ head: number; counts: Counts; events: LiveEvent[] }> {
  const store = new MemoryStore()
  const events: LiveEvent[] = []
  await begin(store, 'a token', EXAMPLES)
  for (let starts = 0; starts < 200; starts++) {
    let dead = false
    let die = () => {}
    const death = new Promise<'dead'>((resolve) => (die = () => resolve('dead')))
    const alive = async () => {
      dead ||= dies()
      if (!dead) return
      die()
      await new Promise(() => {}) // for ever
    }
    const mortal = new Proxy(store, {
      get(target, name) {
        const value = Reflect.get(target, name) as unknown
        if (typeof value !== 'function') return value
        return async (...given: unknown[]) => {
          await alive()
          const result: unknown = await value.apply(target, given)
          await alive()
          return result
        }
      },
    })
    const fetch = async (url: URL | RequestInfo, init?: RequestInit) => {
      await alive()
      if (faults()) throw new TypeError('no network')
      const { pathname } = new URL(String(url))
      const answer = server.answer(init!.method!, pathname, (init!.body as Uint8Array) ?? new Uint8Array())
      await alive()
      return faults() ? json(502, { error: 'a proxy' }) : answer
    }
    const client = new LiveClient({
      store: mortal,
      open: async () => computing(),
      tell: (event) => events.push(event),
      server: 'http://host/',
      fetch,
      clock: () => 1790000000,
      sleep: async () => {},
    })
    const end = await Promise.race([client.run(), death])
    if (end === 'dead') continue
    expect(end).toBe('done')
    expect(await store.pending()).toBeUndefined()
    const file = (await store.head())!
    return { head: readHead(file, 1, thetaOf(file)).kernel[0]!, counts: await store.counts(), events }
  }
  throw new Error('it never comes to its end')
}

/** The head that has seen the rounds that the server has counted, each once and in order. */
/** How a client's run ends, with the fake timers of a test, which it ends. */
async function endOf(client: LiveClient): Promise<string> {
  let end = ''
  void client.run().then((found) => (end = found))
  for (let second = 0; second < 20_000 && !end; second++) {
    await vi.advanceTimersByTimeAsync(1000)
    await new Promise(setImmediate) // keys and signatures take real time
  }
  client.stop()
  vi.useRealTimers()
  return end
}

const exact = (server: OneClient) => [...server.counted.keys()].reduce(after, 0)

describe('a client', () => {
  it('visits every round, and its head has seen each once', async () => {
    const server = new OneClient()
    const { head, counts, events } = await untilDone(server, () => false)
    expect(head).toBe(12345)
    expect(server.heads).toEqual([0, 1, 12, 123, 1234])
    expect(counts).toMatchObject({ counted: 5, refused: 0 })
    expect(events.map(({ kind }) => kind).slice(0, 6)).toEqual(['joined', 'ready', 'waiting', 'visiting', 'sending', 'counted'])
    expect(events.at(-1)).toEqual({ kind: 'done', client: 4 })
  })

  for (const status of [409, 410, 422]) {
    it(`keeps its head where the server says ${status}`, async () => {
      const server = new OneClient({ 2: status, 4: status })
      const { head, counts, events } = await untilDone(server, () => false)
      expect(head).toBe(135)
      expect(server.heads).toEqual([0, 1, 13])
      expect(counts).toMatchObject({ counted: 3, refused: 2 })
      expect(events).toContainEqual({ kind: 'not counted', round: 2, why: 'late' })
    })
  }

  for (const late of [{}, { 2: 410 }] as Record<number, number>[]) {
    it(`loses nothing and counts nothing twice, wherever it dies${2 in late ? ', also in a round that goes on without it' : ''}`, async () => {
      let moments = 0
      await untilDone(new OneClient(late), () => (moments++, false))
      expect(moments).toBeGreaterThan(70)
      for (let moment = 0; moment < moments; moment++) {
        const server = new OneClient(late)
        let now = 0
        const { head, counts } = await untilDone(server, () => now++ === moment)
        // A round is never counted without its head, nor a head kept without its round.
        expect(head, `moment ${moment}`).toBe(exact(server))
        expect(server.heads, `moment ${moment}`).toEqual([...server.counted.keys()].map((_, i, all) => all.slice(0, i).reduce(after, 0)))
        expect(counts.counted, `moment ${moment}`).toBe(server.counted.size)
        expect(server.counted.size).toBe(2 in late ? 4 : 5)
      }
    })
  }

  it('dies again and again, with a network that fails, and comes to the same end', async () => {
    for (const every of [23, 29, 31, 37]) {
      const server = new OneClient({ 3: 409 })
      let [moment, request] = [0, 0]
      const { head, events } = await untilDone(server, () => ++moment % every === 0, () => ++request % 7 === 0)
      expect(head).toBe(1245)
      expect(server.heads).toEqual([0, 1, 12, 124])
      expect(events.some(({ kind }) => kind === 'away')).toBe(true)
    }
  })

  it('stops where the server refuses it, and keeps what it has', async () => {
    const store = new MemoryStore()
    await begin(store, 'a token', EXAMPLES)
    const answers: Response[] = [json(401, { error: 'sign it again' }), json(403, { error: 'this token was revoked' })]
    const options = { store, open: async () => computing(), tell: () => {}, server: 'http://host/', sleep: async () => {} }
    await expect(new LiveClient({ ...options, fetch: async () => answers.shift()! }).run()).rejects.toThrow('The server refused (403): this token was revoked')
    expect(answers).toEqual([])
    expect((await store.identity())!.token).toBe('a token')
    const client = new LiveClient({ ...options, fetch: () => new Promise((_, reject) => setTimeout(() => reject(new TypeError('away')), 10)) })
    setTimeout(() => client.stop(), 50)
    expect(await client.run()).toBe('stopped')
  })

  it('is not begun anew by a tab that does not know of it: its key and its head stay', async () => {
    const store = new MemoryStore()
    await begin(store, 'a token', EXAMPLES)
    const options = { store, open: async () => computing(), tell: () => {}, server: 'http://host/', sleep: async () => {}, clock: () => 1790000000 }
    const server = new OneClient()
    const fetch = async (url: URL | RequestInfo, init?: RequestInit) => server.answer(init!.method!, new URL(String(url)).pathname, (init!.body as Uint8Array) ?? new Uint8Array())
    await new LiveClient({ ...options, fetch }).run()
    const [identity, head] = [await store.identity(), await store.head()]
    await expect(begin(store, 'another token', EXAMPLES)).rejects.toThrow(/has joined already/)
    expect([await store.identity(), await store.head()]).toEqual([identity, head])
    await store.forget() // the user has left
    await begin(store, 'another token', EXAMPLES)
    expect((await store.identity())!.token).toBe('another token')
  })

  /** Runs a client with one server to its end. */
  async function run(server: OneClient, answer: (headers: Record<string, string>) => Response | null = () => null, phi = (x: Float32Array) => new Float32Array(x.length)) {
    const store = new MemoryStore()
    await begin(store, 'a token', EXAMPLES)
    const fetch = async (url: URL | RequestInfo, init?: RequestInit) =>
      answer(init!.headers as Record<string, string>) ?? server.answer(init!.method!, new URL(String(url)).pathname, (init!.body as Uint8Array) ?? new Uint8Array())
    const options = { store, open: async () => ({ ...computing(), phi: async (x: Float32Array) => phi(x) }), tell: () => {}, server: 'http://host/', sleep: async () => {}, fetch, clock: () => 1790000000 }
    return new LiveClient(options).run()
  }

  for (const status of [200, 409, 410, 422]) {
    it(`goes on where the answer to its scores is ${status}`, async () => {
      const server = new OneClient()
      server.scoring = status
      expect(await run(server)).toBe('done')
      expect(server.counted.size).toBe(ROUNDS)
      expect(server.scored).toEqual([[{ split: 'train', examples: 3, loss: expect.closeTo(Math.log(2), 6), score: 1 / 3 }]])
    })
  }

  /**
   * Runs a client with a server that asks for this work, one after the other, and answers what is sent with these statuses.
   *
   * @returns the seconds that the client rests after each answer, and what it tells of that.
   */
  async function rests(work: { kind: 'visit' | 'score'; round: number; seconds?: number; status: number }[]) {
    const store = new MemoryStore()
    await begin(store, 'a token', EXAMPLES)
    const settings = { tau: 3, beta: 0.5, head_rate: 0.25, safeguard: false }
    const server = new OneClient()
    const [found, told]: [number[], number[]] = [[], []]
    let at = -1
    const fetch = async (url: URL | RequestInfo, init?: RequestInit) => {
      const { pathname } = new URL(String(url))
      if (pathname === '/v1/work') {
        if (++at === work.length) return json(200, { kind: 'done' })
        found.push(0)
        return json(200, { theta: sha256(thetaBytes(1)), settings, payload: 'float32', splits: [], ...work[at] })
      }
      if (!/update|score/.test(pathname)) return server.answer(init!.method!, pathname, (init!.body as Uint8Array) ?? new Uint8Array())
      const { status } = work[at]!
      return json(status, status === 200 ? { counted: true } : { error: 'no' })
    }
    const sleep = async (seconds: number) => void (found[at]! += seconds)
    const tell = (event: LiveEvent) => void (event.kind === 'resting' && told.push(event.seconds))
    const client = new LiveClient({ store, open: async () => computing(), tell, server: 'http://host/', sleep, fetch, clock: () => 1790000000 })
    expect(await client.run()).toBe('done')
    expect(told).toEqual(found.filter((seconds) => seconds > 0))
    return found
  }

  it('rests after a refusal, longer after each further one in a row, and as an update does after scores', async () => {
    for (const kind of ['visit', 'score'] as const) {
      const refused = { kind, round: 1, seconds: 60, status: 422 }
      expect(await rests(Array(8).fill(refused))).toEqual([5, 10, 20, 40, 80, 160, 180, 180])
      expect(await rests([refused, refused, { ...refused, round: 2, status: 200 }, { ...refused, round: 3 }])).toEqual([5, 10, 0, 5])
      expect(await rests([{ ...refused, seconds: 2.5 }, refused])).toEqual([2.5, 10]) // no longer than the round, at first
      expect(await rests([{ kind, round: 1, status: 422 }])).toEqual([5])
      const late = { ...refused, status: 410 }
      expect(await rests([late, late, { ...late, round: 2 }])).toEqual([0, 0, 0])
      const another = { ...refused, status: 409 }
      expect(await rests([another, { ...another, round: 2 }, { ...another, round: 2 }])).toEqual([0, 0, 5])
    }
    expect(await rests([{ kind: 'visit', round: 1, status: 400 }, { kind: 'visit', round: 1, status: 413 }])).toEqual([5, 10])
    const both = (['visit', 'score', 'visit', 'score'] as const).map((kind) => ({ kind, round: 1, status: 422 }))
    expect(await rests(both)).toEqual([5, 5, 10, 10])
  })

  it('stops while it rests', async () => {
    const store = new MemoryStore()
    await begin(store, 'a token', EXAMPLES)
    const server = new OneClient({ 1: 422 })
    const fetch = async (url: URL | RequestInfo, init?: RequestInit) => server.answer(init!.method!, new URL(String(url)).pathname, (init!.body as Uint8Array) ?? new Uint8Array())
    const tell = (event: LiveEvent) => void (event.kind === 'resting' && client.stop())
    const client: LiveClient = new LiveClient({ store, open: async () => computing(), tell, server: 'http://host/', fetch, clock: () => 1790000000 })
    expect(await client.run()).toBe('stopped') // without a `sleep` of the test: it would take 5 s
    expect([server.round, await store.pending()]).toEqual([2, undefined])
  })

  for (const state of ['counted', 'open', 'over']) {
    it(`asks what became of an update if it has joined secure rounds since: ${state}`, async () => {
      const store = new MemoryStore()
      await begin(store, 'a token', EXAMPLES)
      const identity = (await store.identity())!
      await store.keepIdentity({ ...identity, token: null, member: { client: 4, classes: 2, rounds: ROUNDS, secure: true } })
      const heads = [0, 7].map((number) => headBytes({ kernel: Float32Array.of(number, 0), bias: Float32Array.of(0, 0) }, '00'.repeat(32)))
      await store.keepHead(heads[0]!)
      await store.keepPending({ round: 1, body: Uint8Array.of(1), head: heads[1]! })
      const server = new OneClient()
      server.round = ROUNDS + 1
      const asked: string[] = []
      const answers = [json(502, { error: 'a proxy' }), json(200, { soon: true }), json(200, { round: 1, state })]
      const left: (Pending | undefined)[] = []
      const fetch = async (url: URL | RequestInfo, init?: RequestInit) => {
        const { pathname } = new URL(String(url))
        asked.push(`${init!.method} ${pathname}`)
        if (!pathname.startsWith('/v1/secure/')) return server.answer(init!.method!, pathname, new Uint8Array())
        left.push(await store.pending())
        return answers.shift()!
      }
      const events: LiveEvent[] = []
      const tell = (event: LiveEvent) => void events.push(event)
      const client = new LiveClient({ store, open: async () => computing(), tell, server: 'http://host/', sleep: async () => {}, fetch, clock: () => 1790000000 })
      expect(await client.run()).toBe('done')
      const taken = state === 'counted'
      const file = (await store.head())!
      expect(readHead(file, 1, thetaOf(file)).kernel[0]).toBe(taken ? 7 : 0)
      expect(asked.filter((one) => /update|secure/.test(one))).toEqual(Array(3).fill('GET /v1/secure/1'))
      expect([left.every((pending) => pending?.round === 1), await store.pending()]).toEqual([true, undefined])
      const why = 'this browser sends no update that is not masked'
      expect(events).toContainEqual(taken ? { kind: 'counted', round: 1 } : { kind: 'not counted', round: 1, why })
      expect(await store.counts()).toMatchObject({ counted: Number(taken), refused: Number(!taken) })
    })
  }

  it('leaves out the scores of a split where the loss is not finite, or as good as', async () => {
    for (const value of [Infinity, NaN, 3e38]) {
      const server = new OneClient()
      server.scoring = 200
      server.rows = []
      expect(await run(server, () => null, (x) => new Float32Array(x.length).fill(value))).toBe('done')
      expect(server.scored).toEqual([[]])
    }
  })

  it('signs with the time of the server where a clock is wrong', async () => {
    for (const off of [600, -86400]) {
      const server = new OneClient()
      let refused = 0
      const answer = (headers: Record<string, string>) => {
        const time = headers['Tfpfl-Time']
        const here = 1790000000 - off + 0.4
        if (time === undefined || Math.abs(Number(time) - here) < 2) return null
        refused++
        return json(401, { error: `the device's clock is ${off} s off: set it`, time: here })
      }
      expect(await run(server, answer)).toBe('done')
      expect([server.counted.size, server.joins, refused]).toEqual([ROUNDS, 1, 1])
    }
  })

  it('takes the page of a proxy for no answer, whatever its status is', async () => {
    const server = new OneClient()
    server.scoring = 200
    const store = new MemoryStore()
    await begin(store, 'a token', EXAMPLES)
    const seen = new Set<string>()
    const pages = ['<p>We will be back soon.</p>', '"soon"', 'null', '{"soon": true}']
    const fetch = async (url: URL | RequestInfo, init?: RequestInit) => {
      const { pathname } = new URL(String(url))
      for (const page of /^\/v1\/(join|work|score|update)/.test(pathname) ? pages.slice(0, /join|update/.test(pathname) ? 4 : 3) : []) {
        const first = `${init!.method} ${pathname} ${page} ${server.round}`
        if (!seen.has(first)) return (seen.add(first), new Response(page))
      }
      return server.answer(init!.method!, pathname, (init!.body as Uint8Array) ?? new Uint8Array())
    }
    const why: string[] = []
    const tell = (event: LiveEvent) => void (event.kind === 'away' && why.push(event.why))
    const client = new LiveClient({ store, open: async () => computing(), tell, server: 'http://host/', sleep: async () => {}, fetch, clock: () => 1790000000 })
    expect(await client.run()).toBe('done')
    expect([server.joins, server.heads, server.scored.length]).toEqual([1, [0, 1, 12, 123, 1234], 1])
    expect([new Set(why), why.length]).toEqual([new Set(['what answers is not the run’s server']), seen.size])
    const file = (await store.head())!
    expect([readHead(file, 1, thetaOf(file)).kernel[0], (await store.counts()).counted]).toEqual([12345, ROUNDS])
  })

  it('takes neither a page nor a damaged file for one of the server', async () => {
    const server = new OneClient()
    const store = new MemoryStore()
    await begin(store, 'a token', EXAMPLES)
    const seen = new Set<string>()
    const pages = ['<p>Your room number, please.</p>', '"soon"', 'null', '{"soon": true}', '', 'TFPFLH01']
    const files = /^\/v1\/(bundle\/.*|head|theta\/.*)$/
    const fetch = async (url: URL | RequestInfo, init?: RequestInit) => {
      const { pathname } = new URL(String(url))
      const answer = server.answer(init!.method!, pathname, (init!.body as Uint8Array) ?? new Uint8Array())
      if (!files.test(pathname)) return answer
      const page = pages.find((text) => !seen.has(`${pathname} ${text}`))
      if (page !== undefined) return (seen.add(`${pathname} ${page}`), new Response(page))
      if (seen.has(`${pathname} damaged`)) return answer
      seen.add(`${pathname} damaged`)
      const bytes = new Uint8Array(await answer.arrayBuffer())
      bytes[Math.max(0, bytes.length - 5)]! ^= 1 // of the manifest, a digit of the program's sha256; it stays JSON
      return new Response(bytes)
    }
    const why: string[] = []
    const tell = (event: LiveEvent) => void (event.kind === 'away' && why.push(event.why))
    const client = new LiveClient({ store, open: async () => computing(), tell, server: 'http://host/', sleep: async () => {}, fetch, clock: () => 1790000000 })
    expect(await client.run()).toBe('done')
    expect([server.joins, server.heads]).toEqual([1, [0, 1, 12, 123, 1234]])
    expect([new Set(why), why.length]).toEqual([new Set(['the file that came is damaged, or not of the run’s server']), seen.size])
    expect(seen.size).toBe((3 + ROUNDS) * (pages.length + 1)) // the manifest, the program, the head, and the thetas
  })

  it('takes a theta that comes slowly, and asks again for one that stops on its way', async () => {
    vi.useFakeTimers({ toFake: ['setTimeout', 'clearTimeout'] })
    const store = new MemoryStore()
    await begin(store, 'a token', EXAMPLES)
    const server = new OneClient()
    let asked = 0
    const fetch = async (url: URL | RequestInfo, init?: RequestInit) => {
      const { pathname } = new URL(String(url))
      const answer = server.answer(init!.method!, pathname, (init!.body as Uint8Array) ?? new Uint8Array())
      if (!pathname.startsWith('/v1/theta/')) return answer
      const bytes = new Uint8Array(await answer.arrayBuffer())
      const stops = ++asked === 1
      const timers: ReturnType<typeof setTimeout>[] = []
      const slow = new ReadableStream<Uint8Array>({
        start(controller) {
          init!.signal!.addEventListener('abort', () => (timers.forEach(clearTimeout), controller.error(new Error('given up'))))
          for (const i of stops ? [0] : bytes.keys()) timers.push(setTimeout(() => controller.enqueue(bytes.slice(i, i + 1)), 40_000 * (i + 1)))
          if (!stops) timers.push(setTimeout(() => controller.close(), 40_000 * bytes.length + 1))
        },
      })
      return new Response(slow as ReadableStream<Uint8Array<ArrayBuffer>>)
    }
    const events: LiveEvent[] = []
    const options = { store, open: async () => computing(), tell: (event: LiveEvent) => void events.push(event), server: 'http://host/', sleep: async () => {}, clock: () => 1790000000 }
    const end = await endOf(new LiveClient({ ...options, fetch }))
    expect([end, asked, server.counted.size]).toEqual(['done', ROUNDS + 1, ROUNDS])
    expect(events.flatMap((event) => (event.kind === 'away' ? [event.why] : []))).toEqual(['given up'])
  })

  it('sends an update over a slow line, and again where it stops on its way', async () => {
    vi.useFakeTimers({ toFake: ['setTimeout', 'clearTimeout'] })
    const store = new MemoryStore()
    await begin(store, 'a token', EXAMPLES)
    const server = new OneClient()
    let sent = 0
    const fetch = async (url: URL | RequestInfo, init?: RequestInit) => {
      const { pathname } = new URL(String(url))
      const body = (init!.body as Uint8Array) ?? new Uint8Array()
      if (pathname.startsWith('/v1/update/')) {
        const stops = ++sent === 1
        await new Promise<void>((arrived, refuse) => {
          const timer = setTimeout(arrived, stops ? 10 ** 7 : body.length / 10) // 10 kB in a second
          init!.signal!.addEventListener('abort', () => (clearTimeout(timer), refuse(new Error('given up'))))
        })
      }
      return server.answer(init!.method!, pathname, body)
    }
    const device = computing()
    const round: typeof device.round = async (...given) => ({ ...(await device.round(...given)), dtheta: new Float32Array(250_000) })
    const events: LiveEvent[] = []
    const options = { store, open: async () => ({ ...device, round }), tell: (event: LiveEvent) => void events.push(event), server: 'http://host/', sleep: async () => {}, clock: () => 1790000000 }
    const end = await endOf(new LiveClient({ ...options, fetch }))
    expect([end, sent, server.counted.size]).toEqual(['done', ROUNDS + 1, ROUNDS])
    expect(events.flatMap((event) => (event.kind === 'away' ? [event.why] : []))).toEqual(['given up'])
  })

  it('packs an update as Python does', () => {
    const body = packUpdate({ a: 1 }, Uint8Array.of(7, 8))
    expect([...body]).toEqual([7, 0, 0, 0, ...Buffer.from('{"a":1}'), 7, 8])
  })
})
