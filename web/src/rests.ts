/**
 * How long a browser rests after the server has refused what it sent; tflite_export/device/live/rests.py for a browser.
 *
 * The same examples with the same theta would be refused again, and a visit costs energy and bytes.
 */
const FIRST = 5 // seconds
const LONGEST = 180 // seconds

/** What a server may refuse; each has a row of its own. */
export type Sent = 'update' | 'scores'

/** The seconds that a work names; `otherwise` if it names none, or fewer than 0. */
export function secondsOf(work: object, otherwise: number): number {
  const { seconds } = work as { seconds?: unknown }
  return typeof seconds === 'number' && seconds >= 0 ? seconds : otherwise
}

export class Rests {
  /** Seconds that the present work named. */
  private left = FIRST
  private readonly rounds = new Map<Sent, number>()
  private readonly rows = new Map<Sent, number>()

  /** A work begins; it says how many seconds are left for it. */
  begin(work: object): void {
    this.left = secondsOf(work, FIRST)
  }

  /** The server has taken it: the next refusal is the first one again. */
  taken(what: Sent): void {
    this.rounds.delete(what)
    this.rows.delete(what)
  }

  /** Seconds of rest after the server has not taken it, and said so with this status; null: none, ask at once. */
  refused(what: Sent, status: number, round: number): number | null {
    const again = this.rounds.get(what) === round
    if (status === 410) return null // it came too late: the next work is another one
    this.rounds.set(what, round)
    if (status === 409 && !again) return null // the same, unless the server asks for it once more
    const before = this.rows.get(what) ?? 0
    this.rows.set(what, before + 1)
    const rest = Math.min(FIRST * 2 ** before, LONGEST)
    return before === 0 ? Math.min(rest, this.left) : rest
  }
}
