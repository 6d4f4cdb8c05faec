/** Examples by drawing: on the pad, of a photo, or one of the client's. */
import type { ClientFile, Manifest } from './bundle'
import { byId } from './elements'
import { DRAWINGS } from './learner'
import { Pad, thumbnail } from './pad'
import { cropped, levelled } from './photo'
import { decoded, exampleOfDrawing, type DrawingSettings, type Preprocessing } from './preprocess'
import type { Listener, Raw, Source, Words } from './source'

export class DrawingSource implements Source {
  readonly wanted = DRAWINGS
  readonly words: Words = {
    many: 'drawings',
    make: (name) => `Draw “${name}”`,
    made: 'drawn',
    nothing: 'nothing drawn yet',
    ask: 'Draw something.',
    plain: 'pixels',
  }
  private readonly pad: Pad
  /** One of the client's examples, if it is on the pad instead of a drawing. */
  private given: Uint8Array | null = null
  private readonly taken: number[] = []

  constructor(
    private readonly settings: DrawingSettings,
    private readonly manifest: Manifest,
    private readonly client: () => Promise<ClientFile | null>,
    private readonly listener: Listener,
  ) {
    this.pad = new Pad(
      byId('pad', HTMLCanvasElement),
      settings,
      () => {
        this.given = null
        listener.changing()
      },
      () => listener.made(),
    )
    const example = byId('example', HTMLButtonElement)
    example.onclick = () => listener.attempt(() => this.takeExample())
    example.hidden = !manifest.browser.client
    // Without a camera that the browser would open, this button would be the same as the next.
    byId('camera', HTMLButtonElement).hidden = !matchMedia('(pointer: coarse)').matches
    for (const name of ['camera', 'picture']) {
      const file = byId(`${name}-file`, HTMLInputElement)
      byId(name, HTMLButtonElement).onclick = () => file.click()
      file.onchange = () => listener.attempt(() => this.takePicture(file))
    }
  }

  get empty(): boolean {
    return this.pad.empty && !this.given
  }

  raw(): Uint8Array | null {
    if (this.given) return this.given
    return this.pad.empty ? null : exampleOfDrawing(this.pad.grey(), this.settings, this.pixels)
  }

  decode(raw: Raw): Float32Array {
    return decoded(raw, this.manifest.preprocessing as Partial<Preprocessing>)
  }

  thumbnail(canvas: HTMLCanvasElement, raw: Raw): void {
    thumbnail(canvas, raw, this.pixels, this.settings.levels)
  }

  clear(): void {
    this.pad.clear()
    this.given = null
  }

  undo(): boolean {
    if (!this.pad.undo()) return false
    this.given = null
    return true
  }

  private get pixels(): number {
    return this.manifest.model.example_shape[0]!
  }

  private async takeExample(): Promise<void> {
    const { raw, labels } = (await this.client())!
    const classes = this.manifest.model.num_classes
    const wanted = this.listener.picked() % classes
    const rows = [...labels.keys()].filter((i) => labels[i] === wanted)
    if (rows.length === 0) throw new Error('The file has no example of this class.')
    const turn = (this.taken[wanted] = (this.taken[wanted] ?? -1) + 1)
    const row = rows[turn % rows.length]!
    const size = this.pixels * this.pixels
    const given = (raw as Uint8Array).slice(row * size, (row + 1) * size)
    const picture = document.createElement('canvas')
    this.thumbnail(picture, given)
    this.pad.show(cropped(picture, this.settings.size))
    this.given = given
    this.listener.made(`An example of the client’s class “${this.manifest.labels.names[wanted]}” is on the pad.`)
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
    this.listener.made('The picture is on the pad as it will be kept: its middle square, paper white and ink black.')
  }
}
