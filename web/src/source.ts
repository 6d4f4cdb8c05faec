/** Where the examples of the visitor come from: a drawing pad, or a microphone. The rest of the page knows no difference. */

/** An example as it is kept: the stored levels of a drawing, or samples of a sound. */
export type Raw = Uint8Array | Float32Array

/** What the page says about examples of this kind. */
export interface Words {
  /** Several examples. */
  many: string
  /** An order: make an example of this. */
  make: (name: string) => string
  /** What was made for a class, in the list of classes. */
  made: string
  nothing: string
  /** An order for what to do when a head is there. */
  ask: string
  /** The numbers without the backbone. */
  plain: string
}

/** What learning asks of the visitor. */
export interface Wanted {
  /** Examples that each class needs. */
  each: number
  /** The classes that are there at the beginning. */
  names: readonly string[]
  /** What to do for classes that have too few. */
  more: string
}

export interface Source {
  readonly words: Words
  readonly wanted: Wanted
  /** Whether there is nothing to keep now. */
  readonly empty: boolean
  /** The example that is there now. */
  raw(): Raw | null
  /** The numbers that the backbone takes. */
  decode(raw: Raw): Float32Array
  thumbnail(canvas: HTMLCanvasElement, raw: Raw): void
  clear(): void
  /** Takes the last change back. Returns false if there is none. */
  undo(): boolean
}

/** What a source tells the page. */
export interface Listener {
  /** While an example is made. */
  changing: () => void
  /** When it has been made. */
  made: (text?: string) => void
  /** Runs the work of a button; its error is shown. */
  attempt: (work: () => void | Promise<void>) => void
  say: (text: string) => void
  /** The class that is picked. */
  picked: () => number
}

/** Shows the parts of the page that are about this kind of example, and hides those about the other. */
export function showKind(kind: 'drawing' | 'voice'): void {
  for (const element of document.querySelectorAll<HTMLElement>('[data-for]')) element.hidden = element.dataset.for !== kind
  if (kind === 'voice') document.title = 'Teach it your own words'
}
