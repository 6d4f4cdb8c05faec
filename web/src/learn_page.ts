/** The part of the page that learns to know its user's drawings or words. */
import { showAnswer } from './answer'
import type { Bundle, ClientFile, Manifest } from './bundle'
import { showChips, showClasses } from './class_list'
import { classColor } from './colors'
import { byId, download, make, messageOf, millisecondsText, percent } from './elements'
import { headBytes, type Head } from './head'
import type { LateDevice } from './late_device'
import { Keeper } from './keeper'
import { Learner, STEPS, type Learned, type State } from './learner'
import { showMeaning, tested } from './meaning'
import { restored } from './restore'
import type { Score } from './scores'
import type { Listener, Raw, Source } from './source'
import { openStore, type Kept, type Store } from './store'

/** What the page has: the manifest at once, the rest when it has come. */
export interface Parts {
  manifest: Manifest
  thetaSha256: string
  device: LateDevice
  bundle: Promise<Bundle>
  client: () => Promise<ClientFile | null>
}

export class LearnPage {
  private readonly source: Source
  private readonly learner: Learner
  private readonly manifest: Manifest
  private picked = 0
  private predicting = false
  private predictAgain = false
  private filling: Promise<void> = Promise.resolve()
  private learning: Promise<void> = Promise.resolve()
  /** The head that the guesses on what was set aside are of. */
  private shownHead: Head | null = null
  private readonly keeper: Keeper | null

  private readonly guess = byId('guess', HTMLElement)
  private readonly bars = byId('bars', HTMLUListElement)
  private readonly result = byId('result', HTMLElement)
  private readonly keep = button('keep')
  private readonly learnButton = button('learn-button')

  private constructor(
    private readonly parts: Parts,
    makeSource: (listener: Listener) => Source,
    store: Store | null,
    kept: Kept | undefined,
    state: State | null,
  ) {
    this.manifest = parts.manifest
    this.source = makeSource({
      changing: () => void this.predict(),
      made: (text) => {
        if (text) this.say(text)
        this.showButtons()
        void this.predict(true)
      },
      attempt: (work) => this.attempt(work),
      say: (text) => this.say(text),
      picked: () => this.picked,
    })
    const { wanted } = this.source
    this.learner = new Learner(parts.device, parts.thetaSha256, state ?? Learner.empty(wanted), wanted)
    this.keeper = store && new Keeper(store, this.learner, parts, kept)
    this.connect()
    this.picked = this.learner.next(-1)
    byId('features', HTMLElement).textContent = String(parts.device.features)
    this.refresh()
  }

  static async open(parts: Parts, makeSource: (listener: Listener) => Source): Promise<LearnPage> {
    const { manifest, thetaSha256, device } = parts
    const { store, kept, others, ...there } = await openStore(thetaSha256)
    let { problem } = there
    let state: State | null = null
    if (kept) {
      const back = restored(kept, device, manifest, thetaSha256)
      state = back.state
      problem ||= back.problem
    } else if (others.length > 0) {
      problem ||= `A head is kept here for another backbone (${others[0]!.slice(0, 8)}…); it is not used with this one.`
    }
    const page = new LearnPage(parts, makeSource, store, kept, state)
    page.showPrediction(null, true)
    if (problem) page.say(problem, true)
    else if (page.learner.learnedClasses) page.say(`Your head of ${page.learner.learnedClasses} classes is back.`)
    return page
  }

  /** The program runs now: what waited for it is done. */
  async started(): Promise<void> {
    await this.fill()
    this.showTests()
    void this.predict(true)
  }

  private connect(): void {
    const { learner } = this
    this.keep.onclick = () => this.attempt(() => this.keepExample())
    button('clear').onclick = () => this.clear()
    button('add-class').onclick = () =>
      this.attempt(() => {
        learner.addClass()
        this.picked = learner.state.names.length - 1
        this.changed(`Class “${learner.state.names.at(-1)}” added. Its name is in the list of your classes.`)
        byId(`name-${this.picked}`, HTMLInputElement).select()
      })
    this.learnButton.onclick = () => this.attempt(() => this.learn())
    button('undo').onclick = () =>
      this.attempt(() => {
        if (this.source.undo()) {
          this.showButtons()
          void this.predict(true)
          return
        }
        learner.undo()
        this.changed('The last change is undone.')
      })
    button('reset').onclick = () => {
      if (!confirm(`Forget all ${this.source.words.many}, the classes and the head?`)) return
      this.attempt(() => {
        learner.reset()
        this.picked = 0
        this.source.clear()
        this.changed('All is forgotten.')
        byId('scores', HTMLTableElement).hidden = true
      })
    }
    button('export').onclick = () => this.attempt(() => download('head.zip', learner.exportNamed()))
    const file = byId('import-file', HTMLInputElement)
    button('import').onclick = () => file.click()
    file.onchange = () =>
      this.attempt(async () => {
        const chosen = file.files?.[0]
        file.value = ''
        if (!chosen) return
        await learner.importFile(new Uint8Array(await chosen.arrayBuffer()))
        this.changed(`A head of ${learner.learnedClasses} classes is in use.`)
      })
    button('import-bundle').onclick = () =>
      this.attempt(async () => {
        const { head } = await this.parts.bundle
        learner.importHead(headBytes(head, this.parts.thetaSha256), this.manifest.labels.names)
        this.changed(`The head of client ${this.manifest.client ?? ''} is in use.`)
      })
    const back = () => !document.hidden && this.follow(this.keeper?.catchUp())
    addEventListener('focus', back)
    document.addEventListener('visibilitychange', back)
  }

