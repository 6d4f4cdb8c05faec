/** The part of the page that learns to read its user's drawings. */
import type { Bundle, ClientFile } from './bundle'
import type { Device } from './device'
import { byId, download, make, messageOf, millisecondsText, percent } from './elements'
import { readHead, type Head } from './head'
import { Learner, MOST_NAMES, STEPS, type Example, type Learned, type State } from './learner'
import { Pad, thumbnail } from './pad'
import { decoded, exampleOfDrawing, type DrawingSettings, type Preprocessing } from './preprocess'
import type { Score } from './scores'
import { Store, type Kept } from './store'

const NOTHING_LEARNED = 'Nothing learned yet.'

export class LearnPage {
  private readonly pad: Pad
  private readonly learner: Learner
  /** One of the client's examples, if it is on the pad instead of a drawing. */
  private given: Uint8Array | null = null
  private readonly taken: number[] = []
  private picked = 0
  private predicting = false
  private predictAgain = false
  private saved: Uint8Array | null = null
  private saving: Promise<void> = Promise.resolve()

  private readonly guess = byId('guess', HTMLElement)
  private readonly bars = byId('bars', HTMLUListElement)
  private readonly result = byId('result', HTMLElement)
  private readonly keep = button('keep')
  private readonly learnButton = button('learn-button')

  private constructor(
    private readonly device: Device,
    private readonly bundle: Bundle,
    private readonly client: ClientFile | null,
    private readonly settings: DrawingSettings,
    private readonly store: Store | null,
    state: State,
  ) {
    this.learner = new Learner(device, bundle.thetaSha256, state)
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
    this.refresh()
  }

  static async open(device: Device, bundle: Bundle, client: ClientFile | null, settings: DrawingSettings): Promise<LearnPage> {
    let store: Store | null = null
    let problem = ''
    try {
      store = await Store.open()
    } catch (error) {
      problem = `This browser keeps nothing (${messageOf(error)}): what is learned lasts until the page is closed.`
    }
    const kept = await store?.load(bundle.thetaSha256)
    const others = (await store?.backbones())?.filter((name) => name !== bundle.thetaSha256) ?? []
    let state = Learner.empty()
    if (kept) {
      const restored = await restore(kept, device, bundle)
      state = restored.state
      problem ||= restored.problem
    } else if (others.length > 0) {
      problem ||= `A head is kept here for another backbone (${others[0]!.slice(0, 8)}…); it is not used with this one.`
    }
    const page = new LearnPage(device, bundle, client, settings, store, state)
    page.saved = page.headFile()
    page.showPrediction(null, true)
    if (problem) page.say(problem, true)
    else if (page.learner.learnedClasses) page.say(`Your head of ${page.learner.learnedClasses} classes is back.`)
    return page
  }

