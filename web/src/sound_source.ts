/** Examples by voice: recorded by the microphone, or of a file. */
import type { Manifest } from './bundle'
import { byId } from './elements'
import { noMicrophone, recorded } from './microphone'
import { decodedSound, QUIETEST, SoundError, spoken, wavOf, type AudioSettings } from './sound'
import type { Listener, Raw, Source, Words } from './source'

const SECONDS = 2
const LONGEST = 100e6 // bytes of a file: decoded, it must fit into the memory of a phone
/** The meter goes from here to full scale, in decibels. */
const METER_FROM = -60
const FIRST = ['yes', 'no', 'stop']
/** Words that a visitor is asked for first: five recordings of each are enough work for a start. */
const FEW = 3

export class SoundSource implements Source {
  readonly words: Words = {
    many: 'recordings',
    make: (name) => `Say “${name}”`,
    made: 'said',
    nothing: 'nothing said yet',
    ask: 'Say something.',
    plain: 'sound',
  }
  readonly wanted
  private sound: Float32Array | null = null
  private recording: AbortController | null = null
  private readonly button = byId('record', HTMLButtonElement)
  private readonly wave = byId('wave', HTMLCanvasElement)
  private readonly meter = byId('level', HTMLMeterElement)

  constructor(
    private readonly settings: AudioSettings,
    { labels }: Manifest,
    private readonly listener: Listener,
  ) {
    const own = labels.names.slice(0, FEW)
    this.wanted = { each: 5, names: own.length > 1 ? own : FIRST, more: 'say more often' }
    this.button.onclick = () => {
      if (this.recording) this.recording.abort()
      else listener.attempt(() => this.record())
    }
    const file = byId('sound-file', HTMLInputElement)
    byId('choose-sound', HTMLButtonElement).onclick = () => file.click()
    file.onchange = () =>
      listener.attempt(async () => {
        const chosen = file.files?.[0]
        file.value = ''
        if (chosen) await this.take(chosen)
      })
    const zone = byId('voice', HTMLElement)
    zone.ondragover = (event) => {
      event.preventDefault()
      zone.classList.add('over')
    }
    zone.ondragleave = () => zone.classList.remove('over')
    zone.ondrop = (event) => {
      event.preventDefault()
      zone.classList.remove('over')
      const dropped = event.dataTransfer?.files[0]
      listener.attempt(() => {
        if (!dropped) throw new SoundError('That is no file: drop a recording here.')
        return this.take(dropped)
      })
    }
    const problem = noMicrophone()
    this.button.disabled = problem !== null
    byId('voice-problem', HTMLElement).textContent = problem ?? ''
    byId('voice-problem', HTMLElement).hidden = problem === null
    this.paint()
  }

  get empty(): boolean {
    return this.sound === null
  }

  raw(): Float32Array | null {
    return this.sound
  }

  decode(raw: Raw): Float32Array {
    return Float32Array.from(raw)
  }

  thumbnail(canvas: HTMLCanvasElement, raw: Raw): void {
    canvas.width = canvas.height = 56
    drawWave(canvas, raw, 'black', 'white')
  }

  clear(): void {
    this.sound = null
    this.paint()
  }

  undo(): boolean {
    if (!this.sound) return false
    this.clear()
    return true
  }

  private async record(): Promise<void> {
    const recording = (this.recording = new AbortController())
    this.button.textContent = 'Waiting for the microphone …'
    try {
      const begun = () => {
        this.button.textContent = 'Stop'
        this.button.classList.add('recording')
        this.listener.say('Say it now.')
      }
      const { sound, rate } = await recorded(SECONDS, recording.signal, begun, (level) => this.showLevel(level))
      await this.use(wavOf(sound, rate), 'The recording', 'Recorded')
    } finally {
      this.recording = null
      this.button.textContent = 'Record'
      this.button.classList.remove('recording')
      this.showLevel(0)
    }
  }

  private async take(file: File): Promise<void> {
    if (file.size > LONGEST) throw new SoundError(`${file.name} is too large: cut out the word and take that.`)
    await this.use(await file.arrayBuffer(), file.name, `${file.name} is here`)
  }

  /** Makes the example of a sound file. If it cannot be one, what was there stays. */
  private async use(file: ArrayBuffer, name: string, done: string): Promise<void> {
    this.sound = spoken(await decodedSound(file, this.settings.rate, name), this.settings)
    this.paint()
    const seconds = this.settings.samples / this.settings.rate
    this.listener.made(`${done}: the loudest ${seconds === 1 ? 'second' : `${seconds} seconds`}, silence cut off.`)
  }

  private showLevel(level: number): void {
    const decibels = 20 * Math.log10(Math.max(level, 1e-9))
    const part = Math.min(1, Math.max(0, 1 - decibels / METER_FROM))
    this.meter.value = part
    this.meter.style.setProperty('--part', String(part))
    this.meter.ariaValueText = level >= QUIETEST ? 'loud enough' : 'quiet'
  }

  private paint(): void {
    const style = getComputedStyle(this.wave)
    drawWave(this.wave, this.sound ?? new Float32Array(1), style.color, style.backgroundColor)
    this.wave.ariaLabel = this.sound ? 'The recording, as a wave' : 'Nothing is recorded'
  }
}

/** The largest and smallest value beside each pixel, scaled to the loudest of all. */
function drawWave(canvas: HTMLCanvasElement, sound: ArrayLike<number>, ink: string, paper: string): void {
  const context = canvas.getContext('2d')
  if (!context) throw new SoundError('This browser has no canvas.')
  const { width, height } = canvas
  context.fillStyle = paper
  context.fillRect(0, 0, width, height)
  context.fillStyle = ink
  let most = 1e-6
  for (let i = 0; i < sound.length; i++) most = Math.max(most, Math.abs(sound[i]!))
  for (let column = 0; column < width; column++) {
    let [low, high] = [0, 0]
    for (let i = Math.floor((column * sound.length) / width); i < ((column + 1) * sound.length) / width; i++) {
      low = Math.min(low, sound[i]!)
      high = Math.max(high, sound[i]!)
    }
    const top = (height / 2) * (1 - (0.95 * high) / most)
    context.fillRect(column, top, 1, Math.max(1, ((height / 2) * 0.95 * (high - low)) / most))
  }
}
