/** What a page finds when it is opened, with a database that fails here or there. */
import { openDB } from 'idb'
import { expect, it, vi } from 'vitest'
import { openStore, type Kept } from '../src/store'

vi.mock('idb', () => ({ openDB: vi.fn() }))

const [MINE, OTHER] = ['ab'.repeat(32), 'cd'.repeat(32)]
const kept: Kept = { names: ['a', 'b'], examples: [], head: null, previous: null }
const database = (get: () => Promise<Kept>) => ({ get, getAllKeys: async () => [MINE, OTHER] }) as unknown as Awaited<ReturnType<typeof openDB>>

it('reads what is kept, and which other backbones there are', async () => {
  vi.mocked(openDB).mockResolvedValue(database(async () => kept))
  expect(await openStore(MINE)).toMatchObject({ kept, others: [OTHER], problem: '' })
})

it('opens the page without what cannot be read, and never writes over it', async () => {
  const damaged = new DOMException('Failed to read large IndexedDB value', 'DataError')
  vi.mocked(openDB).mockResolvedValue(database(() => Promise.reject(damaged)))
  expect(await openStore(MINE)).toMatchObject({ store: null, kept: undefined, problem: expect.stringMatching(/keeps nothing \(Failed to read large/) as string })
  vi.mocked(openDB).mockRejectedValue(new DOMException('denied', 'SecurityError'))
  expect(await openStore(MINE)).toMatchObject({ store: null, problem: expect.stringContaining('(denied)') as string })
})