  /** Runs the action of a button. An error is shown, and nothing has changed then. */
  private attempt(work: () => void | Promise<void>): void {
    void (async () => {
      try {
        await work()
      } catch (error) {
        this.say(messageOf(error), true)
      }
    })()
  }

  private say(text: string, isError = false): void {
    this.result.textContent = text
    this.result.classList.toggle('error', isError)
  }

  private pick(label: number): void {
    this.picked = label
    byId(`pick-${label}`, HTMLInputElement).checked = true
    this.showButtons()
    void this.predict(true)
  }

  private clear(): void {
    this.source.clear()
    this.showButtons()
    void this.predict(true)
  }

  private phi(...all: Raw[]): Promise<Float32Array> {
    const size = this.manifest.model.example_shape.reduce((a, b) => a * b, 1)
    const x = new Float32Array(all.length * size)
    all.forEach((raw, i) => x.set(this.source.decode(raw), i * size))
    return this.parts.device.phi(x)
  }

  /** Computes the features of examples that have none yet; waits for the program. */
  private fill(): Promise<void> {
    this.filling = this.filling.catch(() => undefined).then(() => this.learner.fill((raw) => this.phi(...raw)))
    return this.filling
  }

  /** Keeps what was made for a class. The next class to make an example for comes up by itself. */
  private keepExample(label = this.picked): void {
    const raw = this.source.raw()
    if (!raw) throw new Error(`There is nothing to keep: ${this.source.words.make(this.learner.state.names[label]!)} first.`)
    const example = this.learner.add(raw, label)
    if (this.parts.device.ready) void this.fill().catch(() => undefined) // or else Learn says what is wrong
    this.picked = this.learner.next(label)
    this.clear()
    const name = this.learner.state.names[label]!
    this.changed(`Example ${this.learner.count(label)} of “${name}”${example.heldOut ? ', set aside as a test' : ''}.`)
  }

  /** One tap on what the example is: it is kept, and learned from at once. */
  private async teach(label: number): Promise<void> {
    this.keepExample(label)
    if (!this.learner.missing()) await this.learn()
  }

  /** Learns, after what is learned already: a tap on the answer may come before that has ended. */
  private learn(): Promise<void> {
    this.learning = this.learning.catch(() => undefined).then(() => this.learnNow())
    return this.learning
  }

  private async learnNow(): Promise<void> {
    this.learnButton.disabled = true
    this.say(this.parts.device.ready ? 'Learning …' : 'Learning begins when the rest has been loaded …')
    try {
      const missing = this.learner.missing()
      if (missing) throw new Error(missing)
      await this.fill()
      const learned = await this.learner.learn()
      this.showScores(learned)
      const { kept, before, after, milliseconds } = learned
      const right = `${after.correct} of ${after.examples} ${this.source.words.many} that were set aside are right, before ${before.correct}`
      const how = `${STEPS} steps in ${millisecondsText(milliseconds)}`
      this.showTests()
      this.changed(kept ? `Learned: ${right}. (${how})` : `Not better: ${right}. It keeps what it knew. (${how})`)
      void this.predict(true)
    } finally {
      this.learnButton.disabled = false
    }
  }

  /** The examples that were set aside, guessed from raw numbers and with the backbone, once their features are there. */
  private showTests(): void {
    const { head, examples } = this.learner.state
    this.shownHead = head
    const whole = head && examples.every((e) => e.phi) && this.learner.missing() === null
    const found = whole ? tested(this.learner, (raw) => this.source.decode(raw)) : []
    showMeaning(this.learner, found, this.source.words, (raw) => {
      const canvas = make('canvas', { role: 'img' })
      this.source.thumbnail(canvas, raw)
      return canvas
    })
  }

  private showScores({ before, after }: Learned): void {
    const show = (name: string, { correct, examples, loss }: Score) => {
      byId(`${name}-right`, HTMLElement).textContent = `${correct} of ${examples} (${percent(correct / examples)})`
      byId(`${name}-loss`, HTMLElement).textContent = Number.isFinite(loss) ? loss.toFixed(3) : 'knows not all classes'
    }
    show('before', before)
    show('after', after)
    byId('scores', HTMLTableElement).hidden = false
  }