  private connect(): void {
    const { learner } = this
    this.keep.onclick = () => this.attempt(() => this.keepDrawing())
    button('clear').onclick = () => this.clear()
    button('example').onclick = () => this.attempt(() => this.takeExample())
    button('example').hidden = !this.client || !(this.client.raw instanceof Uint8Array)
    const picture = byId('picture-file', HTMLInputElement)
    button('picture').onclick = () => picture.click()
    picture.onchange = () => this.attempt(() => this.takePicture(picture))
    button('add-class').onclick = () =>
      this.attempt(() => {
        learner.addClass()
        this.picked = learner.state.names.length - 1
        this.changed(`Class “${learner.state.names.at(-1)}” added.`)
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
      this.attempt(() => {
        const { names } = this.bundle.manifest.labels
        learner.importHead(this.headBytesOf(this.bundle.head), names)
        this.changed(`The head of client ${this.bundle.manifest.client ?? ''} is in use.`)
      })
  }

  private headBytesOf(head: Head): Uint8Array {
    return new Learner(this.device, this.bundle.thetaSha256, { names: [], examples: [], head }).exportHead()
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
    return this.bundle.manifest.model.example_shape[0]!
  }

  private phi(raw: Uint8Array): Promise<Float32Array> {
    return this.device.phi(decoded(raw, this.bundle.manifest.preprocessing as Preprocessing))
  }

  private async keepDrawing(): Promise<void> {
    const raw = this.raw()
    if (!raw) throw new Error('The pad is empty: draw something first.')
    const label = this.picked
    const example = this.learner.add(raw, await this.phi(raw), label)
    this.clear()
    const name = this.learner.state.names[label]!
    this.changed(`Example ${this.learner.count(label)} of “${name}”${example.heldOut ? ', held out' : ''}.`)
  }

  private takeExample(): void {
    const { raw, labels } = this.client!
    const classes = this.bundle.manifest.model.num_classes
    const wanted = this.picked % classes
    const rows = [...labels.keys()].filter((i) => labels[i] === wanted)
    if (rows.length === 0) throw new Error('The file has no example of this class.')
    const turn = (this.taken[wanted] = (this.taken[wanted] ?? -1) + 1)
    const row = rows[turn % rows.length]!
    const size = this.pixels * this.pixels
    const given = (raw as Uint8Array).slice(row * size, (row + 1) * size)
    const picture = document.createElement('canvas')
    thumbnail(picture, given, this.pixels, this.settings.levels)
    this.pad.show(picture)
    this.given = given
    this.say(`An example of the client’s class “${this.bundle.manifest.labels.names[wanted]}” is on the pad.`)
    void this.predict(true)
    this.showButtons()
  }

  private async takePicture(input: HTMLInputElement): Promise<void> {
    const file = input.files?.[0]
    input.value = ''
    if (!file) return
    const image = await createImageBitmap(file)
    this.given = null
    this.pad.show(image)
    this.say('The picture is on the pad; dark counts as ink.')
    void this.predict(true)
    this.showButtons()
  }

  private async learn(): Promise<void> {
    this.learnButton.disabled = true
    this.say('Learning …')
    try {
      const learned = await this.learner.learn()
      this.showScores(learned)
      const { kept, before, after, milliseconds } = learned
      const how = `${STEPS} steps in ${millisecondsText(milliseconds)}`
      const right = `${after.correct} of ${after.examples} held-out drawings right, before ${before.correct}`
      this.changed(
        kept ? `Learned: ${right}. The new head is kept. (${how})` : `Not better: ${right}. The old head stays. (${how})`,
      )
      void this.predict(true)
    } finally {
      this.learnButton.disabled = false
    }
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
        const raw = this.raw()
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
      const text = found ? `“${names[top]}”, ${percent(found[top]!)}` : this.learner.learnedClasses ? 'Draw something.' : NOTHING_LEARNED
      if (this.guess.textContent !== text) this.guess.textContent = text
      this.guess.dataset.label = found ? String(top) : ''
    }
    this.bars.replaceChildren(
      ...(found ?? []).map((value, label) => {
        const meter = make('meter', { min: 0, max: 1, value, ariaLabel: names[label]! })
        return make('li', {}, make('span', {}, names[label]!), meter, make('output', {}, percent(value)))
      }),
    )
  }

  /** Shows the present state and stores it, after each change. */
  private changed(text: string): void {
    this.picked = Math.min(this.picked, this.learner.state.names.length - 1)
    this.refresh()
    this.say(text)
    void this.predict(true)
    this.save()
  }

  private headFile(): Uint8Array | null {
    return this.learner.state.head && this.learner.exportHead()
  }

  private save(): void {
    const { store, bundle } = this
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
          await store.forget(bundle.thetaSha256)
        } else {
          const before = this.saved && head && same(this.saved, head) ? (await store.load(bundle.thetaSha256))?.previous : this.saved
          await store.save(bundle.thetaSha256, { ...kept, previous: before ?? null })
        }
        this.saved = head
      } catch (error) {
        this.say(`What changed could not be kept: ${messageOf(error)}`, true)
      }
    })
  }

  private refresh(): void {
    const { state, learnedClasses } = this.learner
    const focused = document.activeElement?.id
    byId('class-list', HTMLOListElement).replaceChildren(
      ...state.names.map((name, label) => {
        const own = state.examples.filter((e) => e.label === label)
        const held = own.filter((e) => e.heldOut).length
        const pick = make('input', { type: 'radio', name: 'class', id: `pick-${label}`, checked: label === this.picked })
        const remove = make('button', { type: 'button', id: `remove-${label}` }, '×')
        const named = (name: string) => {
          pick.ariaLabel = `Draw for “${name}”`
          remove.ariaLabel = `Remove class “${name}”`
        }
        named(name)
        pick.onchange = () => this.pick(label)
        const input = make('input', { type: 'text', id: `name-${label}`, value: name, maxLength: MOST_NAMES, autocomplete: 'off' })
        input.ariaLabel = `Name of class ${label + 1}`
        input.onfocus = () => {
          if (this.picked !== label) this.pick(label)
        }
        // While it is typed, and in place: at the end, another control may have been pressed already and must not move.
        input.oninput = () => {
          this.learner.rename(label, input.value.trim() || name)
          named(this.learner.state.names[label]!)
          this.showButtons()
        }
        input.onchange = () => {
          input.value = this.learner.state.names[label]!
          this.save()
        }
        remove.onclick = () =>
          this.attempt(() => {
            const removed = this.learner.state.names[label]!
            this.learner.removeClass(label)
            this.changed(`Class “${removed}” removed.`)
          })
        const unlearned = learnedClasses > 0 && label >= learnedClasses ? ', not learned yet' : ''
        const count = `${own.length} drawn, ${held} held out${unlearned}`
        return make(
          'li',
          {},
          make('div', { className: 'class-line' }, pick, input, make('span', { className: 'count' }, count), remove),
          make('div', { className: 'strip' }, ...own.map((e, i) => this.thumbnail(e, i, name))),
        )
      }),
    )
    if (focused) document.getElementById(focused)?.focus()
    this.showButtons()
  }

  private showButtons(): void {
    const { state, canUndo, learnedClasses } = this.learner
    this.keep.textContent = `Keep as “${state.names[this.picked]}”`
    button('undo').disabled = this.pad.empty && !canUndo
    button('export').disabled = learnedClasses === 0
    this.learnButton.title = this.learner.missing() ?? ''
  }

  private thumbnail(example: Example, index: number, name: string): HTMLCanvasElement {
    const canvas = make('canvas', { className: example.heldOut ? 'held' : '', role: 'img' })
    canvas.ariaLabel = `Example ${index + 1} of “${name}”${example.heldOut ? ', held out' : ''}`
    canvas.title = canvas.ariaLabel
    thumbnail(canvas, example.raw, this.pixels, this.settings.levels)
    return canvas
  }
}

