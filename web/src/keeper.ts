/** Keeps the learner's state from visit to visit, and loses nothing that another tab of this page has kept. */
import type { Manifest } from './bundle'
import type { Computer } from './late_device'
import { EVERY, LearnError, Learner, type State } from './learner'
import { restored } from './restore'
import type { Kept, Store } from './store'

interface Setting {
  device: Pick<Computer, 'features' | 'room'>
  manifest: Manifest
  thetaSha256: string
}

/** What is stored, as this tab has read or written it last. */
interface Last {
  state: State
  head: Uint8Array | null
  previous: Uint8Array | null
  version: number | undefined
}

export class Keeper {
  private last: Last
  private work: Promise<unknown> = Promise.resolve()

  /** @param there what was stored when `learner` got its state. */
  constructor(
    private readonly store: Pick<Store, 'load' | 'replace'>,
    private readonly learner: Learner,
    private readonly setting: Setting,
    there: Kept | undefined,
  ) {
    this.last = this.read(learner.state, there)
  }

  /**
   * Stores the present state. What another tab has stored meanwhile is taken in first.
   *
   * @returns whether something of another tab was taken in.
   * @throws Error: the browser could not store it, or there are more classes than the program has room for.
   */
  save(): Promise<boolean> {
    return this.next(async () => {
      for (let came = false; ; came = true) {
        const { state, canUndo } = this.learner
        const head = state.head && this.learner.fileOf(state.head)
        const previous = head && alike(head, this.last.head) ? this.last.previous : this.last.head
        const forget = !head && state.examples.length === 0 && !canUndo && alike(state.names, this.learner.first.names)
        const examples = state.examples.map(({ raw, label, heldOut }) => ({ raw, label, heldOut }))
        const kept: Kept | null = forget ? null : { names: [...state.names], examples, head, previous, version: Math.random() }
        const found = await this.store.replace(this.setting.thetaSha256, kept, this.last.version)
        if (!found) {
          this.last = { state, head, previous: kept && previous, version: kept?.version }
          return came
        }
        this.take(found.there)
      }
    })
  }

  /** Takes in what another tab has stored. Returns whether there was something. */
  catchUp(): Promise<boolean> {
    return this.next(async () => {
      const there = await this.store.load(this.setting.thetaSha256)
      if (there?.version === this.last.version) return false
      this.take(there)
      return true
    })
  }

  /** One after the other, also after an error. */
  private next<T>(work: () => Promise<T>): Promise<T> {
    const done = this.work.then(work)
    this.work = done.catch(() => undefined)
    return done
  }

  private take(there: Kept | undefined): void {
    const { device, manifest, thetaSha256 } = this.setting
    const theirs = there ? restored(there, device, manifest, thetaSha256).state : this.learner.first
    if (theirs) this.learner.adopt(joined(this.last.state, this.learner.state, theirs, device.room))
    this.last = this.read(theirs ?? this.last.state, there) // what is damaged is replaced
  }

  private read(state: State, there: Kept | undefined): Last {
    const head = state.head && this.learner.fileOf(state.head)
    return { state, head, previous: there?.previous ?? null, version: there?.version }
  }
}

/**
 * What is stored, with what is new here: the examples that this tab has made, in the classes of the same names, and its
 * head, where it has changed nothing else. A class that was renamed, here or there, is known by the examples of both.
 *
 * @param before what both tabs began with.
 * @throws LearnError: there would be more than `room` classes.
 */
export function joined(before: State, mine: State, theirs: State, room: number): State {
  const known = new Map(before.examples.map(({ raw, label }) => [raw, before.names[label]!]))
  const made = mine.examples.filter(({ raw }) => !known.has(raw))
  const names = [...theirs.names]
  const places = mine.names.map((name, label) => {
    const named = theirs.names[label] === name ? label : theirs.names.indexOf(name)
    if (named >= 0) return named
    const both = mine.examples.filter((e) => e.label === label && known.has(e.raw))
    const found = theirs.examples.find((e) => !mine.names.includes(theirs.names[e.label]!) && both.some(({ raw }) => alike(raw, e.raw)))
    if (!found) return -1
    if (theirs.names[found.label] === known.get(both[0]!.raw)) names[found.label] = name // renamed here alone
    return found.label
  })
  const examples = [...theirs.examples]
  for (const example of made) {
    let label = places[example.label]!
    if (label < 0) label = places[example.label] = names.push(mine.names[example.label]!) - 1
    const heldOut = (examples.filter((e) => e.label === label).length + 1) % EVERY === 0
    examples.push({ ...example, label, heldOut })
  }
  if (names.length > room) throw new LearnError(`With the classes of another tab of this page there are ${names.length}; there is room for ${room}.`)
  const same = mine.names.length === names.length && places.every((place, label) => place === label)
  return { names, examples, head: same && made.length === 0 && mine.head && mine.head !== before.head ? mine.head : theirs.head }
}

function alike<T>(a: ArrayLike<T>, b: ArrayLike<T> | null): boolean {
  if (a.length !== b?.length) return false
  for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return false
  return true
}