  /** Predicts what is there to keep. While one prediction is computed, only the latest of the next ones waits. */
  private async predict(announce = false): Promise<void> {
    this.predictAgain = true
    if (this.predicting) return
    this.predicting = true
    try {
      while (this.predictAgain) {
        this.predictAgain = false
        const raw = this.learner.state.head && this.parts.device.ready ? this.source.raw() : null
        const found = raw && this.learner.predict(await this.phi(raw))
        this.showPrediction(found, announce || !this.predictAgain)
      }
    } catch (error) {
      this.say(messageOf(error), true)
    } finally {
      this.predicting = false
    }
  }

  private showPrediction(found: number[] | null, announce: boolean): void {
    const { names } = this.learner.state
    const top = found ? found.indexOf(Math.max(...found)) : -1
    if (announce) {
      const text = found ? `“${names[top]}”, ${percent(found[top]!)}` : this.prompt()
      if (this.guess.textContent !== text) this.guess.textContent = text
      this.guess.dataset.label = found ? String(top) : ''
      this.guess.style.setProperty('--c', classColor(found ? top : this.picked))
      showAnswer(names, found ? top : null, (label) => this.attempt(() => this.teach(label)))
    }
    byId('prediction', HTMLElement).hidden = !found
    this.bars.replaceChildren(
      ...(found ?? []).map((value, label) => {
        const meter = make('meter', { min: 0, max: 1, value, ariaLabel: names[label]! })
        meter.style.setProperty('--part', String(value))
        const item = make('li', {}, make('span', {}, names[label]!), meter, make('output', {}, percent(value)))
        item.style.setProperty('--c', classColor(label))
        return item
      }),
    )
  }

  /** What to do next. */
  private prompt(): string {
    const { state, learnedClasses } = this.learner
    const { empty, words, wanted } = this.source
    if (learnedClasses) {
      if (empty) return words.ask
      return this.parts.device.ready ? '…' : 'It guesses when the rest has been loaded.'
    }
    const name = state.names[this.picked]!
    if (!empty) return `Keep it as “${name}”.`
    return this.learner.missing() ? `${words.make(name)}, ${this.learner.count(this.picked) + 1} of ${wanted.each}.` : 'Press Learn.'
  }

  /** Shows the present state and stores it, after each change. */
  private changed(text: string): void {
    this.show(text)
    this.save()
  }

  private show(text: string): void {
    this.picked = Math.min(this.picked, this.learner.state.names.length - 1)
    if (this.learner.state.head !== this.shownHead) this.showTests()
    this.refresh()
    this.say(text)
    void this.predict(true)
  }

  private save(): void {
    this.follow(this.keeper?.save())
  }

  /** Shows what came from another tab, if something did. */
  private follow(work: Promise<boolean> | undefined): void {
    work?.then(
      (came) => {
        if (!came) return
        this.show(`Another tab of this page has changed the ${this.source.words.many} and classes: this is what is kept now.`)
        if (this.parts.device.ready) void this.fill().then(() => this.showTests(), () => undefined) // prettier-ignore
      },
      (error: unknown) => this.say(`What changed could not be kept: ${messageOf(error)}`, true),
    )
  }

  private refresh(): void {
    const { learner, picked } = this
    const focused = document.activeElement?.id
    showChips(learner, picked, (label) => this.pick(label))
    showClasses(learner, {
      thumbnail: (canvas, raw) => this.source.thumbnail(canvas, raw),
      words: this.source.words,
      focused: (label) => this.picked !== label && this.pick(label),
      renamed: () => {
        this.showButtons()
        void this.predict(true)
      },
      named: () => this.save(),
      remove: (label) =>
        this.attempt(() => {
          const name = learner.state.names[label]!
          learner.removeClass(label)
          this.changed(`Class “${name}” removed.`)
        }),
    })
    if (focused) document.getElementById(focused)?.focus()
    byId('steps', HTMLElement).hidden = learner.learnedClasses > 0
    this.showButtons()
  }

  private showButtons(): void {
    const { state, canUndo, learnedClasses } = this.learner
    const missing = this.learner.missing()
    const { empty } = this.source
    this.keep.textContent = `Keep as “${state.names[this.picked]}”`
    // One button is the next thing to do.
    this.keep.classList.toggle('primary', !learnedClasses && (missing !== null || !empty))
    this.learnButton.classList.toggle('primary', missing === null && empty)
    this.learnButton.title = missing ?? ''
    button('undo').disabled = empty && !canUndo
    button('export').disabled = learnedClasses === 0
  }
}

function button(id: string): HTMLButtonElement {
  return byId(id, HTMLButtonElement)
}
