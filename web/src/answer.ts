/** Buttons below a guess: right, or which class it is. Each teaches with one tap. */
import { classColor } from './colors'
import { byId, make } from './elements'

/** @param top the class that was guessed; null: there is no guess. */
export function showAnswer(names: readonly string[], top: number | null, teach: (label: number) => void): void {
  const answer = byId('answer', HTMLElement)
  answer.hidden = top === null
  const key = JSON.stringify([top, names])
  if (top === null || answer.dataset.shown === key) return // a button must not be replaced under a finger
  answer.dataset.shown = key
  const teacher = (label: number, text: string, id: string) => {
    const found = make('button', { type: 'button', id, className: label === top ? 'primary' : 'chip' }, text)
    found.style.setProperty('--c', classColor(label))
    found.onclick = () => teach(label)
    return found
  }
  const others = names.map((name, label) => teacher(label, name, `is-${label}`)).filter((_, label) => label !== top)
  answer.replaceChildren(
    teacher(top, 'Right', 'right'),
    make('div', { className: 'others', role: 'group', ariaLabel: 'No, it is' }, make('span', {}, 'No, it is'), ...others),
  )
}
