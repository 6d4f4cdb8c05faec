/**
 * A browser tab as a device in live rounds: tflite_export/device/live/client.py for a browser.
 *
 * It may be closed anywhere. An update is kept before it is sent; when it was on its way, the same bytes are sent again
 * at the next start, and its head becomes current exactly if the server has counted it. The head, the examples and the
 * labels never leave the browser.
 */
import { floatsOf } from './bytes'
import type { Device } from './device'
import { messageOf } from './elements'
import { headBytes, isHead, readHead, thetaOf, type Head } from './head'
import type { LiveStore, Member, Pending, SecureVisit } from './live_store'
import { packUpdate, PHASES, PROTOCOL, publicText, newKey, stamp, type Phase, type ScoreRow, type SecureWork, type Settings, type Work } from './live_wire'
import { isManifest } from './manifest_hash'
import type { Examples } from './npz'
import { encodeGradient } from './payload'
import { Rests, secondsOf, type Sent } from './rests'
import { score } from './scores'
import { NoPart, SecureVisits } from './secure_visits'
import { sha256 } from './sha256'
import { received } from './transfer'

/** What happens, for the page to show. */
export type LiveEvent =
  | { kind: 'joined' | 'ready' | 'waiting' | 'done'; client: number }
  | { kind: 'visiting' | 'scoring' | 'scored'; round: number }
  | { kind: 'sending'; round: number; bytes: number }
  | { kind: 'counted'; round: number }
  | { kind: 'not counted' | 'not scored'; round: number; why: string }
  | { kind: 'message'; round: number; phase: Phase; bytes: number }
  | { kind: 'no part'; round: number; why: string }
  | { kind: 'resting'; round: number; seconds: number }
  | { kind: 'away'; why: string; seconds: number }

/** What computes: a `Device`. */
export type Computing = Pick<Device, 'pixels' | 'room' | 'receive' | 'round' | 'phi'>

export interface LiveOptions {
  store: LiveStore
  /** Starts the program for browsers of the server's bundle. */
  open: (program: Uint8Array) => Promise<Computing>
  tell: (event: LiveEvent) => void
  /** The address under which the server's /v1/ is. */
  server: string
  fetch?: typeof fetch
  /** Seconds since 1970. */
  clock?: () => number
  /** Waits; fulfilled at once if the signal is aborted. */
  sleep?: (seconds: number, signal: AbortSignal) => Promise<void>
}

/** The server refused what the device needs. */
export class RefusedError extends Error {
  constructor(readonly status: number, why: string) {
    super(`The server refused (${status}): ${why}`)
  }
}

class Stopped extends Error {}

interface Answer {
  status: number
  bytes: Uint8Array
  /** The server's reason, of an answer that refuses. */
  error: string
  /** The server's time, seconds since 1970, of an answer that refuses a signature. */
  time: number | null
}

interface Model {
  num_features: number
  num_classes: number
  num_backbone_weights: number
}

const WAIT = 25 // seconds of a poll
const TIMEOUT = 60 // seconds until an answer must have begun, and then the next part of it
const SLOWEST = 8000 // bytes in a second: what is sent has so much more time, since a browser does not say how much of it has gone
const LONGEST_PAUSE = 15 // seconds between attempts while the server is away
const NOT_COUNTED = [400, 409, 410, 413, 422] // the server has not counted this update, and never will
const LATER = [408, 425, 429] // and all from 500 on: the same request may do later
const NOT_TAKEN = [400, 409, 413, 422] // the server does not take this message of a secure round
const REST = 2 // seconds until a client that takes no part in an attempt asks again
const MOST_SCORE = 1e30 // a larger loss is not sent, nor one that is not finite
const STATE = /^\/v1\/secure\/\d+$/ // what is answered with one of these
const STATES = ['counted', 'open', 'over']
const FILES = /^\/v1\/(bundle|head|theta)\b/ // what is answered with a file, and not with JSON
const NOTHING = new Uint8Array()

/**
 * Begins a membership: a new key, the token and the examples are kept, and `LiveClient.run` joins with them.
 *
 * @throws Error: there is one, of which another tab may know: its key and its head are nowhere else.
 */
export async function begin(store: LiveStore, token: string, examples: Examples): Promise<void> {
  if (await store.identity()) throw new Error('This browser has joined already, in another tab. Go on there; or open this page again, and leave first.')
  await store.forget()
  await store.keepExamples(examples)
  await store.keepIdentity({ key: await newKey(), token, member: null })
}

