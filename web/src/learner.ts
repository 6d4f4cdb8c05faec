/** The state of what the page has learned, and its changes: classes, examples, head. Uses no storage and no elements. */
import { ordered, readHead, resized, withoutColumn, zeroHead, headBytes, type Head } from './head'
import type { Computer } from './late_device'
import type { Raw, Wanted } from './source'
import { isBetter, probabilities, score, type Score } from './scores'
import { unzipped, zipped } from './zip'

export interface Example {
  /** The example as the federation would store it. */
  raw: Raw
  /** Its features; null until the program has computed them. */
  phi: Float32Array | null
  label: number
  /** Held out: learning does not use it, and the old and the new head are compared on it. */
  heldOut: boolean
}

export interface State {
  names: readonly string[]
  examples: readonly Example[]
  /** The head of the first classes; classes that were named later are not learned yet. */
  head: Head | null
}

export interface Learned {
  kept: boolean
  before: Score
  after: Score
  lossBefore: number
  loss: number
  milliseconds: number
}

export class LearnError extends Error {}

export const STEPS = 300
/** Every third example of a class is held out. */
export const EVERY = 3
/** The longest name that a visitor may write, as on other devices (tflite_export/device/classes.py). Those of a file stay whole. */
export const LONGEST_NAME = 200
const MOST_UNDO = 50
/** What a visitor is asked to draw first. */
export const DRAWINGS: Wanted = { each: EVERY, names: ['star', 'house', 'wave'], more: 'draw more of' }

/** A state that Undo leads back to. */
interface Past {
  state: State
  /** Whether the change after it removed this class (a label), or put others in the place of all. */
  gone: number | 'all' | null
}

export class Learner {
  private past: Past[] = []
  private now: State

  constructor(
    private readonly device: Computer,
    private readonly thetaSha256: string,
    state: State,
    private readonly wanted: Wanted = DRAWINGS,
  ) {
    this.now = state
  }

  static empty({ names }: Wanted = DRAWINGS): State {
    return { names, examples: [], head: null }
  }

  get state(): State {
    return this.now
  }

  get canUndo(): boolean {
    return this.past.length > 0
  }

  get learnedClasses(): number {
    return this.now.head?.bias.length ?? 0
  }

  undo(): void {
    this.now = this.past.pop()?.state ?? this.now
  }

  reset(): void {
    this.adopt(this.first)
  }

  /** The state of a visitor who has done nothing yet. */
  get first(): State {
    return Learner.empty(this.wanted)
  }

  /** Goes on with a state from elsewhere. Undo does not lead back behind it. */
  adopt(state: State): void {
    this.past = []
    this.now = state
  }

  addClass(name = this.freeName()): void {
    if (this.now.names.length >= this.device.room) {
      throw new LearnError(`The exported program has room for ${this.device.room} classes.`)
    }
    this.change({ names: [...this.now.names, name] })
  }

  /** Undo does not take a name back: the class has it in the states before, too. */
  rename(label: number, name: string): void {
    const named = (state: State, at: number) => ({ ...state, names: state.names.map((old, i) => (i === at ? name : old)) })
    this.now = named(this.now, label)
    for (let i = this.past.length - 1, at = label; i >= 0; i--) {
      const { state, gone } = this.past[i]!
      if (gone === 'all') break
      if (gone !== null && at >= gone) at++
      if (at >= state.names.length) break // the class was not there yet: before that, another one may have its place
      this.past[i] = { state: named(state, at), gone }
    }
  }

  removeClass(label: number): void {
    if (this.now.names.length <= 2) throw new LearnError('There must be at least two classes.')
    const { names, examples, head } = this.now
    this.change(
      {
        names: names.filter((_, i) => i !== label),
        examples: examples.filter((e) => e.label !== label).map((e) => ({ ...e, label: e.label - Number(e.label > label) })),
        head: head && label < head.bias.length ? (head.bias.length > 2 ? withoutColumn(head, label) : null) : head,
      },
      label,
    )
  }

