/**
 * A federation in one page: rounds of PFLEGO whose clients all run here, one after the other, by the page's program, and
 * the server's step. Uses no elements.
 *
 * All members take part in every round. So I / r is 1, and alpha_i = N_i / N over those who are here.
 */
import type { Device } from './device'
import { ordered, type Head } from './head'
import type { Examples, Member, Members } from './members'
import { score, type Score } from './scores'
import { ServerStep } from './server_step'

/** 'own': every member keeps a head for its classes. 'one': the heads are averaged to one over the classes of all. */
export type Mode = 'own' | 'one'

export type Event =
  | { kind: 'theta' | 'stepped'; bytes: number }
  | { kind: 'computes' | 'sent' | 'scored'; member: number; bytes: number }

/** What a payload has besides its numbers; see payload.ts. */
const PAYLOAD_HEADER = 16

export class Federation {
  round = 0
  theta: Float32Array
  /** Of mode 'one'. */
  shared: Head
  readonly members: Member[]
  heads: Head[] = []
  scores: (Score | null)[] = []
  /** Bytes that each member has sent. */
  sent: number[] = []
  private server: ServerStep
  private epoch = 0

  /** @param device null: it is given before the first round. */
  constructor(
    public device: Device | null,
    private readonly start: Members,
    readonly mode: Mode,
    guest: Member | null = null,
  ) {
    this.members = [...start.members]
    this.theta = start.theta
    this.shared = start.shared
    this.server = new ServerStep(start.about.server, start.theta.length)
    this.heads = this.members.map(({ head }) => head)
    this.scores = this.members.map(() => null)
    this.sent = this.members.map(() => 0)
    if (guest) this.join(guest)
  }

  /** Takes in one more member, or its new examples. It counts from the next round. What was trained stays with its class. */
  join(guest: Member): void {
    const at = this.start.members.length
    const known = this.members[at]
    const from = guest.classes.map((name, i) => {
      const same = known?.classes.indexOf(name) ?? -1
      const renamed = same < 0 && known?.classes.length === guest.classes.length && !guest.classes.includes(known.classes[i]!)
      return renamed ? i : same
    })
    const theirs = this.start.shared.bias.length // columns that are not the guest's alone
    const shared = Array.from({ length: Math.max(theirs, ...guest.columns.map((column) => column + 1)) }, (_, i) => (i < theirs ? i : -1))
    guest.columns.forEach((column, i) => {
      if (column >= theirs) shared[column] = known?.columns[from[i]!] ?? -1
    })
    this.shared = ordered(this.shared, shared)
    this.members[at] = guest
    this.heads[at] = this.heads[at] ? ordered(this.heads[at], from) : guest.head
    this.scores[at] ??= null
    this.sent[at] ??= 0
  }

  /** Lets the guest go, with all that it had. */
  leave(): void {
    const at = this.start.members.length
    this.shared = ordered(this.shared, [...this.start.shared.bias.keys()])
    for (const each of [this.members, this.heads, this.scores, this.sent]) each.length = at
  }

  /** The members' mean accuracy on held-out examples, without the guest; null before it was computed. */
  get accuracy(): number | null {
    const found = this.scores.slice(0, this.start.members.length)
    if (found.some((s) => s === null)) return null
    return found.reduce((sum, s) => sum + s!.correct / s!.examples, 0) / found.length
  }

  /** Bytes that go to a member, and from it, in a round. */
  get messageBytes(): number {
    const head = this.mode === 'one' ? this.shared.kernel.length + this.shared.bias.length : 0
    return PAYLOAD_HEADER + 4 * (this.theta.length + head)
  }

  /** Stops a round that is being computed; it changes nothing any more. */
  stop(): void {
    this.epoch++
  }

  /**
   * Computes a round, and then the scores.
   *
   * @param tell hears of every step, and may delay the next one.
   * @returns whether the round was finished; not if `stop` was called.
   * @throws Error: it diverged; nothing was changed.
   */
  async next(tell: (event: Event) => Promise<void> | void = () => {}): Promise<boolean> {
    const { device, epoch } = this
    if (!device) throw new Error('the program has not started')
    const going = () => epoch === this.epoch
    const { tau, beta, rho, rule, head_rate, safeguard } = this.start.about.training
    const members = [...this.members]
    const total = members.reduce((sum, { train }) => sum + train.labels.length, 0)
    const bytes = this.messageBytes
    await tell({ kind: 'theta', bytes })
    if (!going()) return false
    await device.receive(this.theta)
    const gradient = new Float64Array(this.theta.length)
    const heads: Head[] = []
    const alphas = members.map(({ train }) => train.labels.length / total)
    for (const [i, { train, columns }] of members.entries()) {
      if (!going()) return false
      await tell({ kind: 'computes', member: i, bytes: 0 })
      const rate = head_rate === 'beta' ? beta : rho * (rule === 'exact' ? alphas[i]! : 1)
      const [head, labels] = this.mode === 'own' ? [this.heads[i]!, train.labels] : [this.shared, train.labels.map((k) => columns[k]!)]
      const result = await device.round(train.x, labels, head, { steps: tau - 1, beta, rate, safeguard })
      if (!going()) return false
      result.dtheta.forEach((value, j) => (gradient[j]! += alphas[i]! * value))
      heads.push(result.head)
      await tell({ kind: 'sent', member: i, bytes })
    }
    if (!going()) return false
    const sum = Float32Array.from(gradient)
    if (![sum, ...heads.flatMap(({ kernel, bias }) => [kernel, bias])].every((part) => part.every(Number.isFinite))) {
      throw new Error('The round diverged: a gradient or a head is not finite. Nothing of it was kept.')
    }
    this.theta = this.server.step(this.theta, sum)
    if (this.mode === 'own') heads.forEach((head, i) => (this.heads[i] = head))
    else this.shared = average(heads, alphas)
    members.forEach((_, i) => (this.sent[i]! += bytes))
    this.round++
    await tell({ kind: 'stepped', bytes })
    return this.score(tell)
  }

  /** Scores every member on its held-out examples, with the newest theta. */
  async score(tell: (event: Event) => Promise<void> | void = () => {}): Promise<boolean> {
    const { device, epoch } = this
    if (!device) throw new Error('the program has not started')
    await device.receive(this.theta)
    const found: (Score | null)[] = []
    for (const [i, { test, columns }] of this.members.entries()) {
      const [head, labels] = this.mode === 'own' ? [this.heads[i]!, [...test.labels]] : [this.shared, [...test.labels].map((k) => columns[k]!)]
      found.push(labels.length ? score(head, await features(device, test), labels) : null)
      if (epoch !== this.epoch) return false
    }
    this.scores = found
    for (const i of found.keys()) await tell({ kind: 'scored', member: i, bytes: 0 })
    return epoch === this.epoch
  }
}

async function features(device: Device, { x, labels }: Examples): Promise<Float32Array[]> {
  const phi = await device.phi(x)
  return Array.from(labels, (_, i) => phi.subarray(i * device.features, (i + 1) * device.features))
}

/** sum_i alpha_i W_i */
function average(heads: Head[], alphas: number[]): Head {
  const of = (part: 'kernel' | 'bias') =>
    heads[0]![part].map((_, j) => heads.reduce((sum, head, i) => sum + alphas[i]! * head[part][j]!, 0))
  return { kernel: of('kernel'), bias: of('bias') }
}