export class LiveClient {
  private readonly stopping = new AbortController()
  private readonly fetch: typeof fetch
  private readonly clock: () => number
  private readonly sleep: (seconds: number, signal: AbortSignal) => Promise<void>
  private key!: CryptoKeyPair
  private client = -1
  private examples!: Examples
  private model!: Model
  private head!: Head
  private device!: Computing
  private theta = ''
  /** Seconds by which the server's clock is ahead of this machine's. */
  private ahead = 0
  private onlySecure = false
  private secure!: SecureVisits
  private readonly rests = new Rests()

  constructor(private readonly options: LiveOptions) {
    this.fetch = options.fetch ?? globalThis.fetch.bind(globalThis)
    this.clock = options.clock ?? (() => Date.now() / 1000)
    this.sleep = options.sleep ?? sleep
  }

  /**
   * Takes part until the run is over or `stop` is called.
   *
   * @throws RefusedError: the server does not take this device.
   * @throws Error: the round diverged, or what is kept cannot be read.
   */
  async run(): Promise<'done' | 'stopped'> {
    try {
      await this.start()
      while (await this.step());
      this.options.tell({ kind: 'done', client: this.client })
      return 'done'
    } catch (error) {
      if (error instanceof Stopped) return 'stopped'
      throw error
    }
  }

  /** Ends `run` soon; a later one goes on. */
  stop(): void {
    this.stopping.abort()
  }

  private async start(): Promise<void> {
    const { store, tell } = this.options
    const identity = await store.identity()
    const examples = await store.examples()
    if (!identity || !examples?.splits.train) throw new Error('This browser has not joined yet: give the enrolment token.')
    this.key = identity.key
    this.examples = examples
    if (!identity.member) {
      const { y } = examples.splits.train
      const about = { protocol: PROTOCOL, token: identity.token, examples: y.length, classes: examples.classes, key: await publicText(this.key), secure: 1 }
      const member = json(await this.ask('POST', '/v1/join', new TextEncoder().encode(JSON.stringify(about)), false)) as unknown as Member
      await store.keepIdentity({ key: identity.key, token: null, member })
      this.client = member.client
      this.onlySecure = member.secure === true
      tell({ kind: 'joined', client: this.client })
    } else {
      this.client = identity.member.client
      this.onlySecure = identity.member.secure === true
    }
    this.secure = new SecureVisits(store, this.client, this.key)
    const program = await this.getBundle()
    this.head = this.readHead((await store.head()) ?? (await this.firstHead()))
    await this.settleSecure()
    await this.settle()
    this.device = await this.options.open(program)
    this.checkExamples()
    tell({ kind: 'ready', client: this.client })
  }

  /** The program; with the manifest, it comes from the server once. */
  private async getBundle(): Promise<Uint8Array> {
    const { store } = this.options
    let bundle = await store.bundle()
    if (!bundle) {
      const manifest = await this.askFile('/v1/bundle/manifest.json', isManifest)
      const { files } = JSON.parse(new TextDecoder().decode(good(manifest).bytes)) as { files: Record<string, { sha256: string }> }
      const hash = files['program_browser.tflite']?.sha256
      const program = await this.askFile('/v1/bundle/program_browser.tflite', (file) => !hash || sha256(file) === hash)
      bundle = { manifest: manifest.bytes, program: good(program).bytes }
      if (!hash) throw new Error('The server’s manifest names no program for browsers.')
      await store.keepBundle(bundle)
    }
    this.model = (JSON.parse(new TextDecoder().decode(bundle.manifest)) as { model: Model }).model
    return bundle.program
  }

  private async firstHead(): Promise<Uint8Array> {
    const { bytes } = good(await this.askFile('/v1/head', isHead))
    this.readHead(bytes)
    await this.options.store.keepHead(bytes)
    return bytes
  }

  private readHead(file: Uint8Array): Head {
    const head = readHead(file, this.model.num_features, thetaOf(file))
    if (head.bias.length !== this.model.num_classes) throw new Error(`The head has ${head.bias.length} classes, and the program ${this.model.num_classes}.`)
    return head
  }

  private checkExamples(): void {
    for (const [split, found] of Object.entries(this.examples.splits)) {
      const { x, y } = found!
      if (x.length !== y.length * this.device.pixels) {
        throw new Error(`The ${split} examples have ${x.length / y.length} numbers each, and the program takes ${this.device.pixels}.`)
      }
      if (y.some((label) => label >= this.model.num_classes)) throw new Error(`A label of the ${split} examples is not below ${this.model.num_classes}.`)
    }
  }

