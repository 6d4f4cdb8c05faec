/** What is seen of a federation: the cards of its members round theta, and the bytes that travel between them. */
import { byId, make, percent } from './elements'
import type { Federation } from './federation'
import type { Member } from './members'
import { Packets } from './packets'
import { thumbnail } from './pad'

const REST = 500 // between two rounds
const PICTURES = 6

interface Card {
  element: HTMLLIElement
  bar: HTMLElement
  score: HTMLElement
  sent: HTMLElement
}

export class Stage {
  private readonly stage = byId('federation-stage', HTMLElement)
  private readonly packets = new Packets(this.stage, byId('federation-hub', HTMLElement), true)
  private readonly list = byId('federation-cards', HTMLUListElement)
  private readonly cards: Card[] = []
  private readonly guests: number
  private readonly most: number
  private waiting: (() => void) | null = null

  constructor(
    members: Member[],
    private readonly shape: number[],
  ) {
    this.most = Math.max(1, ...members.map(({ train }) => train.raw.reduce((a, b) => Math.max(a, b), 0)))
    this.guests = members.length
    members.forEach((member, i) => this.put(i, member))
    this.invite('')
  }

  /** Shows the place of the visitor, with what is missing. */
  invite(text: string): void {
    const place = make('li', { className: 'card guest empty' }, make('h3', {}, 'You'), make('p', { className: 'note' }, text))
    if (this.cards[this.guests]) this.cards.length = this.guests
    this.list.querySelector('.guest')?.remove()
    this.list.append(place)
  }

  /** Shows the visitor as a member. */
  join(member: Member): void {
    this.list.querySelector('.guest.empty')?.remove()
    this.put(this.guests, member)
  }

  /** Shows the scores and bytes of now. */
  show(federation: Federation | null): void {
    this.cards.forEach((card, i) => {
      const score = federation?.scores[i]
      const sent = federation?.sent[i] ?? 0
      const part = score ? score.correct / score.examples : 0
      card.bar.style.transform = `scaleX(${part})`
      card.score.textContent = score ? `${percent(part)}: ${score.correct} of ${score.examples}` : 'not scored yet'
      card.sent.textContent = sent ? `sent ${(sent / 1000).toLocaleString('en', { maximumFractionDigits: 0 })} kB` : 'nothing sent'
    })
  }

  showFacts(facts: [string, string][]): void {
    byId('federation-facts', HTMLElement).replaceChildren(
      ...facts.map(([name, value]) => make('tr', {}, make('th', { scope: 'row' }, name), make('td', {}, value))),
    )
  }

  /** Theta goes to the members. */
  async down(count: number): Promise<void> {
    await Promise.all(this.cards.slice(0, count).map(({ element }) => this.packets.travel(element, 'down')))
  }

  computes(member: number): void {
    this.cards.forEach(({ element }, i) => element.classList.toggle('computing', i === member))
  }

  /** A member's gradient goes to the server. */
  up(member: number): void {
    const card = this.cards[member]
    if (!card) return
    card.element.classList.remove('computing')
    void this.packets.travel(card.element, 'up')
  }

  /** All has arrived, and the server makes its step. */
  arrived(): Promise<void> {
    return this.packets.arrived()
  }

  /** The pause between two rounds. */
  rest(): Promise<void> {
    return new Promise((done) => {
      const timer = setTimeout(() => this.waiting?.(), REST)
      this.waiting = () => {
        clearTimeout(timer)
        this.waiting = null
        done()
      }
    })
  }

  /** Ends all that is moving. */
  hurry(): void {
    this.packets.hurry()
    this.cards.forEach(({ element }) => element.classList.remove('computing'))
    this.waiting?.()
  }

  private put(at: number, member: Member): void {
    const bar = make('span', { className: 'bar' })
    const track = make('span', { className: 'track', ariaHidden: 'true' }, bar)
    const score = make('p', { className: 'score' })
    const sent = make('p', { className: 'note sent' })
    const guest = at === this.guests
    const element = make('li', { className: guest ? 'card guest' : 'card' }, make('h3', {}, member.name), this.pictures(member), track, score, sent)
    const before = this.cards[at]?.element
    if (before) before.replaceWith(element)
    else this.list.append(element)
    this.cards[at] = { element, bar, score, sent }
  }

  /** An example of each class. */
  private pictures(member: Member): HTMLElement {
    const strip = make('div', { className: 'pictures' })
    const side = this.shape[0]!
    const shown = member.classes.slice(0, PICTURES)
    if (this.shape[1] !== side || (this.shape[2] ?? 1) !== 1) {
      strip.append(...shown.map((name) => make('span', {}, name)))
      return strip
    }
    shown.forEach((name, label) => {
      const row = member.train.labels.indexOf(label)
      const canvas = make('canvas', { role: 'img' })
      canvas.ariaLabel = `Class “${name}”`
      canvas.title = name
      canvas.style.borderColor = `var(--class-${member.columns[label]! % 16}, var(--accent))`
      thumbnail(canvas, member.train.raw.subarray(row * side * side, (row + 1) * side * side), side, this.most)
      strip.append(canvas)
    })
    const more = member.classes.length - shown.length
    if (more > 0) strip.append(make('span', { className: 'note' }, `+ ${more}`))
    return strip
  }
}
