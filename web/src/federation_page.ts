/** The part of the page that plays a federation: its members as cards round the theta that they share. */
import './federation.css'
import type { Bundle } from './bundle'
import { Device } from './device'
import { byId, kilobytes, messageOf, percent } from './elements'
import { drawChart } from './federation_chart'
import { Federation, type Event, type Mode } from './federation'
import { NO_DRAWINGS, readGuest } from './federation_guest'
import { Stage } from './federation_stage'
import { openMembers, type Members } from './members'
import type { Preprocessing } from './preprocess'
import type { Runtime } from './runtime'
import type { Site } from './site'

const AT_A_TIME = 20 // rounds that Play computes, so that a forgotten page comes to rest
const NEAR = '800px'

export class FederationPage {
  private readonly play = byId('federation-play', HTMLButtonElement)
  private readonly status = byId('federation-status', HTMLElement)
  private readonly modes = [...document.querySelectorAll<HTMLInputElement>('input[name="federation-head"]')]
  private readonly stage: Stage
  private federation: Federation | null = null
  private device: Device | null = null
  private history: Record<Mode, number[]> = { own: [], one: [] }
  /** What Play or One round has begun and Pause has not ended; after Pause, its round may still be computed. */
  private playing: object | null = null
  private guestKey = ''
  /** What is being computed; another begins when it has ended. */
  private busy: Promise<void> = Promise.resolve()

  private constructor(
    private readonly bundle: Bundle,
    private readonly members: Members,
    private readonly start: (program: Uint8Array) => Promise<Runtime>,
  ) {
    const { members: all, about } = members
    const many = about.classes.length
    byId('federation-about', HTMLElement).textContent =
      `${number(all.length)} members with pictures of their own. In every round they get θ, learn from their pictures, and send ` +
      'back only how θ should change. Their pictures never travel. Press Play: these are real rounds, computed in this page.'
    this.stage = new Stage(all, bundle.manifest.model.example_shape)
    this.play.onclick = () => (this.playing ? this.pause() : void this.run(AT_A_TIME))
    byId('federation-step', HTMLButtonElement).onclick = () => void this.run(1)
    byId('federation-reset', HTMLButtonElement).onclick = () => void this.reset(true)
    for (const radio of this.modes) radio.onchange = () => void this.reset(false)
    document.addEventListener('visibilitychange', () => document.hidden && this.pause())
    const { training, server, start: first } = about
    this.stage.showFacts([
      ['members', `${all.length} of the run’s ${about.clients} clients; they are all there are here, and all take part in every round`],
      ['examples of each', `${most(all.map((m) => m.train.labels.length))} to train on, ${most(all.map((m) => m.test.labels.length))} held out`],
      ['their classes', `${many} in all`],
      ['θ at round 0', first === 'initial' ? 'as before the run’s first round: untrained' : 'as the run left it: trained'],
      ['a member’s round', `${training.tau - 1} steps on its head at rate ${training.beta}, then one joint gradient`],
      ['the server’s step', `the gradients’ sum, each times its part of the examples; then ${server.name} at rate ${server.rate}`],
    ])
    byId('federation-details', HTMLDetailsElement).open = matchMedia('(min-width: 46rem)').matches // there is a place beside the curves
    this.showMode()
    this.show()
  }

  /** For a site with members. Their examples are loaded when the section is near. */
  static open(site: Site, bundle: Bundle, start: (program: Uint8Array) => Promise<Runtime>): void {
    const section = byId('federation', HTMLElement)
    section.dataset.state = 'new'
    const near = new IntersectionObserver(
      (entries) => {
        if (!entries.some((entry) => entry.isIntersecting)) return
        near.disconnect()
        openMembers(site, bundle)
          .then(async (members) => {
            const page = new FederationPage(bundle, members, start)
            await page.reset(true)
          })
          .catch((error: unknown) => {
            const status = byId('federation-status', HTMLElement)
            status.textContent = messageOf(error)
            status.classList.add('error')
            section.dataset.state = 'failed'
          })
      },
      { rootMargin: NEAR },
    )
    near.observe(section)
  }

  private get mode(): Mode {
    return this.modes.find((radio) => radio.checked)!.value as Mode
  }

  private pause(): void {
    this.playing = null
    this.showPlaying()
  }

  /** Ends what is being computed, and starts from round 0. */
  private async reset(forget: boolean): Promise<void> {
    this.pause()
    this.federation?.stop()
    this.stage.hurry()
    await this.busy
    if (forget) this.history = { own: [], one: [] }
    else this.history[this.mode] = []
    this.federation = new Federation(this.device, this.members, this.mode)
    this.guestKey = ''
    await this.invite()
    this.showMode()
    this.show()
    this.say('')
    byId('federation', HTMLElement).dataset.state = 'ready'
  }