  /** Asks for work, and does it. Returns whether the run goes on. */
  private async step(): Promise<boolean> {
    this.options.tell({ kind: 'waiting', client: this.client })
    const work = json(await this.ask('GET', `/v1/work?wait=${WAIT}&secure=1`)) as unknown as Work
    this.rests.begin(work)
    if (isSecure(work)) {
      await this.takePart(work)
      return true
    }
    await this.settleSecure()
    if (work.kind === 'visit') await this.visit(work)
    else if (work.kind === 'score') await this.scoreAll(work)
    else if (work.kind !== 'none' && work.kind !== 'done') await this.wait(LONGEST_PAUSE) // a newer server asks for more
    return work.kind !== 'done'
  }

  /** Fetches the theta of a round; false if the round ended meanwhile. */
  private async receive(name: string): Promise<boolean> {
    if (name === this.theta) return true
    const answer = await this.askFile(`/v1/theta/${name}`, (file) => sha256(file) === name)
    if (answer.status === 410) {
      await this.wait(0.2)
      return false
    }
    const { bytes } = good(answer)
    const theta = floatsOf(bytes)
    if (theta.length !== this.model.num_backbone_weights) throw new Error(`Theta has ${theta.length} numbers, and the program takes ${this.model.num_backbone_weights}.`)
    if (!theta.every(Number.isFinite)) throw new Error('Theta holds NaN or infinity.')
    await this.device.receive(theta)
    this.theta = name
    return true
  }

  private async visit(work: Work & { kind: 'visit' }): Promise<void> {
    if (this.onlySecure) throw new Error('The server asks for an update that is not masked, and this browser has joined a run with secure rounds: it sends none.')
    if (!(await this.receive(work.theta))) return
    this.options.tell({ kind: 'visiting', round: work.round })
    const { dtheta, head, loss, examples } = await this.compute(work.settings)
    const payload = encodeGradient(dtheta, work.payload)
    const about = { theta: work.theta, examples, loss, scores: await this.scores(work.splits, head) }
    const pending = { round: work.round, body: packUpdate(about, payload), head: headBytes(head, work.theta) }
    await this.options.store.keepPending(pending)
    await this.settle(pending)
  }

  /** The joint gradient and the new head, from the theta that the device has. */
  private async compute({ tau, beta, head_rate: rate, safeguard }: Settings): Promise<{ dtheta: Float32Array; head: Head; loss: number; examples: number }> {
    const { x, y } = this.examples.splits.train!
    const { dtheta, head, loss } = await this.device.round(x, y, this.head, { steps: tau - 1, beta, rate, safeguard })
    if (!Number.isFinite(loss) || ![dtheta, head.kernel, head.bias].every((part) => part.every(Number.isFinite))) {
      throw new Error('The round diverged: the gradient, the loss or the head is not finite. Nothing was kept.')
    }
    return { dtheta, head, loss, examples: y.length }
  }

  /** Sends the message of a phase; or refuses, and waits for the next attempt. */
  private async takePart(work: SecureWork): Promise<void> {
    const { store, tell } = this.options
    const { round, kind } = work
    let visit = kind === 'keys' || kind === 'masked' ? await store.visit() : undefined
    if (visit && visit.round !== round) {
      await this.settleSecure()
      visit = undefined
    }
    if (work.kind === 'keys' && visit?.theta !== work.theta) {
      if (!(await this.receive(work.theta))) return
      tell({ kind: 'visiting', round })
      const { dtheta, head, loss, examples } = await this.compute(work.settings)
      visit = { round, theta: work.theta, gradient: dtheta, loss, examples, head: headBytes(head, work.theta) }
      await store.keepVisit(visit)
    }
    let body: Uint8Array
    try {
      body = await this.secure.message(work, visit)
    } catch (error) {
      if (!(error instanceof NoPart)) throw error
      return this.refuse(work, error.message)
    }
    tell({ kind: 'message', round, phase: kind, bytes: body.length })
    const answer = await this.ask('PUT', `/v1/secure/${round}/${kind}`, body)
    if (NOT_TAKEN.includes(answer.status)) await this.refuse(work, `the server did not take ${kind}: ${answer.error}`)
    else if (answer.status !== 410) good(answer) // too late does no harm: there may be another attempt
  }

