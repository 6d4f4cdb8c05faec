/** Curves of the members' mean accuracy. */
import { percent } from './elements'

export interface Curve {
  name: string
  /** For its style: the first is drawn in full, the second with dashes. */
  className: 'own' | 'one'
  /** [round, part that is right], by round. */
  points: (readonly [number, number])[]
}

/** @param few the axis has at least so many rounds. */
export function drawChart(svg: SVGSVGElement, curves: readonly Curve[], few = 10): void {
  const [left, right, top, bottom] = [46, 272, 12, 140]
  const drawn = curves.filter(({ points }) => points.length > 0)
  const last = ({ points }: Curve) => points.at(-1)!
  const rounds = Math.max(few, ...drawn.map((curve) => last(curve)[0]))
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
  const ends = drawn.map((curve) => y(last(curve)[1]) + 4)
  if (ends.length === 2 && Math.abs(ends[0]! - ends[1]!) < 14) {
    const upper = ends[0]! <= ends[1]! ? 0 : 1 // the two names must not lie on each other
    ends[1 - upper] = ends[upper]! + 14
  }
  drawn.forEach((curve, i) => {
    const { name, className, points } = curve
    const line = points.map(([round, part]) => `${x(round).toFixed(1)},${y(part).toFixed(1)}`)
    const [end, part] = last(curve)
    children.push(element('polyline', { class: className, points: line.join(' ') }))
    children.push(element('circle', { class: className, cx: x(end), cy: y(part), r: 4 }))
    children.push(element('text', { class: className, x: x(end) + 8, y: ends[i]! }, name))
  })
  svg.replaceChildren(...children)
  const told = drawn.map((curve) => `${curve.name} ${percent(curve.points[0]![1])} to ${percent(last(curve)[1])} in ${last(curve)[0]} rounds`)
  svg.setAttribute('aria-label', told.length ? `Mean accuracy: ${told.join('; ')}` : 'Mean accuracy by round: no round yet')
}
