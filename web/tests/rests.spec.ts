import { expect, test } from 'vitest'
import { Rests, secondsOf } from '../src/rests'

test('seconds that a server names are taken if they can be waited for', () => {
  const named = [{ seconds: 3 }, { seconds: 0 }, { seconds: -5 }, { seconds: NaN }, { seconds: 'soon' }, {}]
  expect(named.map((work) => secondsOf(work, 2))).toEqual([3, 0, 2, 2, 2, 2])
})

test('each refusal in a row makes the rest longer, and one that is taken ends the row', () => {
  const rests = new Rests()
  rests.begin({ seconds: 4 })
  const found = Array.from({ length: 7 }, (_, round) => rests.refused('update', 422, round))
  expect(found).toEqual([4, 10, 20, 40, 80, 160, 180])
  expect(rests.refused('scores', 422, 8)).toBe(4)
  rests.taken('update')
  rests.begin({ seconds: 60 })
  expect(rests.refused('update', 422, 9)).toBe(5)
  expect(rests.refused('update', 410, 9)).toBe(null)
})