  private async refuse(work: SecureWork, why: string): Promise<void> {
    this.options.tell({ kind: 'no part', round: work.round, why })
    await this.secure.refuse(why)
    await this.wait(Math.min(secondsOf(work, REST), REST)) // the server goes on asking until the phase is over
  }

  /** Asks what became of a secure round, and makes its head current if it counts. */
  private async settleSecure(): Promise<void> {
    const { store, tell } = this.options
    const visit: SecureVisit | undefined = await store.visit()
    if (!visit) return
    const { round } = visit
    const state = await this.stateOf(round)
    if (state === 'open') return
    const counted = state === 'counted'
    await store.settleVisit(visit, counted)
    if (counted) {
      this.head = this.readHead(visit.head)
      tell({ kind: 'counted', round })
    } else {
      tell({ kind: 'not counted', round, why: 'it ended without this browser' })
    }
  }

  /** What became of this browser in a round, as the server says: 'counted', 'open' or 'over'. */
  private async stateOf(round: number): Promise<string> {
    return String(json(await this.ask('GET', `/v1/secure/${round}`)).state)
  }

  /**
   * Sends the update that is on its way, until the server has said whether it counts. One that is not masked may have been
   * sent before the browser was for secure rounds alone. It is not sent again: the server is asked.
   */
  private async settle(kept?: Pending): Promise<void> {
    const { store, tell } = this.options
    const pending = kept ?? (await store.pending())
    if (!pending) return
    const { round } = pending
    if (this.onlySecure) return this.end(pending, (await this.stateOf(round)) === 'counted', 'this browser sends no update that is not masked')
    tell({ kind: 'sending', round, bytes: pending.body.length })
    const answer = await this.ask('PUT', `/v1/update/${round}`, pending.body)
    const counted = answer.status === 200
    if (!counted && !NOT_COUNTED.includes(answer.status)) good(answer)
    await this.end(pending, counted, answer.error)
    if (counted) this.rests.taken('update')
    else await this.rest('update', answer.status, round)
  }

  /** Forgets an update whose answer has come, and if it counts, makes its head current. */
  private async end(pending: Pending, counted: boolean, why: string): Promise<void> {
    const { store, tell } = this.options
    await store.settle(pending, counted)
    if (counted) this.head = this.readHead(pending.head)
    tell(counted ? { kind: 'counted', round: pending.round } : { kind: 'not counted', round: pending.round, why })
  }

  /** Rests after a refusal. The server may ask for the same again, which would be refused again. */
  private async rest(what: Sent, status: number, round: number): Promise<void> {
    const seconds = this.rests.refused(what, status, round)
    if (seconds === null) return
    this.options.tell({ kind: 'resting', round, seconds })
    await this.wait(seconds)
  }

  private async scoreAll(work: Work & { kind: 'score' }): Promise<void> {
    if (!(await this.receive(work.theta))) return
    this.options.tell({ kind: 'scoring', round: work.round })
    const about = { theta: work.theta, scores: await this.scores(work.splits, this.head) }
    const answer = await this.ask('PUT', `/v1/score/${work.round}`, new TextEncoder().encode(JSON.stringify(about)))
    const refused = answer.status === 422
    const late = [409, 410].includes(answer.status) // which does no harm
    if (!refused && !late) good(answer)
    this.options.tell(refused ? { kind: 'not scored', round: work.round, why: answer.error } : { kind: 'scored', round: work.round })
    if (refused || late) await this.rest('scores', answer.status, work.round)
    else this.rests.taken('scores')
  }

  /** Loss and accuracy of a head on the splits that the device has. */
  private async scores(splits: string[], head: Head): Promise<ScoreRow[]> {
    const rows: ScoreRow[] = []
    for (const split of splits) {
      const found = this.examples.splits[split]
      if (!found?.y.length) continue
      const phi = await this.device.phi(found.x)
      const features = phi.length / found.y.length
      const each = Array.from(found.y, (_, i) => phi.subarray(i * features, (i + 1) * features))
      const { correct, examples, loss } = score(head, each, [...found.y])
      if (Math.abs(loss) < MOST_SCORE) rows.push({ split, examples, loss, score: correct / examples }) // and not NaN
    }
    return rows
  }

  /** Asks for a file, and again where what comes does not fit: it is damaged, or a proxy's page in the server's place. */
  private askFile(target: string, fits: (file: Uint8Array) => boolean): Promise<Answer> {
    return this.ask('GET', target, NOTHING, true, fits)
  }