/** Reads the stored state and checks it. If the head is damaged, the one before it is used, if that is whole. */
async function restore(kept: Kept, device: Device, bundle: Bundle): Promise<{ state: State; problem: string }> {
  const { manifest, thetaSha256 } = bundle
  const pixels = manifest.model.example_shape.reduce((a, b) => a * b, 1)
  const names = kept.names.map(String).slice(0, device.room)
  if (names.length < 2) return { state: Learner.empty(), problem: 'What was kept here is damaged and was refused.' }
  const whole = kept.examples.filter(({ raw, label }) => raw.length === pixels && label >= 0 && label < names.length)
  const x = new Float32Array(whole.length * pixels)
  whole.forEach(({ raw }, i) => x.set(decoded(raw, manifest.preprocessing as Preprocessing), i * pixels))
  const phi = whole.length ? await device.phi(x) : new Float32Array(0)
  const examples = whole.map((e, i) => ({ ...e, phi: phi.slice(i * device.features, (i + 1) * device.features) }))
  const read = (file: Uint8Array): Head => {
    const head = readHead(file, device.features, thetaSha256)
    if (head.bias.length > names.length) throw new Error('The head has more classes than there are names.')
    return head
  }
  if (!kept.head) return { state: { names, examples, head: null }, problem: '' }
  try {
    return { state: { names, examples, head: read(kept.head) }, problem: '' }
  } catch (error) {
    const why = `The head that was kept here is refused. ${messageOf(error)}`
    try {
      const head = kept.previous && read(kept.previous)
      const instead = head ? 'The one before it is in use.' : 'There was none before it.'
      return { state: { names, examples, head }, problem: `${why} ${instead}` }
    } catch {
      return { state: { names, examples, head: null }, problem: `${why} The one before it is damaged, too.` }
    }
  }
}

function same(a: Uint8Array, b: Uint8Array): boolean {
  return a.length === b.length && a.every((value, i) => value === b[i])
}

function button(id: string): HTMLButtonElement {
  return byId(id, HTMLButtonElement)
}
