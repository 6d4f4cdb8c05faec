/** Shows how much of what the program needs has come. */
import { byId } from './elements'
import type { Site } from './site'
import { travels } from './transfer'

const MEGA = 1e6

export class Loading {
  private readonly bar = byId('loading', HTMLProgressElement)
  private readonly status = byId('status', HTMLElement)
  private have = 0
  private ended = false
  private readonly all: number

  /**
   * @param wasm WebAssembly's file: browsers load one of three, which are about as large.
   * @param already What a visitor can do before all is here.
   */
  constructor(site: Site, needed: readonly string[], wasm: string, private readonly already: 'draw' | 'record') {
    this.all = [...needed, wasm].reduce((sum, name) => sum + (site.files[name] ? travels(site.files[name]) : 0), 0)
    this.bar.classList.add('going')
    this.bar.max = this.all
    this.came(0)
  }

  readonly came = (bytes: number): void => {
    if (this.ended) return // what still comes must not cover an error
    this.have += bytes
    this.bar.value = Math.min(this.have, this.all)
    const text = (n: number) => (n / MEGA).toFixed(1)
    const begun = this.have >= this.all
    const rest = begun ? 'The program starts …' : `Loading what the others learned: ${text(this.have)} of ${text(this.all)} MB`
    const line = `You can ${this.already} already. ${rest}`
    if (this.status.textContent !== line) this.status.textContent = line
  }

  /** Everything is there, or something has failed. */
  readonly done = (): void => {
    this.ended = true
    this.bar.classList.remove('going')
  }
}
