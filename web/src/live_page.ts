/** The part of the page that joins a live run. */
import type { ClientFile, Manifest } from './bundle'
import { Device } from './device'
import { byId, bytesText, download, make, messageOf } from './elements'
import type { FederationLive } from './federation_live'
import { begin, LiveClient, type LiveEvent } from './live_client'
import { BrowserStore, keptAs } from './live_store'
import { readExamples, type Examples } from './npz'
import type { Runtime } from './runtime'

const LINES = 12

type State = 'new' | 'starting' | 'running' | 'away' | 'paused' | 'elsewhere' | 'done' | 'failed'

export class LivePage {
  private readonly section = byId('live', HTMLElement)
  private readonly form = byId('join-form', HTMLFormElement)
  private readonly token = byId('live-token', HTMLInputElement)
  private readonly files = byId('live-files', HTMLInputElement)
  private readonly running = byId('live-running', HTMLElement)
  private readonly status = byId('live-status', HTMLElement)
  private readonly pauseButton = byId('live-pause', HTMLButtonElement)
  private client: LiveClient | null = null
  private finished: Promise<void> = Promise.resolve()
  private runtime: Runtime | null = null
  private round = 0
  /** Lets another tab be the client; null if this tab is not. */
  private letGo: (() => void) | null = null

  private constructor(
    private readonly store: BrowserStore,
    private readonly start: (program: Uint8Array) => Promise<Runtime>,
    private readonly own: () => Promise<Examples | null>,
    examples: number | undefined,
    private readonly view: Pick<FederationLive, 'self'>,
  ) {
    this.form.onsubmit = (event) => {
      event.preventDefault()
      void this.join()
    }
    this.pauseButton.onclick = () => (this.client ? this.client.stop() : this.run())
    byId('live-head', HTMLButtonElement).onclick = () => void this.saveHead()
    byId('live-leave', HTMLButtonElement).onclick = () => void this.leave()
    if (examples) byId('live-own', HTMLElement).textContent = `Without files, the ${examples} examples of this page’s client are taken.`
  }

  /**
   * For a site whose host runs live rounds. If this browser has joined, it goes on.
   *
   * @param view the picture of all members, which this browser is one of.
   */
  static async open(
    manifest: Manifest,
    client: () => Promise<ClientFile | null>,
    start: (program: Uint8Array) => Promise<Runtime>,
    view: Pick<FederationLive, 'self'>,
  ): Promise<void> {
    if (!globalThis.isSecureContext || !('locks' in navigator)) {
      byId('join-form', HTMLElement).hidden = true
      byId('live-status', HTMLElement).textContent = 'A browser can join by https or on localhost only: it has no keys elsewhere.'
      return
    }
    const own = async () => {
      const file = await client()
      return file && { classes: manifest.model.num_classes, splits: { train: { x: file.x, y: file.labels } } }
    }
    let store: BrowserStore
    let joined: boolean
    try {
      store = await BrowserStore.open()
      joined = (await store.identity()) !== undefined
    } catch (error) {
      byId('join-form', HTMLElement).hidden = true
      byId('live-status', HTMLElement).textContent = `This browser keeps nothing (${messageOf(error)}), so it cannot join: allow this page to store data.`
      return
    }
    const page = new LivePage(store, start, own, manifest.browser.client?.examples, view)
    if (joined) page.run()
    else page.show('new', '')
  }

  private async join(): Promise<void> {
    const button = byId('join', HTMLButtonElement)
    button.disabled = true
    try {
      const token = this.token.value.trim()
      if (!token) throw new Error('Joining needs the token that the server’s operator gave you.')
      const files = await Promise.all([...(this.files.files ?? [])].map(async (f) => [f.name, new Uint8Array(await f.arrayBuffer())] as const))
      const examples = files.length ? await readExamples(new Map(files)) : await this.own()
      if (!examples) throw new Error('Choose the files with your examples.')
      if (!(await alone(() => begin(this.store, token, examples)))) throw new Error('Another tab of this browser has joined.')
      void navigator.storage?.persist?.() // the browser is asked to keep the head when its disk gets full
      this.token.value = ''
      this.run()
    } catch (error) {
      this.show('new', messageOf(error), true)
    } finally {
      button.disabled = false
    }
  }

  private run(): void {
    if (this.client) return
    const client = new LiveClient({
      store: this.store,
      open: (program) => this.device(program),
      tell: (event) => void this.tell(event),
      server: new URL('.', document.baseURI).href,
    })
    this.client = client
    this.pauseButton.textContent = 'Pause'
    this.show('starting', 'Joining …')
    let paused = false
    this.finished = this.locked(client)
      .then((end) => {
        paused = end === 'stopped'
        this.show(paused ? 'paused' : 'done', paused ? 'Paused.' : 'The run is over. Your head stays here.')
      })
      .catch(async (error: unknown) => {
        const identity = await this.store.identity().catch(() => null) // null: the browser has closed the store, or emptied its disk
        const begun = identity === null || Boolean(identity?.member)
        if (!begun) await this.store.forget() // nothing was computed yet: ask for the token again
        this.show(begun ? 'failed' : 'new', messageOf(error), true)
      })
      .finally(() => {
        if (!paused) this.letGo?.() // or else a tab that waits would go on in the place of this one
        this.client = null
        this.pauseButton.textContent = 'Go on'
        void this.facts()
      })
  }

