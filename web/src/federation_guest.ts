/** The visitor as a member: the drawings that the page's learner keeps, and their names. */
import { zeroHead } from './head'
import type { Examples, Member, MembersAbout } from './members'
import { decoded, type Preprocessing } from './preprocess'
import { Store, type Kept } from './store'

export interface Guest {
  member: Member
  /** Changes with the drawings and the names of their classes. */
  key: string
}

interface Setting {
  about: MembersAbout
  preprocessing: Partial<Preprocessing>
  pixels: number
  features: number
  room: number
}

/** The visitor's drawings as a member; or why there is none: a text for the visitor. */
export async function readGuest(thetaSha256: string, setting: Setting): Promise<Guest | string> {
  let kept: Kept | undefined
  try {
    const store = await Store.open()
    kept = await store.load(thetaSha256).finally(() => store.close())
  } catch {
    return 'This browser keeps no drawings for this page, so you cannot take part.'
  }
  return kept ? guestOf(kept, setting) : NO_DRAWINGS
}

/** What is said to a visitor who has no drawings, or has none any more. */
export const NO_DRAWINGS = 'Draw at least two classes above, and you are a member, too.'

export function guestOf({ names, examples }: Pick<Kept, 'names' | 'examples'>, setting: Setting): Guest | string {
  const { about, preprocessing, pixels, features, room } = setting
  const whole = examples.filter(({ raw }) => raw.length === pixels)
  const used = names.map((_, label) => label).filter((label) => whole.some((e) => e.label === label && !e.heldOut))
  if (used.length < 2) return NO_DRAWINGS
  let free = about.classes.length
  // A class with the name of one of theirs is that class; any other is a new one.
  const columns = used.map((label) => {
    const same = about.classes.indexOf(names[label]!)
    return same >= 0 ? same : free++
  })
  if (new Set(columns).size < columns.length) return 'Two of your classes have one name: rename one, and you are a member, too.'
  if (free > room) return `There is room for ${room} classes; with yours it would be ${free}.`
  const of = (heldOut: boolean): Examples => {
    const part = whole.filter((e) => e.heldOut === heldOut && used.includes(e.label))
    const raw = new Uint8Array(part.length * pixels)
    part.forEach((e, i) => raw.set(e.raw, i * pixels))
    return { raw, x: decoded(raw, preprocessing), labels: Int32Array.from(part, (e) => used.indexOf(e.label)) }
  }
  const classes = used.map((label) => names[label]!)
  const [train, test] = [of(false), of(true)]
  return {
    member: { name: 'You', classes, columns, train, test, head: zeroHead(features, classes.length) },
    key: JSON.stringify([classes, [...train.labels], [...train.raw], [...test.labels], [...test.raw]]),
  }
}
