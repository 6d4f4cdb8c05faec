/** The part of the page that learns to read its user's drawings. */
import { showAnswer } from './answer'
import type { Bundle, ClientFile, Manifest } from './bundle'
import { showChips, showClasses } from './class_list'
import { classColor } from './colors'
import { byId, download, make, messageOf, millisecondsText, percent } from './elements'
import { headBytes } from './head'
import type { LateDevice } from './late_device'
import { EVERY, Learner, STEPS, type Learned, type State } from './learner'
import { showMeaning, tested } from './meaning'
import { Pad, thumbnail } from './pad'
import { cropped, levelled } from './photo'
import { decoded, exampleOfDrawing, type DrawingSettings, type Preprocessing } from './preprocess'
import { restored } from './restore'
import type { Score } from './scores'
import { Store, type Kept } from './store'

/** What the page has: the manifest at once, the rest when it has come. */
export interface Parts {
  manifest: Manifest
  thetaSha256: string
  device: LateDevice
  bundle: Promise<Bundle>
  client: () => Promise<ClientFile | null>
}

export class LearnPage {
  private readonly pad: Pad
  private readonly learner: Learner
  private readonly manifest: Manifest
  /** One of the client's examples, if it is on the pad instead of a drawing. */
  private given: Uint8Array | null = null
  private readonly taken: number[] = []
  private picked = 0
  private predicting = false
  private predictAgain = false
  private filling: Promise<void> = Promise.resolve()
  private saved: Uint8Array | null = null
  private saving: Promise<void> = Promise.resolve()

  private readonly guess = byId('guess', HTMLElement)
  private readonly bars = byId('bars', HTMLUListElement)
  private readonly result = byId('result', HTMLElement)
  private readonly keep = button('keep')
  private readonly learnButton = button('learn-button')

  private constructor(
    private readonly parts: Parts,
    private readonly settings: DrawingSettings,
    private readonly store: Store | null,
    state: State,
  ) {
    this.manifest = parts.manifest
    this.learner = new Learner(parts.device, parts.thetaSha256, state)
    this.pad = new Pad(
      byId('pad', HTMLCanvasElement),
      settings,
      () => {
        this.given = null
        void this.predict()
      },
      () => {
        this.showButtons()
        void this.predict(true)
      },
    )
    this.connect()
    this.picked = this.learner.next(-1)
    byId('features', HTMLElement).textContent = String(parts.device.features)
    this.refresh()
  }

