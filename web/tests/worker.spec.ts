/** Where the worker takes WebAssembly from, without a browser. */
import { afterEach, beforeEach, expect, it, vi } from 'vitest'
import type { Reply, Request } from '../src/runtime'
import { sha256 } from '../src/sha256'

const FILE = 'litert_wasm_internal.wasm'
const WASM = Uint8Array.of(0, 97, 115, 109)
const URL_OF = `https://host.example/litert/${FILE}`

interface Scope {
  onmessage: ((event: { data: Request }) => void) | null
  Module?: { wasmBinary: Uint8Array }
  postMessage: (reply: Reply) => void
}
let scope: Scope
let replies: Reply[]
let network: number

beforeEach(() => {
  vi.resetModules()
  vi.doMock('@litertjs/core', () => ({ Environment: { create: async () => ({}) }, supportsFeature: async () => true, loadLiteRt: async () => {} }))
  replies = []
  network = 0
  scope = { onmessage: null, postMessage: (reply) => void replies.push(reply) }
  vi.stubGlobal('self', scope)
  vi.stubGlobal('fetch', async () => (network++, new Response(WASM)))
})
afterEach(() => {
  vi.doUnmock('@litertjs/core')
  vi.unstubAllGlobals()
})

async function load(): Promise<Reply[]> {
  await import('../src/runtime.worker')
  const files = { [FILE]: { bytes: WASM.length, sha256: sha256(WASM) } }
  scope.onmessage!({ data: { id: 3, kind: 'load', folder: 'https://host.example/litert/', threads: false, files, cache: 'a cache' } })
  await vi.waitFor(() => expect(replies.some((reply) => !('came' in reply))).toBe(true))
  return replies.filter((reply) => !('came' in reply))
}

it('loads it from the host where the browser lets pages store nothing', async () => {
  vi.stubGlobal('caches', { open: async () => Promise.reject(new DOMException('The operation is insecure.', 'SecurityError')) })
  expect(await load()).toEqual([{ id: 3, value: null }])
  expect(scope.Module!.wasmBinary).toEqual(WASM)
})

it('takes the copy that is kept, and replaces one that is damaged, though the service worker answers with it', async () => {
  const host = fetch
  for (const [copy, asked] of [[WASM, 0], [Uint8Array.of(1, 2, 3, 4), 1]] as const) {
    const kept = new Map<string, Uint8Array<ArrayBuffer>>([[URL_OF, Uint8Array.from(copy)]])
    const match = async (url: string) => (kept.has(url) ? new Response(kept.get(url)!) : undefined)
    const put = async (url: string, response: Response) => void kept.set(url, new Uint8Array(await response.arrayBuffer()))
    vi.stubGlobal('caches', { open: async () => ({ match, put, delete: async (url: string) => kept.delete(url) }) })
    vi.stubGlobal('fetch', async (url: string) => (await match(url)) ?? host(url)) // as public/sw.js does
    vi.resetModules()
    replies.length = 0
    expect(await load()).toEqual([{ id: 3, value: null }])
    expect([network, kept.get(URL_OF)]).toEqual([asked, WASM])
  }
})
