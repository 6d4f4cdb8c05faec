/** What is loaded once. */
import { expect, it } from 'vitest'
import { once } from '../src/once'

it('loads once, for all who ask', async () => {
  let loads = 0
  const get = once(async () => ++loads)
  expect(await Promise.all([get(), get()])).toEqual([1, 1])
  expect([await get(), loads]).toEqual([1, 1])
})

it('loads again after it has failed, when there was no network for example', async () => {
  let loads = 0
  const get = once(async () => {
    if (++loads === 1) throw new TypeError('no network')
    return loads
  })
  const both = await Promise.allSettled([get(), get()])
  expect([both.map(({ status }) => status), loads]).toEqual([['rejected', 'rejected'], 1])
  expect([await get(), await get()]).toEqual([2, 2])
})
