/** Messages that travel between theta and the members, as one sees them; nothing moves where motion is not wanted. */
import { make } from './elements'

const TRAVEL = 650 // milliseconds of a message from theta to a member, or back
const CORNER = 20 // pixels from the corner of a card

export class Packets {
  private readonly travels = new Set<Animation>()
  private readonly still = matchMedia('(prefers-reduced-motion: reduce)')

  /**
   * @param stage what the messages travel over.
   * @param hub theta's place in it.
   * @param inCorner whether a message ends in the corner of a member, where it hides nothing, or in its middle.
   */
  constructor(
    private readonly stage: HTMLElement,
    private readonly hub: HTMLElement,
    private readonly inCorner: boolean,
  ) {}

  /** Theta goes to a member, or the member's gradient to theta. */
  async travel(member: HTMLElement, way: 'down' | 'up'): Promise<void> {
    if (this.still.matches) return
    const box = this.stage.getBoundingClientRect()
    const place = (element: HTMLElement) => {
      const { left, right, top, width, height } = element.getBoundingClientRect()
      const [x, y] = element !== this.hub && this.inCorner ? [right - CORNER, top + CORNER] : [left + width / 2, top + height / 2]
      return `translate(${x - box.left}px, ${y - box.top}px)`
    }
    const packet = make('span', { className: `packet ${way}`, ariaHidden: 'true' }, way === 'down' ? 'θ' : '∇')
    const [from, to] = way === 'down' ? [this.hub, member] : [member, this.hub]
    this.stage.append(packet)
    const travel = packet.animate([{ transform: place(from) }, { transform: place(to) }], { duration: TRAVEL, easing: 'ease-in-out', fill: 'both' })
    this.travels.add(travel)
    await travel.finished.catch(() => {})
    this.travels.delete(travel)
    packet.remove()
  }

  /** All has arrived, and theta moves. */
  async arrived(): Promise<void> {
    await Promise.all([...this.travels].map(({ finished }) => finished.catch(() => {})))
    if (this.still.matches) return
    this.hub.animate([{ transform: 'scale(1)' }, { transform: 'scale(1.06)' }, { transform: 'scale(1)' }], { duration: 350, easing: 'ease-out' })
  }

  /** Ends all that is moving. */
  hurry(): void {
    for (const travel of [...this.travels]) travel.finish()
  }
}
