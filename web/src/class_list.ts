/** The visitor's classes: as chips below the pad, and as a list with their names and examples. */
import { classColor } from './colors'
import { byId, make } from './elements'
import { LONGEST_NAME, type Example, type Learner } from './learner'
import type { Raw, Words } from './source'

/** What the page does when something in the list is used. */
export interface ClassActions {
  thumbnail: (canvas: HTMLCanvasElement, raw: Raw) => void
  words: Words
  /** The name of a class has the focus. */
  focused: (label: number) => unknown
  /** A letter of a name was changed. */
  renamed: () => void
  /** A name is finished. */
  named: () => void
  remove: (label: number) => void
}

/** @param pick makes examples for this class from now on. */
export function showChips(learner: Learner, picked: number, pick: (label: number) => void): void {
  byId('class-chips', HTMLElement).replaceChildren(
    ...learner.state.names.map((name, label) => {
      const input = make('input', { type: 'radio', name: 'class', id: `pick-${label}`, checked: label === picked })
      input.onchange = () => pick(label)
      const count = make('span', { className: 'count' }, String(learner.count(label)))
      const chip = make('label', { className: 'chip' }, input, make('span', { className: 'name' }, name), count)
      chip.style.setProperty('--c', classColor(label))
      return chip
    }),
  )
}

export function showClasses(learner: Learner, actions: ClassActions): void {
  const { state, learnedClasses } = learner
  byId('class-list', HTMLOListElement).replaceChildren(
    ...state.names.map((name, label) => {
      const own = state.examples.filter((e) => e.label === label)
      const held = own.filter((e) => e.heldOut).length
      const remove = make('button', { type: 'button', id: `remove-${label}` }, '×')
      const named = (name: string) => {
        byId('class-chips', HTMLElement).children[label]!.querySelector('.name')!.textContent = name
        remove.ariaLabel = `Remove class “${name}”`
      }
      named(name)
      const input = make('input', { type: 'text', id: `name-${label}`, value: name, maxLength: LONGEST_NAME, autocomplete: 'off' })
      input.ariaLabel = `Name of class ${label + 1}`
      input.onfocus = () => actions.focused(label)
      // While it is typed, and in place: at the end, another control may have been pressed already and must not move.
      input.oninput = () => {
        learner.rename(label, input.value.trim() || name)
        named(learner.state.names[label]!)
        actions.renamed()
      }
      input.onchange = () => {
        input.value = learner.state.names[label]!
        actions.named()
      }
      remove.onclick = () => actions.remove(label)
      const unlearned = learnedClasses > 0 && label >= learnedClasses ? ', not learned yet' : ''
      const count = own.length ? `${own.length} ${actions.words.made}, ${held} set aside${unlearned}` : `${actions.words.nothing}${unlearned}`
      const item = make(
        'li',
        {},
        make('div', { className: 'class-line' }, input, make('span', { className: 'count' }, count), remove),
        make('div', { className: 'strip' }, ...own.map((e, i) => picture(e, i, name, actions))),
      )
      item.style.setProperty('--c', classColor(label))
      return item
    }),
  )
}

function picture(example: Example, index: number, name: string, { thumbnail }: ClassActions): HTMLCanvasElement {
  const canvas = make('canvas', { className: example.heldOut ? 'held' : '', role: 'img' })
  canvas.ariaLabel = `Example ${index + 1} of “${name}”${example.heldOut ? ', set aside as a test' : ''}`
  canvas.title = canvas.ariaLabel
  thumbnail(canvas, example.raw)
  return canvas
}