  /** Takes the visitor in, or the visitor's new drawings. */
  private async invite(): Promise<void> {
    const { bundle, members } = this
    const { model, browser, preprocessing } = bundle.manifest
    const found = await readGuest(bundle.thetaSha256, {
      about: members.about,
      preprocessing: preprocessing as Partial<Preprocessing>,
      pixels: model.example_shape.reduce((a, b) => a * b, 1),
      features: model.num_features,
      room: browser.room,
    })
    if (typeof found === 'string') {
      if (this.guestKey && found === NO_DRAWINGS) {
        this.federation!.leave() // all is forgotten
        this.guestKey = ''
      }
      if (!this.guestKey) this.stage.invite(found)
    } else if (found.key !== this.guestKey) {
      this.federation!.join(found.member)
      this.guestKey = found.key
      this.stage.join(found.member)
    }
  }

  /** Plays so many rounds, or until Pause. */
  private async run(rounds: number): Promise<void> {
    if (this.playing) return
    const own = (this.playing = {})
    this.showPlaying()
    const running = this.busy.then(() => this.rounds(rounds, () => this.playing === own))
    this.busy = running.catch(() => {})
    try {
      await running
    } catch (error) {
      this.say(messageOf(error), true)
    } finally {
      if (this.playing === own) this.pause()
    }
  }

  private async rounds(rounds: number, going: () => boolean): Promise<void> {
    const section = byId('federation', HTMLElement)
    if (!this.device) {
      this.say('Starting the program …')
      this.device = await Device.open(await this.start(this.bundle.program), null)
      if (this.federation) this.federation.device = this.device
    }
    for (let i = 0; i < rounds && going(); i++) {
      await this.invite()
      const { federation } = this
      if (!federation) return
      if (federation.round === 0 && federation.accuracy === null) {
        if (!(await federation.score())) return
        this.keep()
      }
      section.dataset.state = 'computing'
      const finished = await federation.next((event) => this.tell(event)).finally(() => (section.dataset.state = 'ready'))
      if (!finished) return
      this.keep()
      if (going() && i + 1 < rounds) await this.stage.rest()
    }
  }

  /** Keeps the score of the round in the curves. */
  private keep(): void {
    const { accuracy, round, mode } = this.federation!
    if (accuracy === null) return
    this.history[mode][round] = accuracy
    this.show()
    this.say(this.summary())
  }

  private summary(): string {
    const { round, mode } = this.federation!
    const at = (m: Mode) => this.history[m][round]
    const now = `Round ${round}: ${percent(at(mode)!)} of the held-out pictures are right`
    const other = at(mode === 'own' ? 'one' : 'own')
    if (other === undefined) return `${now}.`
    return mode === 'own' ? `${now}; with one head for all it was ${percent(other)}.` : `${now}; with a head of one’s own it was ${percent(other)}.`
  }

  private async tell(event: Event): Promise<void> {
    const { federation } = this
    if (event.kind === 'theta') await this.stage.down(federation!.members.length)
    else if (event.kind === 'computes') this.stage.computes(event.member)
    else if (event.kind === 'sent') this.stage.up(event.member)
    else if (event.kind === 'stepped') await this.stage.arrived()
  }

  private show(): void {
    const { federation, members } = this
    const round = federation?.round ?? 0
    this.stage.show(federation)
    byId('federation-round', HTMLElement).textContent = `Round ${round}`
    const each = federation?.messageBytes ?? 16 + 4 * members.theta.length
    byId('federation-bytes', HTMLElement).textContent = `${kilobytes(each)} to each member and back, in every round`
    const curve = (className: Mode, name: string) => ({ name, className, points: this.history[className].map((part, at) => [at, part] as const) })
    drawChart(byId('federation-chart', SVGSVGElement), [curve('own', 'own heads'), curve('one', 'one head')])
    this.showPlaying()
  }

  private showMode(): void {
    const many = this.members.about.classes.length
    byId('federation-mode-about', HTMLElement).textContent =
      this.mode === 'own'
        ? 'Each member trains a head for its own few classes and keeps it. Only θ is shared.'
        : `After every round the members’ heads are averaged, too: all have the same head, which must tell all ${many} classes apart.`
    byId('federation', HTMLElement).dataset.mode = this.mode
  }

  private showPlaying(): void {
    this.play.textContent = this.playing ? 'Pause' : 'Play'
    byId('federation-step', HTMLButtonElement).disabled = this.playing !== null
  }

  private say(text: string, isError = false): void {
    this.status.textContent = text
    this.status.classList.toggle('error', isError)
  }
}

function number(n: number): string {
  return ['', 'One', 'Two', 'Three', 'Four', 'Five', 'Six', 'Seven', 'Eight', 'Nine', 'Ten'][n] ?? String(n)
}

function most(counts: number[]): string {
  const [low, high] = [Math.min(...counts), Math.max(...counts)]
  return low === high ? String(low) : `${low} to ${high}`
}
