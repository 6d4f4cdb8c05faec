/** The part of the page that shows the live rounds of its server: who is here, rounds as they close, bytes. */
import './federation.css'
import { byId, kilobytes, make, messageOf, percent } from './elements'
import { drawChart } from './federation_chart'
import { Packets } from './packets'

/** What the server shows to everyone: tfpfl/live/shown.py. */
export interface Shown {
  doing: 'none' | 'visit' | 'score' | 'done'
  saved: number
  /** The first saved round whose scores may still come. */
  scoring?: number | null
  rounds: number
  clients: number
  wait_for: number
  counts: Record<State, number>
  round: { number: number; invited: number; came: number } | null
  bytes: { up: number; down: number }
  score: { name: string; fraction: boolean }
  history: Row[]
}
export interface Row {
  round: number
  clients: number
  seconds: number
  bytes_up: number
  bytes_down: number
  score: number | null
}
type State = 'late' | 'working' | 'sent' | 'here'

const EVERY = 1000 // milliseconds between two questions
const PATIENT = 5000 // the same while the server is away
const AGAIN = 20 // rounds that are asked for again; servers of before do not say which are still being scored
const PHONES = 60 // that are drawn
const PLACES = 20 // that are drawn for members, whether they are here or not
const ROWS = 6 // of the table
const STATES: State[] = ['sent', 'working', 'late', 'here']

export class FederationLive {
  private readonly section = byId('federation', HTMLElement)
  private readonly view = byId('federation-live', HTMLElement)
  private readonly phones = byId('crowd-members', HTMLElement)
  private readonly packets = new Packets(byId('crowd-stage', HTMLElement), byId('crowd-hub', HTMLElement), false)
  private readonly rows = new Map<number, Row>()
  private from = 0
  private before: Shown | null = null
  private over = false
  private near = false
  private asking = false

  /** @param join shows the form with which this browser joins. */
  constructor(join: () => void) {
    byId('crowd-join', HTMLButtonElement).onclick = join
    this.section.dataset.live = 'new'
    new IntersectionObserver(
      (entries) => {
        this.near = entries.at(-1)!.isIntersecting
        void this.ask()
      },
      { rootMargin: '300px' },
    ).observe(this.view)
    document.addEventListener('visibilitychange', () => void this.ask())
  }

  /** Says what this browser does in the run. @param joined whether it is a member, so that it need not join. */
  self(text: string, joined: boolean): void {
    byId('crowd-self', HTMLElement).textContent = joined ? text : 'Your browser can be one of them.'
    byId('crowd-join', HTMLButtonElement).hidden = joined
    byId('crowd-you', HTMLElement).classList.toggle('joined', joined)
  }

  /** Asks the server again and again, as long as somebody can see what comes of it. */
  private async ask(): Promise<void> {
    if (this.asking) return
    this.asking = true
    while (this.near && !document.hidden && !this.over) {
      let pause = EVERY
      try {
        this.show(await this.fetch())
      } catch (error) {
        this.away(messageOf(error))
        pause = PATIENT
      }
      await new Promise((done) => setTimeout(done, pause))
    }
    this.asking = false
  }

  private async fetch(): Promise<Shown> {
    const { found, from } = await allRounds(this.rows, this.from, async (since) => {
      const response = await fetch(`v1/shown?since=${since}`, { cache: 'no-store' })
      if (!response.ok) throw new Error(response.status === 404 ? 'this server does not show how its rounds go' : `it answered ${response.status}`)
      return (await response.json()) as Shown
    })
    this.from = from
    return found
  }

  private away(why: string): void {
    const { before } = this
    this.over = before !== null && before.saved >= before.rounds
    this.section.dataset.live = this.over ? 'done' : 'away'
    byId('crowd-status', HTMLElement).textContent = this.over ? over(before!) : `The server does not answer (${why}). Trying again.`
  }

  private show(now: Shown): void {
    const { before } = this
    const text = (id: string, words: string) => {
      const element = byId(id, HTMLElement)
      if (element.textContent !== words) element.textContent = words // a screen reader hears of what is new only
    }
    text('crowd-about', `The server of this page runs a federation of up to ${now.clients} members, each on a device of its own. In every round it sends them θ, and they send back how θ should change. Their examples stay with them.`)
    text('crowd-status', status(now))
    text('crowd-round', `Round ${now.round?.number ?? now.saved} of ${now.rounds}`)
    text('crowd-bytes', `${kilobytes(now.bytes.down)} sent to members, ${kilobytes(now.bytes.up)} sent back`)
    text('crowd-score', now.score.fraction ? 'Held-out examples that are right, mean of the members' : `${now.score.name}, mean of the members`)
    const scored = [...this.rows.values()].filter((row) => row.score !== null).sort((a, b) => a.round - b.round)
    byId('crowd-chart', SVGSVGElement).parentElement!.hidden = !now.score.fraction
    if (now.score.fraction) drawChart(byId('crowd-chart', SVGSVGElement), [{ name: 'all', className: 'own', points: scored.map(({ round, score }) => [round, score!] as const) }])
    this.showRows(now)
    this.showPhones(now)
    this.move(before, now)
    this.before = now
    this.over = now.doing === 'done'
    this.section.dataset.live = this.over ? 'done' : 'running'
  }

