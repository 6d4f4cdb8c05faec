/** Says what learning meant: the examples that were set aside, guessed from raw numbers (pixels, samples) alone and with the backbone. */
import { pixelGuesses } from './baseline'
import { byId, make } from './elements'
import { classColor } from './colors'
import type { Learner } from './learner'
import { probabilities } from './scores'
import type { Raw, Words } from './source'

/** An example that was set aside, and what each way says of it. */
export interface Tested {
  raw: Raw
  label: number
  pixels: number
  taught: number
}

/** Guesses for all examples that were set aside. Empty if nothing was learned yet. */
export function tested(learner: Learner, decode: (raw: Raw) => Float32Array): Tested[] {
  const { names, examples, head } = learner.state
  const [fit, out] = [examples.filter((e) => !e.heldOut), examples.filter((e) => e.heldOut)]
  if (!head || fit.length === 0) return []
  const decoded = (list: typeof fit) => list.map(({ raw }) => decode(raw))
  const pixels = pixelGuesses(decoded(fit), fit.map((e) => e.label), decoded(out), names.length) // prettier-ignore
  return out.map(({ raw, label, phi }, i) => {
    const found = probabilities(head, phi!)
    return { raw, label, pixels: pixels[i]!, taught: found.indexOf(Math.max(...found)) }
  })
}

/** The sentence with the visitor's own numbers. */
export function verdict(found: readonly Tested[], plain = 'pixels'): string {
  const right = (way: 'pixels' | 'taught') => found.filter((test) => test[way] === test.label).length
  const [pixels, taught] = [right('pixels'), right('taught')]
  const sentence = `From your ${plain} alone: ${pixels} of ${found.length} right. With what the others taught: ${taught} of ${found.length}.`
  if (pixels === found.length) return `${sentence} Your classes are easy to tell apart. Try some that look alike.`
  return taught > pixels ? sentence : `${sentence} Here the others’ teaching did not help.`
}

export function showMeaning(learner: Learner, found: readonly Tested[], words: Pick<Words, 'plain'>, picture: (raw: Raw) => HTMLCanvasElement): void {
  const section = byId('meaning', HTMLElement)
  section.hidden = found.length === 0
  if (found.length === 0) return
  const { names } = learner.state
  byId('verdict', HTMLElement).textContent = verdict(found, words.plain)
  for (const way of ['pixels', 'taught'] as const) {
    const right = found.filter((test) => test[way] === test.label).length
    const meter = byId(`${way}-right`, HTMLMeterElement)
    meter.max = found.length
    meter.value = right
    meter.style.setProperty('--part', String(right / found.length))
    byId(`${way}-count`, HTMLElement).textContent = `${right} of ${found.length}`
  }
  byId('tests', HTMLElement).replaceChildren(
    ...found.map(({ raw, label, pixels, taught }) => {
      const canvas = picture(raw)
      canvas.ariaLabel = `Your “${names[label]}”, set aside`
      const guess = (way: string, said: number) => {
        const right = said === label
        const mark = make('span', { className: right ? 'mark right' : 'mark wrong' }, right ? '✓' : '✗')
        mark.ariaHidden = 'true'
        return make('div', {}, make('dt', {}, way), make('dd', {}, mark, ` ${names[said]}`, make('span', { className: 'unseen' }, right ? ', right' : ', wrong')))
      }
      const item = make('li', {}, canvas, make('dl', {}, guess(`${words.plain} alone`, pixels), guess('with the others', taught)))
      item.style.setProperty('--c', classColor(label))
      return item
    }),
  )
}