  add(raw: Raw, label: number, phi: Float32Array | null = null): Example {
    const heldOut = (this.count(label) + 1) % EVERY === 0
    const example = { raw, phi, label, heldOut }
    this.change({ examples: [...this.now.examples, example] })
    return example
  }

  removeExample(example: Example): void {
    this.change({ examples: this.now.examples.filter((other) => other !== example) })
  }

  count(label: number): number {
    return this.now.examples.filter((e) => e.label === label).length
  }

  /** The class to make an example for: one with the fewest, the next one after `label` among those. */
  next(label: number): number {
    const k = this.now.names.length
    const order = Array.from({ length: k }, (_, i) => (label + 1 + i) % k)
    return order.reduce((best, other) => (this.count(other) < this.count(best) ? other : best))
  }

  /** Computes the features that are missing. @param features of some examples, one after the other. */
  async fill(features: (raw: Raw[]) => Promise<Float32Array>): Promise<void> {
    for (;;) {
      const missing = this.now.examples.filter((e) => !e.phi)
      if (missing.length === 0) return
      const phi = await features(missing.map((e) => e.raw))
      missing.forEach((e, i) => (e.phi = phi.slice(i * this.device.features, (i + 1) * this.device.features)))
    }
  }

  /** A text on what is still missing before learning; null if nothing is. */
  missing(): string | null {
    const lacking = this.now.names.filter((_, label) => this.count(label) < this.wanted.each)
    if (lacking.length === 0) return null
    return `Learning needs ${this.wanted.each} examples of every class: ${this.wanted.more} ${lacking.map((name) => `“${name}”`).join(', ')}.`
  }

  /** Probabilities of the learned classes; null if nothing was learned yet. */
  predict(phi: Float32Array): number[] | null {
    return this.now.head && probabilities(this.now.head, phi)
  }

  /**
   * Fits the head, and keeps the new one only if it is better on the held-out examples.
   *
   * Learning starts at the old head; the columns of new classes start at 0. `fill` must have computed the features.
   *
   * @throws LearnError: examples are missing; or while it was computed, the head was changed or an example went away.
   */
  async learn(): Promise<Learned> {
    const missing = this.missing()
    if (missing) throw new LearnError(missing)
    const { names, examples, head } = this.now
    const [fit, out] = [examples.filter((e) => !e.heldOut), examples.filter((e) => e.heldOut)]
    const start = head ? resized(head, names.length) : zeroHead(this.device.features, names.length)
    const phi = new Float32Array(fit.length * this.device.features)
    fit.forEach((e, i) => phi.set(e.phi!, i * this.device.features))
    const labels = Int32Array.from(fit, (e) => e.label)
    const begin = performance.now()
    const fitted = await this.device.fitHead(phi, labels, start, STEPS, safeRate(phi, fit.length))
    const milliseconds = performance.now() - begin
    const there = new Set(this.now.examples)
    if (this.now.head !== head || !examples.every((e) => there.has(e))) {
      throw new LearnError('Your classes, examples or head changed while it learned, so what it learned is not kept: press Learn again.')
    }
    const [before, after] = [head ?? start, fitted.head].map((h) => score(h, out.map((e) => e.phi!), out.map((e) => e.label))) as [Score, Score] // prettier-ignore
    const kept = isBetter(after, before)
    if (kept) this.change({ head: fitted.head })
    return { kept, before, after, lossBefore: fitted.lossBefore, loss: fitted.loss, milliseconds }
  }

  /** A zip file of the present head (head.bin, as in a bundle) and of the classes' names (names.json). */
  exportNamed(): Uint8Array {
    const names = new TextEncoder().encode(JSON.stringify(this.now.names.slice(0, this.learnedClasses)))
    return zipped(new Map([['head.bin', this.exportHead()], ['names.json', names]])) // prettier-ignore
  }

  /**
   * Takes a head and its names from what `exportNamed` wrote, or a head alone from a head.bin.
   *
   * @throws HeadError, LearnError: nothing was changed.
   */
  async importFile(file: Uint8Array): Promise<void> {
    const entries = await unzipped(file)
    const head = entries ? entries.get('head.bin') : file
    if (!head) throw new LearnError('The zip file holds no head.bin.')
    this.importHead(head, namesOf(entries?.get('names.json')))
  }

