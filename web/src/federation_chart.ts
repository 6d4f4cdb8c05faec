/** The curves of the members' mean accuracy, one for each mode. */
import { percent } from './elements'
import type { Mode } from './federation'

const NAMES: Record<Mode, string> = { own: 'own heads', one: 'one head' }

export function drawChart(svg: SVGSVGElement, history: Record<Mode, number[]>): void {
  const [left, right, top, bottom] = [46, 272, 12, 140]
  const rounds = Math.max(10, ...Object.values(history).map((h) => h.length - 1))
  const x = (round: number) => left + ((right - left) * round) / rounds
  const y = (part: number) => bottom - (bottom - top) * part
  const element = (name: string, attributes: Record<string, string | number>, text = '') => {
    const found = document.createElementNS('http://www.w3.org/2000/svg', name)
    for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, String(value))
    found.textContent = text
    return found
  }
  const children: SVGElement[] = []
  for (const part of [0, 0.5, 1]) {
    children.push(element('line', { x1: left, x2: right, y1: y(part), y2: y(part) }))
    children.push(element('text', { x: left - 6, y: y(part) + 4, 'text-anchor': 'end' }, percent(part)))
  }
  children.push(element('text', { x: left, y: bottom + 18, 'text-anchor': 'middle' }, '0'))
  children.push(element('text', { x: right, y: bottom + 18, 'text-anchor': 'end' }, `${rounds} rounds`))
  const drawn = (Object.entries(history) as [Mode, number[]][]).filter(([, values]) => values.length > 0)
  const ends = drawn.map(([, values]) => y(values.at(-1)!) + 4)
  if (ends.length === 2 && Math.abs(ends[0]! - ends[1]!) < 14) {
    const upper = ends[0]! <= ends[1]! ? 0 : 1 // the two names must not lie on each other
    ends[1 - upper] = ends[upper]! + 14
  }
  drawn.forEach(([mode, values], i) => {
    const points = values.map((value, round) => `${x(round).toFixed(1)},${y(value).toFixed(1)}`)
    const last = values.length - 1
    children.push(element('polyline', { class: mode, points: points.join(' ') }))
    children.push(element('circle', { class: mode, cx: x(last), cy: y(values[last]!), r: 4 }))
    children.push(element('text', { class: mode, x: x(last) + 8, y: ends[i]! }, NAMES[mode]))
  })
  svg.replaceChildren(...children)
  const told = drawn.map(([mode, values]) => `${NAMES[mode]} ${percent(values[0]!)} to ${percent(values.at(-1)!)} in ${values.length - 1} rounds`)
  svg.setAttribute('aria-label', told.length ? `Mean accuracy: ${told.join('; ')}` : 'Mean accuracy by round: no round yet')
}