  private showRows(now: Shown): void {
    const last = [...this.rows.values()].sort((a, b) => b.round - a.round).slice(0, ROWS)
    byId('crowd-rounds', HTMLTableElement).hidden = last.length === 0
    byId('crowd-rounds', HTMLTableElement).tBodies[0]!.replaceChildren(
      ...last.map(({ round, clients, score, bytes_up, seconds }) => {
        const right = score === null ? '–' : now.score.fraction ? percent(score) : score.toPrecision(3)
        const cells = [String(clients), right, kilobytes(bytes_up), `${seconds.toFixed(1)} s`]
        return make('tr', {}, make('th', { scope: 'row' }, String(round)), ...cells.map((cell) => make('td', {}, cell)))
      }),
    )
  }

  /** A phone for each member that is here, in the order of what they do: nobody can tell which is whose. */
  private showPhones({ counts, clients }: Shown): void {
    const here = STATES.flatMap((state) => Array<State>(counts[state]).fill(state))
    const places = Math.max(0, Math.min(clients, PLACES) - here.length)
    const shown = [...here.slice(0, PHONES), ...Array<'away'>(places).fill('away')]
    const now = [...this.phones.querySelectorAll<HTMLElement>('.phone')]
    shown.forEach((state, i) => {
      const phone = now[i] ?? make('span', {})
      if (phone.className !== `phone ${state}`) phone.className = `phone ${state}`
      if (!now[i]) this.phones.append(phone)
    })
    for (const left of now.slice(shown.length)) left.remove()
    this.phones.querySelector('.more')?.remove()
    if (here.length > PHONES) this.phones.append(make('span', { className: 'more' }, `+ ${here.length - PHONES}`))
    const words = { sent: 'have sent', working: 'compute', late: 'are late', here: 'wait' }
    const told = STATES.filter((state) => counts[state]).map((state) => `${counts[state]} ${words[state]}`)
    this.phones.ariaLabel = here.length ? `${here.length} of ${clients} members are here: ${told.join(', ')}` : 'No member is here yet'
    this.phones.dataset.here = String(here.length)
  }

  /** What has happened since the last answer moves: answers go to θ, θ makes its step, and goes to the members again. */
  private move(before: Shown | null, now: Shown): void {
    if (!before) return
    const closed = now.saved > before.saved
    const same = before.round?.number === now.round?.number
    const came = closed ? this.rows.get(now.saved)?.clients : same ? now.round && now.round.came - before.round!.came : now.round?.came
    const phones = [...this.phones.querySelectorAll<HTMLElement>('.phone:not(.away)')] // those that have sent come first
    phones.slice(0, Math.max(0, came ?? 0)).forEach((phone) => void this.packets.travel(phone, 'up'))
    if (closed) void this.packets.arrived()
    const busy = phones.filter((phone) => phone.matches('.working, .late'))
    if (!same && now.doing === 'visit') busy.forEach((phone) => void this.packets.travel(phone, 'down'))
  }
}

/**
 * Asks until all saved rounds are in `rows`.
 *
 * @param from the rounds after this one may have changed.
 * @returns the last answer, and `from` for the next time: scores may come after a round was saved.
 */
export async function allRounds(rows: Map<number, Row>, from: number, ask: (since: number) => Promise<Shown>): Promise<{ found: Shown; from: number }> {
  let [since, first] = [Math.min(from, Math.max(0, rows.size - AGAIN)), Infinity]
  for (;;) {
    const found = await ask(since)
    for (const row of found.history) rows.set(row.round, row)
    since += found.history.length
    first = Math.min(first, (found.scoring ?? since + 1) - 1) // of all answers: scores may come between two of them
    if (found.history.length === 0 || since >= found.saved) return { found, from: first }
  }
}

/** What the rounds are at, in one sentence. */
export function status(now: Shown): string {
  const here = STATES.reduce((sum, state) => sum + now.counts[state], 0)
  const present = `${here} of ${now.clients} members are here.`
  if (now.doing === 'done') return over(now)
  if (now.doing === 'score') return `Round ${now.round?.number ?? now.saved + 1}: the members see how much the new θ gets right. ${present}`
  if (now.round?.invited) return `Round ${now.round.number}: ${now.round.came} of ${now.round.invited} answers have come. ${present}`
  if (now.saved === 0 && here < now.wait_for) return `The first round begins when ${now.wait_for} members are here. ${present}`
  return `${now.saved} of ${now.rounds} rounds are over. ${present}`
}

function over({ rounds }: Shown): string {
  return `The run is over: all ${rounds} rounds are done.`
}