  /** Sends a request until there is an answer, with longer and longer pauses; every time signed anew. */
  private async ask(method: string, target: string, body: Uint8Array = NOTHING, signed = true, fits?: (file: Uint8Array) => boolean): Promise<Answer> {
    let pause = 0.2
    let again = false
    for (;;) {
      this.check()
      const headers = signed ? await stamp(this.key, this.client, method, target, body, this.clock() + this.ahead) : {}
      let why: string
      try {
        const answer = await this.once(method, target, body, headers)
        if (answer.status === 401 && !again && /sign|clock/.test(answer.error)) {
          again = true // the server has just started, this machine slept, or a clock is wrong
          if (answer.time !== null) this.ahead = answer.time - this.clock()
          await this.wait(1.1)
          continue
        }
        if (answer.status === 200 && !isOurs(target, answer.bytes)) why = 'what answers is not the run’s server'
        else if (answer.status === 200 && fits && !fits(answer.bytes)) why = 'the file that came is damaged, or not of the run’s server'
        else if (answer.status < 500 && !LATER.includes(answer.status)) return answer
        else why = answer.error
      } catch (error) {
        this.check()
        why = messageOf(error)
      }
      const seconds = pause * (0.5 + Math.random() / 2) // not all devices at once
      this.options.tell({ kind: 'away', why, seconds })
      await this.wait(seconds)
      pause = Math.min(2 * pause, LONGEST_PAUSE)
    }
  }

  private async once(method: string, target: string, body: Uint8Array, headers: Record<string, string>): Promise<Answer> {
    const limit = new AbortController()
    const abort = () => limit.abort()
    const start = (seconds = TIMEOUT) => setTimeout(abort, 1000 * seconds)
    let timer = start(TIMEOUT + body.length / SLOWEST)
    this.stopping.signal.addEventListener('abort', abort)
    try {
      const url = new URL(target.slice(1), this.options.server)
      const sent = body.length ? { body: body as Uint8Array<ArrayBuffer> } : {}
      const response = await this.fetch(url, { method, headers, cache: 'no-store', signal: limit.signal, ...sent })
      const bytes = await received(response, () => {
        clearTimeout(timer)
        timer = start()
      })
      return { status: response.status, bytes, ...(response.ok ? { error: '', time: null } : reason(bytes)) }
    } finally {
      clearTimeout(timer)
      this.stopping.signal.removeEventListener('abort', abort)
    }
  }

  private async wait(seconds: number): Promise<void> {
    await this.sleep(seconds, this.stopping.signal)
    this.check()
  }

  private check(): void {
    if (this.stopping.signal.aborted) throw new Stopped()
  }
}

function isSecure(work: Work): work is SecureWork {
  return (PHASES as readonly string[]).includes(work.kind)
}

/** Whether this answer with status 200 is of a server of live rounds: a proxy may have a page for the time without one. */
function isOurs(target: string, bytes: Uint8Array): boolean {
  if (FILES.test(target)) return true // whoever asks for one says what fits: `askFile`
  try {
    const said = JSON.parse(new TextDecoder().decode(bytes)) as Record<'client' | 'classes' | 'counted' | 'state', unknown> | null
    if (typeof said !== 'object' || said === null) return false
    if (target === '/v1/join') return isFrom(0, said.client) && isFrom(1, said.classes) // the token is forgotten with it
    if (target.startsWith('/v1/update/')) return said.counted === true
    return !STATE.test(target) || STATES.includes(said.state as string)
  } catch {
    return false
  }
}

function isFrom(low: number, value: unknown): boolean {
  return Number.isInteger(value) && (value as number) >= low
}

function good(answer: Answer): Answer {
  if (answer.status !== 200) throw new RefusedError(answer.status, answer.error)
  return answer
}

function json(answer: Answer): Record<string, unknown> {
  return JSON.parse(new TextDecoder().decode(good(answer).bytes)) as Record<string, unknown>
}

function reason(bytes: Uint8Array): Pick<Answer, 'error' | 'time'> {
  const text = new TextDecoder().decode(bytes)
  try {
    const { error, time } = JSON.parse(text) as { error: unknown; time?: unknown }
    return { error: String(error), time: Number.isFinite(time) ? (time as number) : null }
  } catch {
    return { error: text.slice(0, 200), time: null }
  }
}

function sleep(seconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer)
      signal.removeEventListener('abort', end)
      resolve()
    }
    const timer = setTimeout(end, 1000 * seconds)
    signal.addEventListener('abort', end)
    if (signal.aborted) end()
  })
}