  /** The content of a file with the present head. */
  exportHead(): Uint8Array {
    if (!this.now.head) throw new LearnError('Nothing was learned yet: there is no head to export.')
    return this.fileOf(this.now.head)
  }

  /** The content of a file with a head of this page's backbone. */
  fileOf(head: Head): Uint8Array {
    return headBytes(head, this.thetaSha256)
  }

  /**
   * Takes a head from a file. Without names, neither here nor in the file, its classes are the present ones in their
   * order. With names, each column goes to the class of its name where there are drawings; the other columns and their
   * names take the other places.
   *
   * @throws HeadError, LearnError: the head cannot be used; nothing was changed.
   */
  importHead(file: Uint8Array, names: readonly string[] = []): void {
    const { names: inFile = [], ...head } = readHead(file, this.device.features, this.thetaSha256)
    const [k, told] = [head.bias.length, names.length > 0 ? names : inFile]
    if (told.length > 0 && told.length !== k) {
      throw new LearnError(`The file names ${told.length} classes, and its head has ${k}: it cannot be told which is which.`)
    }
    if (k < 2 || k > this.device.room) throw new LearnError(`The head has ${k} classes; this page takes 2 to ${this.device.room}.`)
    if (this.now.examples.length > 0 && k !== this.now.names.length) {
      throw new LearnError(`The head has ${k} classes and you have drawn ${this.now.names.length}: reset first, then import.`)
    }
    const given = told.length > 0 ? told : this.now.names
    const titles = Array.from({ length: k }, (_, i) => given[i] || `class ${i + 1}`)
    const from = this.columnsFor(titles)
    this.change({ names: from.map((column) => titles[column]!), head: ordered(head, from) }, told.length > 0 ? 'all' : null)
  }

  /** For each class, which of the columns with these names it takes. */
  private columnsFor(titles: readonly string[]): number[] {
    const left = new Set(titles.keys())
    const drawn = this.now.names.map((name, label) => {
      if (this.count(label) === 0) return -1
      const at = [label, ...left].find((column) => left.has(column) && titles[column] === name)
      if (at === undefined) {
        const all = titles.map((title) => `“${title}”`).join(', ')
        throw new LearnError(`The file has no class “${name}”, which you have drawn for; it has ${all}: name your classes so, or reset first.`)
      }
      left.delete(at)
      return at
    })
    const others = [...left]
    return titles.map((_, label) => (drawn[label] ?? -1) >= 0 ? drawn[label]! : others.shift()!)
  }

  private change(part: Partial<State>, gone: Past['gone'] = null): void {
    this.past = [...this.past.slice(1 - MOST_UNDO), { state: this.now, gone }]
    this.now = { ...this.now, ...part }
  }

  private freeName(): string {
    const letters = [...'ABCDEFGHIJKLMNOPQRSTUVWXYZ']
    return letters.find((letter) => !this.now.names.includes(letter)) ?? `class ${this.now.names.length + 1}`
  }
}

/**
 * A learning rate with which no step can raise the loss: 1 / L. The curvature of a linear head's mean cross-entropy is
 * at most L = half the mean of |phi|^2 + 1. The run's beta is not used: it is for heads that continue from round to
 * round, and here a head starts at 0.
 */
export function safeRate(phi: Float32Array, examples: number): number {
  return 2 / (phi.reduce((sum, value) => sum + value * value, 0) / examples + 1)
}

/** The names in names.json; none if it holds anything else. */
function namesOf(file: Uint8Array | undefined): string[] {
  if (!file) return []
  try {
    const names: unknown = JSON.parse(new TextDecoder().decode(file))
    if (Array.isArray(names) && names.every((name) => typeof name === 'string')) return names
  } catch {
    // refused below
  }
  throw new LearnError('names.json is damaged: it must be a list of names.')
}
