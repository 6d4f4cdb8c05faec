/** Two tabs of one page: what each keeps is there at the next visit. */
import { expect, it } from 'vitest'
import type { Manifest } from '../src/bundle'
import type { Device } from '../src/device'
import { headBytes, type Head } from '../src/head'
import { Keeper } from '../src/keeper'
import { Learner } from '../src/learner'
import { restored } from '../src/restore'
import type { Kept } from '../src/store'

const THETA = 'ab'.repeat(32)
const [ONES, TWOS] = [1, 2].map((value): Head => ({ kernel: new Float32Array(6).fill(value), bias: new Float32Array(3) })) as [Head, Head]
const manifest = { model: { example_shape: [1] } } as unknown as Manifest

/** The one record of a browser, copied as IndexedDB does. */
class Records {
  kept: Kept | undefined
  load = async () => structuredClone(this.kept)
  async replace(_: string, kept: Kept | null, version: number | undefined) {
    if (this.kept?.version !== version) return { there: structuredClone(this.kept) }
    this.kept = structuredClone(kept ?? undefined)
    return null
  }
}

async function open(records: Records) {
  const device = { features: 2, room: 4 } as Device
  const kept = await records.load()
  const state = kept ? restored(kept, device, manifest, THETA).state! : Learner.empty()
  const learner = new Learner(device, THETA, state)
  const keeper = new Keeper(records, learner, { device, manifest, thetaSha256: THETA }, kept)
  /** Draws an example that is known by its number, and keeps it. */
  const draw = (value: number, label: number) => (learner.add(Uint8Array.of(value), label), keeper.save())
  const drawn = () => learner.state.examples.map(({ raw, label }) => `${learner.state.names[label]} ${raw[0]}`)
  return { learner, keeper, draw, drawn }
}

it('keeps what both have drawn, whichever is closed last', async () => {
  const records = new Records()
  const [a, b] = [await open(records), await open(records)]
  for (const value of [1, 2, 3]) expect(await a.draw(value, value - 1)).toBe(false)
  expect(await b.draw(4, 0)).toBe(true)
  expect(b.drawn()).toEqual(['star 1', 'house 2', 'wave 3', 'star 4'])
  expect((await open(records)).drawn()).toEqual(b.drawn())
  a.learner.addClass('moon')
  expect(await a.draw(5, 3)).toBe(true)
  expect(await a.draw(6, 0)).toBe(false)
  expect((await open(records)).drawn()).toEqual(['star 1', 'house 2', 'wave 3', 'star 4', 'moon 5', 'star 6'])
  expect(a.learner.state.examples.map((e) => e.heldOut)).toEqual([false, false, false, false, false, true]) // every third
  a.learner.undo()
  expect(a.learner.canUndo).toBe(false) // it never takes away what another tab has drawn
})

it('keeps both where they draw at once, and an example that was removed stays removed', async () => {
  const records = new Records()
  const [a, b] = [await open(records), await open(records)]
  await Promise.all([a.draw(1, 0), b.draw(2, 0), a.draw(3, 1), b.draw(4, 1), a.draw(5, 2)])
  expect((await open(records)).drawn().sort()).toEqual(['house 3', 'house 4', 'star 1', 'star 2', 'wave 5'])
  await b.keeper.catchUp()
  a.learner.removeExample(a.learner.state.examples[0]!)
  await a.keeper.save()
  const left = a.drawn()
  await b.draw(6, 0)
  expect((await open(records)).drawn()).toEqual([...left, 'star 6'])
})

it('finds classes by their names, and refuses more than there is room for without writing', async () => {
  const records = new Records()
  const [a, b] = [await open(records), await open(records)]
  a.learner.removeClass(0)
  for (const [i, name] of ['one', 'two'].entries()) (a.learner.addClass(name), await a.draw(i, 2 + i))
  await expect(b.draw(7, 0)).rejects.toThrow(/another tab of this page there are 5; there is room for 4/)
  expect((await open(records)).drawn()).toEqual(['one 0', 'two 1'])
  expect(b.drawn()).toEqual(['star 7'])
  b.learner.undo()
  await b.draw(8, 2)
  expect((await open(records)).drawn()).toEqual(['one 0', 'two 1', 'wave 8'])
})

