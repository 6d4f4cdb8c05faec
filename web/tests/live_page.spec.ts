/** The part of the page that joins a live run: a browser that keeps nothing, and two tabs. The rest is tested in live.spec.ts. */
import { afterEach, beforeEach, expect, it, vi } from 'vitest'
import type { Manifest } from '../src/bundle'
import type { FederationLive } from '../src/federation_live'
import { LiveClient } from '../src/live_client'
import { LivePage } from '../src/live_page'
import { BrowserStore, NO_COUNTS, type Identity } from '../src/live_store'

class Element {
  hidden = false
  textContent = ''
  dataset: Record<string, string> = {}
  classList = { toggle: () => {} }
  append = () => {}
  replaceChildren = () => {}
  onclick = () => {}
}
let elements: Record<string, Element>
const kinds = ['HTMLElement', 'HTMLFormElement', 'HTMLInputElement', 'HTMLButtonElement']

beforeEach(() => {
  elements = {}
  for (const kind of kinds) vi.stubGlobal(kind, Element)
  vi.stubGlobal('document', { getElementById: (id: string) => (elements[id] ??= new Element()), createElement: () => new Element(), baseURI: 'https://host.example/' })
  vi.stubGlobal('isSecureContext', true)
  const locks = new Map<string, { last: Promise<unknown>; busy: number }>()
  const request = async (name: string, ...given: unknown[]) => {
    const lock = locks.get(name) ?? { last: Promise.resolve(), busy: 0 }
    locks.set(name, lock)
    const work = given.at(-1) as (lock: object | null) => unknown
    if ((given[0] as LockOptions).ifAvailable && lock.busy) return work(null)
    lock.busy++
    const done = lock.last.then(() => work({}))
    lock.last = done.catch(() => {})
    return done.finally(() => lock.busy--)
  }
  vi.stubGlobal('navigator', { locks: { request } })
})
afterEach(() => {
  vi.unstubAllGlobals()
  vi.restoreAllMocks()
})

const refused = async () => Promise.reject(new Error('not asked for'))
const open = () => LivePage.open({ browser: {} } as Manifest, refused, refused, { self: () => {} } as unknown as FederationLive)

it('says that it cannot join, and the rest of the page goes on', async () => {
  const denied = () => {
    throw new DOMException('The user denied permission to access the database.', 'SecurityError')
  }
  vi.stubGlobal('indexedDB', { open: denied })
  await open()
  expect(elements['join-form']!.hidden).toBe(true)
  expect(elements['live-status']!.textContent).toMatch(/keeps nothing \(The user denied permission.*allow this page to store data/)
})

it('says what is wrong where the browser closes the store of a client', async () => {
  const identity: Identity = { key: {} as CryptoKeyPair, token: null, member: { client: 4, classes: 2, rounds: 5 } }
  const closed = async () => Promise.reject(new DOMException('The database connection is closing.', 'InvalidStateError'))
  let reads = 0
  const store = { identity: async () => (reads++ === 0 ? identity : closed()), counts: async () => NO_COUNTS, examples: closed, forget: vi.fn() }
  vi.spyOn(BrowserStore, 'open').mockResolvedValue(store as unknown as BrowserStore)
  await open()
  await expect.poll(() => elements['live']!.dataset.state, { timeout: 2000 }).toBe('failed')
  expect(elements['live-status']!.textContent).toBe('The database connection is closing.')
  expect(store.forget).not.toHaveBeenCalled()
})

it('stays the client while it is paused: another tab waits, and goes on when this one has left', async () => {
  const identity: Identity = { key: {} as CryptoKeyPair, token: null, member: { client: 4, classes: 2, rounds: 5 } }
  const store = { identity: async () => identity, counts: async () => NO_COUNTS, forget: vi.fn(async () => {}) }
  vi.spyOn(BrowserStore, 'open').mockResolvedValue(store as unknown as BrowserStore)
  vi.stubGlobal('confirm', () => true)
  const ends = new Map<LiveClient, (end: 'stopped') => void>()
  vi.spyOn(LiveClient.prototype, 'run').mockImplementation(function (this: LiveClient) {
    return new Promise((end) => ends.set(this, end))
  })
  vi.spyOn(LiveClient.prototype, 'stop').mockImplementation(function (this: LiveClient) {
    ends.get(this)!('stopped')
  })
  const state = (tab: typeof elements) => expect.poll(() => tab['live']!.dataset.state, { timeout: 2000 })
  await open()
  await expect.poll(() => ends.size).toBe(1)
  const first = elements
  elements = {}
  await open()
  const second = elements
  await state(second).toBe('elsewhere')
  first['live-pause']!.onclick()
  await state(first).toBe('paused')
  await new Promise((done) => setTimeout(done, 50))
  expect([second['live']!.dataset.state, ends.size]).toEqual(['elsewhere', 1])
  first['live-pause']!.onclick() // Go on
  await expect.poll(() => ends.size).toBe(2)
  expect(second['live']!.dataset.state).toBe('elsewhere')
  elements = first
  first['live-leave']!.onclick()
  await state(first).toBe('new')
  expect(store.forget).toHaveBeenCalledTimes(1)
  await expect.poll(() => ends.size).toBe(3) // the second tab, which finds that nothing is left
})

it('is another client for another server of the origin, which has a folder of its own', async () => {
  const identity: Identity = { key: {} as CryptoKeyPair, token: null, member: { client: 4, classes: 2, rounds: 5 } }
  const store = { identity: async () => identity, counts: async () => NO_COUNTS }
  const opened = vi.spyOn(BrowserStore, 'open').mockResolvedValue(store as unknown as BrowserStore)
  vi.spyOn(LiveClient.prototype, 'run').mockReturnValue(new Promise(() => {}))
  const at = (baseURI: string) => Object.assign(document, { baseURI })
  for (const place of ['', 'a/', 'b/index.html', 'b/c/']) {
    elements = {}
    at(`https://host.example/${place}`)
    await open()
    await expect.poll(() => elements['live']!.dataset.state, { timeout: 2000 }).not.toBe('elsewhere')
  }
  expect(LiveClient.prototype.run).toHaveBeenCalledTimes(4)

  opened.mockRestore()
  const names: string[] = []
  const note = (name: string) => {
    names.push(name)
    throw new Error('only its name is looked at')
  }
  vi.stubGlobal('indexedDB', { open: note })
  for (const place of ['index.html', 'a/', 'b/?token=1']) {
    at(`https://host.example/${place}`)
    await expect(BrowserStore.open()).rejects.toThrow('only its name')
  }
  expect(names).toEqual(['tfpfl-live', 'tfpfl-live /a/', 'tfpfl-live /b/'])
})
