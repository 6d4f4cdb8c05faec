/** What this browser kept of an earlier visit, checked. */
import type { Manifest } from './bundle'
import { messageOf } from './elements'
import { readHead, type Head } from './head'
import type { Computer } from './late_device'
import type { State } from './learner'
import type { Kept } from './store'

/** The stored state (null: none is whole), and what is wrong with it. If the head is damaged, the one before it is used, if that is whole. */
export function restored(kept: Kept, device: Pick<Computer, 'features' | 'room'>, manifest: Manifest, thetaSha256: string): { state: State | null; problem: string } {
  const pixels = manifest.model.example_shape.reduce((a, b) => a * b, 1)
  const names = kept.names.map(String).slice(0, device.room)
  if (names.length < 2) return { state: null, problem: 'What was kept here is damaged and was refused.' }
  const whole = kept.examples.filter(({ raw, label }) => raw.length === pixels && label >= 0 && label < names.length)
  const examples = whole.map((e) => ({ ...e, phi: null }))
  const read = (file: Uint8Array): Head => {
    const head = readHead(file, device.features, thetaSha256)
    if (head.bias.length > names.length) throw new Error('The head has more classes than there are names.')
    return head
  }
  if (!kept.head) return { state: { names, examples, head: null }, problem: '' }
  try {
    return { state: { names, examples, head: read(kept.head) }, problem: '' }
  } catch (error) {
    const why = `The head that was kept here is refused. ${messageOf(error)}`
    try {
      const head = kept.previous && read(kept.previous)
      const instead = head ? 'The one before it is in use.' : 'There was none before it.'
      return { state: { names, examples, head }, problem: `${why} ${instead}` }
    } catch {
      return { state: { names, examples, head: null }, problem: `${why} The one before it is damaged, too.` }
    }
  }
}