it('sees what the other has done when it is looked at again, and what was forgotten is forgotten', async () => {
  const records = new Records()
  const [a, b] = [await open(records), await open(records)]
  expect(await b.keeper.catchUp()).toBe(false)
  await a.draw(1, 0)
  expect(await b.keeper.catchUp()).toBe(true)
  expect(b.drawn()).toEqual(['star 1'])
  expect(await b.keeper.catchUp()).toBe(false)
  a.learner.reset()
  await a.keeper.save()
  expect(records.kept).toBeUndefined()
  await b.draw(2, 1)
  expect((await open(records)).drawn()).toEqual(['house 2'])
})

it('keeps a new head beside drawings of another tab, with the head before it', async () => {
  const records = new Records()
  const a = await open(records)
  a.learner.importHead(headBytes(ONES, THETA))
  await a.keeper.save()
  const b = await open(records)
  await a.draw(1, 0)
  b.learner.importHead(headBytes(TWOS, THETA))
  expect(await b.keeper.save()).toBe(true)
  const again = await open(records)
  expect([again.drawn(), again.learner.state.head]).toEqual([['star 1'], TWOS])
  expect(records.kept!.previous).toEqual(headBytes(ONES, THETA))
  await a.draw(2, 0)
  expect((await open(records)).learner.state.head).toEqual(TWOS)
})

it('keeps the names of classes for which nothing was drawn', async () => {
  const records = new Records()
  const a = await open(records)
  a.learner.rename(0, 'sun')
  await a.keeper.save()
  a.learner.addClass('moon')
  await a.keeper.save()
  const b = await open(records)
  b.learner.rename(1, 'hut')
  await b.keeper.save()
  const c = await open(records)
  expect(c.learner.state.names).toEqual(['sun', 'hut', 'wave', 'moon'])
  c.learner.reset()
  await c.keeper.save()
  expect(records.kept).toBeUndefined()
})

it('knows a class that was renamed, in this tab or in the other', async () => {
  const records = new Records()
  const a = await open(records)
  for (const label of [0, 1, 2]) await a.draw(label, label)
  const b = await open(records)
  a.learner.rename(0, 'sun')
  await a.draw(3, 1)
  expect(await b.draw(4, 0)).toBe(true) // it still knows the class as “star”
  expect(b.drawn()).toEqual(['sun 0', 'house 1', 'wave 2', 'house 3', 'sun 4'])
  a.learner.rename(2, 'sea')
  await a.keeper.save()
  expect(a.drawn()).toEqual(['sun 0', 'house 1', 'sea 2', 'house 3', 'sun 4'])
  b.learner.rename(1, 'hut')
  b.learner.rename(2, 'line')
  await b.draw(5, 1)
  expect((await open(records)).drawn()).toEqual(['sun 0', 'hut 1', 'sea 2', 'hut 3', 'sun 4', 'hut 5']) // both have renamed: the first one counts
})

it('takes a class for a new one where the other tab has removed it, and a head where it has renamed alone', async () => {
  const records = new Records()
  const a = await open(records)
  for (const label of [0, 1, 2]) await a.draw(label, label)
  const b = await open(records)
  a.learner.rename(0, 'sun')
  await a.keeper.save()
  b.learner.importHead(headBytes(ONES, THETA))
  await b.keeper.save()
  expect((await open(records)).learner.state).toMatchObject({ names: ['sun', 'house', 'wave'], head: ONES })
  await a.keeper.catchUp()
  a.learner.removeClass(2)
  a.learner.addClass('moon')
  await a.draw(6, 2)
  await b.draw(7, 2)
  expect((await open(records)).drawn()).toEqual(['sun 0', 'house 1', 'moon 6', 'wave 7'])
})