  static async open(parts: Parts, settings: DrawingSettings): Promise<LearnPage> {
    const { manifest, thetaSha256, device } = parts
    let store: Store | null = null
    let problem = ''
    try {
      store = await Store.open()
    } catch (error) {
      problem = `This browser keeps nothing (${messageOf(error)}): what is learned lasts until the page is closed.`
    }
    const kept = await store?.load(thetaSha256)
    const others = (await store?.backbones())?.filter((name) => name !== thetaSha256) ?? []
    let state = Learner.empty()
    if (kept) {
      const back = restored(kept, device, manifest, thetaSha256)
      state = back.state
      problem ||= back.problem
    } else if (others.length > 0) {
      problem ||= `A head is kept here for another backbone (${others[0]!.slice(0, 8)}…); it is not used with this one.`
    }
    const page = new LearnPage(parts, settings, store, state)
    page.saved = page.headFile()
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
    this.keep.onclick = () => this.attempt(() => this.keepDrawing())
    button('clear').onclick = () => this.clear()
    button('example').onclick = () => this.attempt(() => this.takeExample())
    button('example').hidden = !this.manifest.browser.client
    // Without a camera that the browser would open, this button would be the same as the next.
    button('camera').hidden = !matchMedia('(pointer: coarse)').matches
    for (const name of ['camera', 'picture']) {
      const file = byId(`${name}-file`, HTMLInputElement)
      button(name).onclick = () => file.click()
      file.onchange = () => this.attempt(() => this.takePicture(file))
    }
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
        if (this.pad.undo()) {
          this.given = null
          this.showButtons()
          void this.predict(true)
          return
        }
        learner.undo()
        this.changed('The last change is undone.')
      })
    button('reset').onclick = () => {
      if (!confirm('Forget all drawings, the classes and the head?')) return
      this.attempt(() => {
        learner.reset()
        this.picked = 0
        this.pad.clear()
        this.given = null
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
    this.pad.clear()
    this.given = null
    this.showButtons()
    void this.predict(true)
  }

  private raw(): Uint8Array | null {
    if (this.given) return this.given
    return this.pad.empty ? null : exampleOfDrawing(this.pad.grey(), this.settings, this.pixels)
  }

  private get pixels(): number {
    return this.manifest.model.example_shape[0]!
  }

  private decode(raw: Uint8Array): Float32Array {
    return decoded(raw, this.manifest.preprocessing as Preprocessing)
  }

  private phi(...all: Uint8Array[]): Promise<Float32Array> {
    const size = this.pixels * this.pixels
    const x = new Float32Array(all.length * size)
    all.forEach((raw, i) => x.set(this.decode(raw), i * size))
    return this.parts.device.phi(x)
  }

  /** Computes the features of drawings that have none yet; waits for the program. */
  private fill(): Promise<void> {
    this.filling = this.filling.catch(() => undefined).then(() => this.learner.fill((raw) => this.phi(...raw)))
    return this.filling
  }

  /** Keeps what is on the pad for a class. The next class to draw for comes up by itself. */
  private keepDrawing(label = this.picked): void {
    const raw = this.raw()
    if (!raw) throw new Error('The pad is empty: draw something first.')
    const example = this.learner.add(raw, label)
    if (this.parts.device.ready) void this.fill().catch(() => undefined) // or else Learn says what is wrong
    this.picked = this.learner.next(label)
    this.clear()
    const name = this.learner.state.names[label]!
    this.changed(`Example ${this.learner.count(label)} of “${name}”${example.heldOut ? ', set aside as a test' : ''}.`)
  }

  /** One tap on what the drawing is: it is kept, and learned from at once. */
  private async teach(label: number): Promise<void> {
    this.keepDrawing(label)
    if (!this.learner.missing()) await this.learn()
  }

  private async takeExample(): Promise<void> {
    const { raw, labels } = (await this.parts.client())!
    const classes = this.manifest.model.num_classes
    const wanted = this.picked % classes
    const rows = [...labels.keys()].filter((i) => labels[i] === wanted)
    if (rows.length === 0) throw new Error('The file has no example of this class.')
    const turn = (this.taken[wanted] = (this.taken[wanted] ?? -1) + 1)
    const row = rows[turn % rows.length]!
    const size = this.pixels * this.pixels
    const given = (raw as Uint8Array).slice(row * size, (row + 1) * size)
    const picture = document.createElement('canvas')
    thumbnail(picture, given, this.pixels, this.settings.levels)
    this.pad.show(cropped(picture, this.settings.size))
    this.given = given
    this.say(`An example of the client’s class “${this.manifest.labels.names[wanted]}” is on the pad.`)
    void this.predict(true)
    this.showButtons()
  }

  private async takePicture(input: HTMLInputElement): Promise<void> {
    const file = input.files?.[0]
    input.value = ''
    if (!file) return
    const image = await createImageBitmap(file).catch(() => {
      throw new Error(`${file.name} is no picture that this browser can read.`)
    })
    const { size } = this.settings
    const drawing = levelled(cropped(image, size), size)
    this.given = null
    this.pad.show(drawing)
    this.say('The picture is on the pad as it will be kept: its middle square, paper white and ink black.')
    void this.predict(true)
    this.showButtons()
  }

  private async learn(): Promise<void> {
    this.learnButton.disabled = true
    this.say(this.parts.device.ready ? 'Learning …' : 'Learning begins when the rest has been loaded …')
    try {
      const missing = this.learner.missing()
      if (missing) throw new Error(missing)
      await this.fill()
      const learned = await this.learner.learn()
      this.showScores(learned)
      const { kept, before, after, milliseconds } = learned
      const right = `${after.correct} of ${after.examples} drawings that were set aside are right, before ${before.correct}`
      const how = `${STEPS} steps in ${millisecondsText(milliseconds)}`
      this.changed(kept ? `Learned: ${right}. (${how})` : `Not better: ${right}. It keeps what it knew. (${how})`)
      this.showTests()
      void this.predict(true)
    } finally {
      this.learnButton.disabled = false
    }
  }

  /** The drawings that were set aside, guessed from pixels and with the backbone, once their features are there. */
  private showTests(): void {
    const { head, examples } = this.learner.state
    const whole = head && examples.every((e) => e.phi) && this.learner.missing() === null
    const found = whole ? tested(this.learner, (raw) => this.decode(raw)) : []
    showMeaning(this.learner, found, (raw) => {
      const canvas = make('canvas', { role: 'img' })
      thumbnail(canvas, raw, this.pixels, this.settings.levels)
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

  /** Predicts what the pad shows. While one prediction is computed, only the latest of the next ones waits. */
  private async predict(announce = false): Promise<void> {
    this.predictAgain = true
    if (this.predicting) return
    this.predicting = true
    try {
      while (this.predictAgain) {
        this.predictAgain = false
        const raw = this.learner.state.head && this.parts.device.ready ? this.raw() : null
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
    const empty = this.pad.empty && !this.given
    if (learnedClasses) {
      if (empty) return 'Draw something.'
      return this.parts.device.ready ? '…' : 'It guesses when the rest has been loaded.'
    }
    const name = state.names[this.picked]!
    if (!empty) return `Keep it as “${name}”.`
    return this.learner.missing() ? `Draw “${name}”, ${this.learner.count(this.picked) + 1} of ${EVERY}.` : 'Press Learn.'
  }

  /** Shows the present state and stores it, after each change. */
  private changed(text: string): void {
    this.picked = Math.min(this.picked, this.learner.state.names.length - 1)
    if (!this.learner.state.head) byId('meaning', HTMLElement).hidden = true
    this.refresh()
    this.say(text)
    void this.predict(true)
    this.save()
  }

  private headFile(): Uint8Array | null {
    return this.learner.state.head && this.learner.exportHead()
  }

  private save(): void {
    const { store } = this
    const { thetaSha256 } = this.parts
    if (!store) return
    const head = this.headFile()
    const { names, examples } = this.learner.state
    const kept: Kept = {
      names: [...names],
      examples: examples.map(({ raw, label, heldOut }) => ({ raw, label, heldOut })),
      head,
      previous: null,
    }
    const forget = !head && examples.length === 0 && !this.learner.canUndo
    this.saving = this.saving.then(async () => {
      try {
        if (forget) {
          await store.forget(thetaSha256)
        } else {
          const before = this.saved && head && same(this.saved, head) ? (await store.load(thetaSha256))?.previous : this.saved
          await store.save(thetaSha256, { ...kept, previous: before ?? null })
        }
        this.saved = head
      } catch (error) {
        this.say(`What changed could not be kept: ${messageOf(error)}`, true)
      }
    })
  }

  private refresh(): void {
    const { learner, picked } = this
    const focused = document.activeElement?.id
    showChips(learner, picked, (label) => this.pick(label))
    showClasses(learner, {
      thumbnail: (canvas, raw) => thumbnail(canvas, raw, this.pixels, this.settings.levels),
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
    const empty = this.pad.empty && !this.given
    this.keep.textContent = `Keep as “${state.names[this.picked]}”`
    // One button is the next thing to do.
    this.keep.classList.toggle('primary', !learnedClasses && (missing !== null || !empty))
    this.learnButton.classList.toggle('primary', missing === null && empty)
    this.learnButton.title = missing ?? ''
    button('undo').disabled = this.pad.empty && !canUndo
    button('export').disabled = learnedClasses === 0
  }
}

function same(a: Uint8Array, b: Uint8Array): boolean {
  return a.length === b.length && a.every((value, i) => value === b[i])
}

function button(id: string): HTMLButtonElement {
  return byId(id, HTMLButtonElement)
}
