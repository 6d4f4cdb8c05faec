/** The part of the page that joins a live run, in a browser that keeps nothing. The rest is tested in live.spec.ts. */
import { afterEach, expect, it, vi } from 'vitest'
import type { Manifest } from '../src/bundle'
import type { FederationLive } from '../src/federation_live'
import { LivePage } from '../src/live_page'

afterEach(() => void vi.unstubAllGlobals())

it('says that it cannot join, and the rest of the page goes on', async () => {
  class Element {
    hidden = false
    textContent = ''
  }
  const elements: Record<string, Element> = { 'join-form': new Element(), 'live-status': new Element() }
  const kinds = ['HTMLElement', 'HTMLFormElement', 'HTMLInputElement', 'HTMLButtonElement']
  for (const kind of kinds) vi.stubGlobal(kind, Element)
  vi.stubGlobal('document', { getElementById: (id: string) => elements[id] })
  vi.stubGlobal('isSecureContext', true)
  vi.stubGlobal('navigator', { locks: {} })
  const open = () => {
    throw new DOMException('The user denied permission to access the database.', 'SecurityError')
  }
  vi.stubGlobal('indexedDB', { open })
  const refused = async () => Promise.reject(new Error('not asked for'))
  await LivePage.open({ browser: {} } as Manifest, refused, refused, {} as FederationLive)
  expect(elements['join-form']!.hidden).toBe(true)
  expect(elements['live-status']!.textContent).toMatch(/keeps nothing \(The user denied permission.*allow this page to store data/)
})
