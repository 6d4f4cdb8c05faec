/** The rules of learning, with a device that only notes what it is asked. */
import { beforeEach, describe, expect, it } from 'vitest'
import type { Device, Fitted } from '../src/device'
import { headBytes, type Head } from '../src/head'
import { Learner, safeRate, STEPS } from '../src/learner'
import { zipped } from '../src/zip'

const THETA = 'ab'.repeat(32)
const head = (...columns: [number, number][]): Head => ({
  kernel: Float32Array.from([...columns.map(([a]) => a), ...columns.map(([, b]) => b)]),
  bias: new Float32Array(columns.length),
})

describe('a learner', () => {
  let asked: { phi: number[]; labels: number[]; start: Head; steps: number; beta: number }[]
  let answer: Head
  let learner: Learner
  /** What the visitor does while the device computes. */
  let meanwhile: () => void

  beforeEach(() => {
    asked = []
    meanwhile = () => {}
    const fitHead = async (phi: Float32Array, labels: Int32Array, start: Head, steps: number, beta: number): Promise<Fitted> => {
      asked.push({ phi: [...phi], labels: [...labels], start, steps, beta })
      meanwhile()
      return { head: answer, lossBefore: 1, loss: 0.5 }
    }
    learner = new Learner({ features: 2, room: 5, fitHead } as unknown as Device, THETA, { names: ['a', 'b'], examples: [], head: null })
  })

  const add = (label: number, ...values: [number, number]) => learner.add(Uint8Array.of(1), label, Float32Array.from(values))
  const addAll = () => {
    for (let i = 1; i <= 3; i++) {
      add(0, i, 0)
      add(1, 0, i)
    }
  }

  it('never shows the held-out examples to the device, and starts a new head at 0', async () => {
    add(0, 1, 0)
    await expect(learner.learn()).rejects.toThrow(/3 examples.*“a”, “b”/)
    learner.undo()
    addAll()
    answer = head([1, 0], [0, 1])
    const found = await learner.learn()
    expect(asked).toEqual([
      { phi: [1, 0, 0, 1, 2, 0, 0, 2], labels: [0, 1, 0, 1], start: head([0, 0], [0, 0]), steps: STEPS, beta: 2 / (10 / 4 + 1) },
    ])
    expect(found).toMatchObject({ kept: true, before: { correct: 1, examples: 2 }, after: { correct: 2, examples: 2 } })
    expect(learner.state.head).toBe(answer)
  })

  it('keeps the old head where the new one is not better, and starts from the old columns when a class is added', async () => {
    addAll()
    const good = (answer = head([1, 0], [0, 1]))
    await learner.learn()
    answer = head([0, 1], [1, 0])
    expect(await learner.learn()).toMatchObject({ kept: false, before: { correct: 2 }, after: { correct: 0 } })
    expect(learner.state.head).toBe(good)
    learner.addClass('c')
    expect(learner.predict(Float32Array.of(1, 0))).toHaveLength(2)
    for (let i = 1; i <= 3; i++) add(2, -i, -i)
    answer = head([1, 0], [0, 1], [-1, -1])
    expect(await learner.learn()).toMatchObject({ kept: true, before: { correct: 2, loss: Infinity }, after: { correct: 3 } })
    expect(asked.at(-1)!.start).toEqual(head([1, 0], [0, 1], [0, 0]))
    learner.undo()
    expect(learner.state.head).toBe(good)
  })

  it('keeps no head where classes or drawings went away while it learned; more drawings do no harm', async () => {
    addAll()
    learner.addClass('c')
    for (let i = 1; i <= 3; i++) add(2, -i, -i)
    answer = head([1, 0], [0, 1], [-1, -1])
    const before = learner.state
    for (const change of [() => learner.removeClass(0), () => learner.undo(), () => learner.reset()]) {
      learner.adopt(before)
      add(0, 1, 0)
      let changed = before
      meanwhile = () => (change(), (changed = learner.state))
      await expect(learner.learn()).rejects.toThrow(/changed while it learned.*Learn again/)
      expect(learner.state).toBe(changed)
    }
    learner.adopt(before)
    meanwhile = () => learner.importHead(headBytes(head([1, 1], [2, 2], [3, 3]), THETA))
    await expect(learner.learn()).rejects.toThrow(/changed while it learned/)
    expect(learner.state.head).toEqual(head([1, 1], [2, 2], [3, 3]))
    learner.undo()
    meanwhile = () => (add(0, 1, 0), learner.addClass('d'), learner.rename(0, 'A'))
    expect(await learner.learn()).toMatchObject({ kept: true })
    expect(learner.state).toMatchObject({ names: ['A', 'b', 'c', 'd'], head: answer })
  })

  it('loses a class with its drawings and its column; undo brings them back', async () => {
    addAll()
    learner.addClass('c')
    for (let i = 1; i <= 3; i++) add(2, -i, -i)
    answer = head([1, 0], [0, 1], [-1, -1])
    await learner.learn()
    learner.removeClass(0)
    expect(learner.state.names).toEqual(['b', 'c'])
    expect(learner.state.examples.map((e) => e.label)).toEqual([0, 0, 0, 1, 1, 1])
    expect(learner.state.head).toEqual(head([0, 1], [-1, -1]))
    expect(() => learner.removeClass(0)).toThrow(/at least two/)
    learner.undo()
    expect(learner.state.names).toEqual(['a', 'b', 'c'])
    expect(learner.state.head).toBe(answer)
  })

  it('undoes changes, but not names: they stay with their classes', () => {
    learner.addClass('c')
    add(2, 1, 1)
    learner.rename(0, 'A')
    learner.removeClass(1)
    learner.rename(1, 'b') // letter by letter: for a moment it is the name of the class that was removed
    learner.rename(1, 'bird')
    learner.undo()
    expect(learner.state.names).toEqual(['A', 'b', 'bird'])
    learner.undo()
    learner.undo()
    expect(learner.state.names).toEqual(['A', 'b'])
    learner.importHead(headBytes(head([1, 0], [0, 1]), THETA), ['x', 'y'])
    learner.rename(0, 'X') // another class than the one before the import
    learner.undo()
    expect(learner.state.names).toEqual(['A', 'b'])
  })

  it('gives the name of a new class to no other one that an import has taken away', () => {
    for (const name of ['c', 'd']) learner.addClass(name)
    learner.importHead(headBytes(head([1, 0], [0, 1]), THETA))
    learner.addClass('e')
    learner.rename(2, 'eel')
    learner.rename(0, 'ape')
    learner.undo()
    expect(learner.state.names).toEqual(['ape', 'b'])
    learner.undo()
    expect(learner.state.names).toEqual(['ape', 'b', 'c', 'd'])
  })

  it('takes a head from a file only if it fits', () => {
    expect(() => learner.importHead(headBytes(head([1, 0], [0, 1]), 'cd'.repeat(32)))).toThrow(/another backbone/)
    expect(() => learner.importHead(headBytes(head(...Array<[number, number]>(6).fill([0, 0])), THETA))).toThrow(/6 classes.*2 to 5/)
    expect(learner.canUndo).toBe(false)
    learner.importHead(headBytes(head([1, 0], [0, 1], [1, 1]), THETA))
    expect(learner.state.names).toEqual(['a', 'b', 'class 3'])
    expect(() => learner.exportHead()).not.toThrow()
  })

  it('puts the columns of a file with names where the drawings of these names are, or refuses', async () => {
    const file = (...names: string[]) =>
      zipped(new Map([['head.bin', headBytes(head([1, 2], [3, 4], [5, 6]), THETA)], ['names.json', new TextEncoder().encode(JSON.stringify(names))]])) // prettier-ignore
    learner.addClass('c')
    add(2, 1, 0)
    add(0, 0, 1)
    await learner.importFile(file('c', 'x', 'a'))
    expect(learner.state.names).toEqual(['a', 'x', 'c']) // nothing was drawn for b
    expect(learner.state.head).toEqual(head([5, 6], [3, 4], [1, 2]))
    add(1, 1, 1)
    const before = learner.state
    await expect(learner.importFile(file('c', 'b', 'a'))).rejects.toThrow(/no class “x”.*“c”, “b”, “a”/)
    await expect(learner.importFile(file('c', 'c', 'a'))).rejects.toThrow(/no class “x”/)
    await expect(learner.importFile(file('a', 'x', 'c', 'd'))).rejects.toThrow(/names 4 classes, and its head has 3/)
    expect(learner.state).toBe(before)
    learner.importHead(headBytes(head([1, 2], [3, 4], [5, 6]), THETA)) // without names: in the order of the classes
    expect([learner.state.names, learner.state.head]).toEqual([['a', 'x', 'c'], head([1, 2], [3, 4], [5, 6])])
  })

  it('keeps the names of a file whole: long ones differ at their ends alone', async () => {
    const names = ['left', 'right', 'left'].map((end, i) => `the hand that writes, from the ${end}${i > 1 ? ' again' : ''}`)
    learner.importHead(headBytes(head([1, 2], [3, 4], [5, 6]), THETA), names)
    expect(learner.state.names).toEqual(names)
    learner.rename(0, `${names[0]}!`)
    expect(learner.state.names[0]).toBe(`${names[0]}!`)
    learner.undo()
    learner.addClass('c')
    for (const [label, name] of [names[2]!, 'b', names[0]!].entries()) learner.rename(label, name)
    add(0, 1, 0)
    add(2, 0, 1)
    await learner.importFile(zipped(new Map([['head.bin', headBytes(head([1, 2], [3, 4], [5, 6]), THETA)], ['names.json', new TextEncoder().encode(JSON.stringify(names))]]))) // prettier-ignore
    expect([learner.state.names, learner.state.head]).toEqual([[names[2], names[1], names[0]], head([5, 6], [3, 4], [1, 2])])
  })

  it('takes a rate at which steps cannot raise the loss', () => {
    const phi = Float32Array.from({ length: 40 }, (_, i) => 3 * Math.sin(i * i))
    const labels = Array.from({ length: 20 }, (_, i) => i % 3)
    const at = { kernel: Float64Array.from([0.5, -1, 2, 1, 0, -2]), bias: Float64Array.of(0, 1, -1) }
    const losses = Array.from({ length: 50 }, () => step(at, phi, labels, safeRate(phi, 20)))
    for (let i = 1; i < losses.length; i++) expect(losses[i]).toBeLessThanOrEqual(losses[i - 1]!)
    const rough = { kernel: Float64Array.from([0.5, -1, 2, 1, 0, -2]), bias: Float64Array.of(0, 1, -1) }
    const jumps = Array.from({ length: 50 }, () => step(rough, phi, labels, 30 * safeRate(phi, 20)))
    expect(jumps.some((loss, i) => i > 0 && loss > jumps[i - 1]!)).toBe(true) // thirty times as much would
  })
})

/** One gradient step on a head of three classes on two features; the loss before it. */
function step(head: { kernel: Float64Array; bias: Float64Array }, phi: Float32Array, labels: number[], rate: number): number {
  const [kernel, bias] = [head.kernel.slice(), head.bias.slice()]
  let loss = 0
  labels.forEach((label, i) => {
    const [a, b] = [phi[2 * i]!, phi[2 * i + 1]!]
    const logits = [0, 1, 2].map((j) => a * kernel[j]! + b * kernel[3 + j]! + bias[j]!)
    const total = logits.reduce((sum, logit) => sum + Math.exp(logit), 0)
    loss -= (logits[label]! - Math.log(total)) / labels.length
    logits.forEach((logit, j) => {
      const error = (rate * (Math.exp(logit) / total - Number(j === label))) / labels.length
      head.kernel[j]! -= error * a
      head.kernel[3 + j]! -= error * b
      head.bias[j]! -= error
    })
  })
  return loss
}
