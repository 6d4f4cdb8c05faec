/** The part of the page that joins a live run, in a browser that keeps nothing. The rest is tested in live.spec.ts. */
import { afterEach, beforeEach, expect, it, vi } from 'vitest'
import type { Manifest } from '../src/bundle'
import type { FederationLive } from '../src/federation_live'
import { LivePage } from '../src/live_page'
import { BrowserStore, NO_COUNTS, type Identity } from '../src/live_store'

class Element {
  hidden = false
  textContent = ''
  dataset: Record<string, string> = {}
  classList = { toggle: () => {} }
  append = () => {}
  replaceChildren = () => {}
}
let elements: Record<string, Element>
const kinds = ['HTMLElement', 'HTMLFormElement', 'HTMLInputElement', 'HTMLButtonElement']

beforeEach(() => {
  elements = {}
  for (const kind of kinds) vi.stubGlobal(kind, Element)
  vi.stubGlobal('document', { getElementById: (id: string) => (elements[id] ??= new Element()), createElement: () => new Element(), baseURI: 'https://host.example/' })
  vi.stubGlobal('isSecureContext', true)
  const request = (_name: string, options: unknown, work?: (lock: object) => unknown) => (work ?? (options as typeof work))!({})
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