  /** Runs as the only tab of this browser. */
  private async locked(client: LiveClient): Promise<'done' | 'stopped'> {
    if (!this.letGo && !(await this.lock({ ifAvailable: true }))) {
      this.show('elsewhere', 'Another tab of this browser is the client. This one goes on when that is closed.')
      await this.lock({})
    }
    return client.run()
  }

  /** Takes the lock by which one tab of a browser is the device, and keeps it until `letGo`. Returns whether it could. */
  private lock(options: LockOptions): Promise<boolean> {
    return new Promise((answer, refuse) => {
      const keep = (lock: Lock | null) => {
        answer(lock !== null)
        return lock && new Promise<void>((free) => (this.letGo = () => ((this.letGo = null), free())))
      }
      navigator.locks.request(keptAs(), options, keep).catch(refuse)
    })
  }

  private async device(program: Uint8Array): Promise<Device> {
    this.runtime?.stop()
    this.runtime = await this.start(program)
    return Device.open(this.runtime, null)
  }

  private async tell(event: LiveEvent): Promise<void> {
    if (event.kind === 'away') return this.show('away', `The server is away (${event.why}). Trying again in ${Math.ceil(event.seconds)} s.`)
    if ('round' in event) this.round = event.round
    this.show('running', text(event))
    if (event.kind !== 'waiting') this.log(text(event))
    await this.facts()
  }

  private async facts(): Promise<void> {
    const read = await Promise.all([this.store.identity(), this.store.counts()]).catch(() => null)
    if (!read) return // the run itself says what is wrong
    const [identity, { counted, refused, sent }] = read
    const member = identity?.member
    const facts: [string, string][] = [
      ['client', member ? String(member.client) : '–'],
      ['round', `${this.round || '–'}${member ? ` of ${member.rounds}` : ''}`],
      ['updates that were counted', String(counted)],
      ['updates that were not', String(refused)],
      ['sent as updates', bytesText(sent)],
    ]
    byId('live-facts', HTMLElement).replaceChildren(
      ...facts.map(([name, value]) => make('tr', {}, make('th', { scope: 'row' }, name), make('td', {}, value))),
    )
  }

  private log(line: string): void {
    const log = byId('live-log', HTMLElement)
    log.prepend(make('li', {}, `${new Date().toLocaleTimeString()} ${line}`))
    while (log.children.length > LINES) log.lastElementChild!.remove()
  }

  private show(state: State, status: string, failed = false): void {
    this.section.dataset.state = state
    this.form.hidden = state !== 'new'
    this.running.hidden = state === 'new' || state === 'elsewhere'
    this.status.textContent = status
    this.status.classList.toggle('error', failed)
    this.view.self(status, state !== 'new')
  }

  private async saveHead(): Promise<void> {
    const head = await this.store.head()
    if (head) download('head.bin', head)
  }

  private async leave(): Promise<void> {
    if (!confirm('Forget the key, the head and the examples? They are nowhere else.')) return
    this.client?.stop()
    await this.finished
    if (this.letGo) await this.store.forget().finally(this.letGo)
    else if (!(await alone(() => this.store.forget()))) return this.show('failed', 'Another tab of this browser is the client: leave there.', true)
    this.runtime?.stop()
    this.runtime = null
    byId('live-log', HTMLElement).replaceChildren()
    this.show('new', 'Everything of this client was removed from this browser.')
  }
}

/** Does something if no tab of this browser is the client now; returns whether it did. */
function alone(work: () => Promise<void>): Promise<boolean> {
  return navigator.locks.request(keptAs(), { ifAvailable: true }, async (lock) => {
    if (lock) await work()
    return lock !== null
  })
}

/** What the messages of a secure round are; docs/secure.md. */
const MESSAGES = { keys: 'keys', shares: 'closed shares', masked: 'masked numbers', unmask: 'shares that take masks off' }

function text(event: Exclude<LiveEvent, { kind: 'away' }>): string {
  switch (event.kind) {
    case 'joined':
      return `Joined as client ${event.client}.`
    case 'ready':
      return `Ready as client ${event.client}.`
    case 'waiting':
      return `Client ${event.client} waits for work.`
    case 'done':
      return 'The run is over.'
    case 'visiting':
      return `Round ${event.round}: computing.`
    case 'sending':
      return `Round ${event.round}: sending ${bytesText(event.bytes)}.`
    case 'message':
      return `Round ${event.round}: sending ${MESSAGES[event.phase]}, ${bytesText(event.bytes)}.`
    case 'no part':
      return `Round ${event.round}: this browser takes no part in this attempt (${event.why}).`
    case 'resting':
      return `Round ${event.round}: the server refused it. Asking for work again in ${Math.ceil(event.seconds)} s.`
    case 'counted':
      return `Round ${event.round}: counted.`
    case 'not counted':
      return `Round ${event.round}: not counted (${event.why}).`
    case 'scoring':
      return `Round ${event.round}: computing scores.`
    case 'not scored':
      return `Round ${event.round}: its scores were not taken (${event.why}).`
    case 'scored':
      return `Round ${event.round}: scores sent.`
  }
}
