/** What the browser keeps of several sites of one origin, with a cache that lives here. */
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { afterEach, beforeEach, expect, it, vi } from 'vitest'
import { cacheName, keepForOffline } from '../src/offline'
import { sha256 } from '../src/sha256'
import type { Site } from '../src/site'

const ORIGIN = 'https://host.example'
const worker = readFileSync(join(import.meta.dirname, '../public/sw.js'), 'utf8')
const site = (text: string): Site => ({ format: 1, made_by: '', files: { 'index.html': { bytes: text.length, sha256: sha256(new TextEncoder().encode(text)) } } })

/** {name of a cache: {address: text}}. */
let all: Map<string, Map<string, string>>
let folder = '/'
const served = new Map<string, string>()
const url = (address: string | { url: string }) => new URL(typeof address === 'string' ? address : address.url, ORIGIN + folder).href

beforeEach(() => {
  all = new Map()
  const open = async (name: string) => {
    const files = all.get(name) ?? new Map<string, string>()
    all.set(name, files)
    return {
      match: async (address: string) => (files.has(url(address)) ? new Response(files.get(url(address))) : undefined),
      put: async (address: string, response: Response) => void files.set(url(address), await response.text()),
    }
  }
  const match = async (address: string) => {
    for (const name of all.keys()) {
      const found = await (await open(name)).match(address)
      if (found) return found
    }
    return undefined
  }
  vi.stubGlobal('caches', { open, match, keys: async () => [...all.keys()], delete: async (name: string) => all.delete(name) })
  vi.stubGlobal('navigator', { serviceWorker: { register: async () => {}, ready: Promise.resolve() } })
  vi.stubGlobal('fetch', async (address: string) => new Response(served.get(url(address)) ?? '{}'))
})
afterEach(() => void vi.unstubAllGlobals())

async function visit(path: string, text: string): Promise<void> {
  folder = path
  vi.stubGlobal('document', { baseURI: `${ORIGIN}${path}index.html` })
  served.set(ORIGIN + path, text)
  expect(await keepForOffline(site(text), [])).toBe(true)
  expect(all.has(cacheName(site(text)))).toBe(true)
}

/** What the service worker of a folder shows; null: nothing. By default there is no network. */
async function offline(path: string, file = '', fetch = async (): Promise<Response> => Promise.reject(new TypeError('no network'))): Promise<string | null> {
  folder = path
  const listeners: Record<string, (event: object) => void> = {}
  const self = { location: { origin: ORIGIN }, registration: { scope: ORIGIN + path }, addEventListener: (name: string, listener: (event: object) => void) => void (listeners[name] = listener) }
  new Function('self', 'fetch', worker)(self, fetch)
  const answer = await new Promise<Response | null>((done) => {
    const respondWith = (response: Promise<Response>) => void response.then(done, () => done(null))
    listeners.fetch!({ request: { url: ORIGIN + path + file, method: 'GET', mode: file ? 'cors' : 'navigate' }, respondWith })
  })
  return answer && answer.text()
}

it('keeps a copy of each site, and of each the newest version alone', async () => {
  await visit('/a/', 'site A')
  await visit('/b/', 'site B')
  await visit('/a/b/', 'site A') // the same files in another folder
  await visit('/', 'the front')
  all.set('of another page', new Map())
  for (const [path, text] of [['/a/', 'site A'], ['/b/', 'site B'], ['/a/b/', 'site A'], ['/', 'the front'], ['/c/', null]] as const) expect(await offline(path)).toBe(text)
  await visit('/a/', 'site A, mended')
  expect(all.size).toBe(5)
  for (const [path, text] of [['/a/', 'site A, mended'], ['/b/', 'site B'], ['/a/b/', 'site A'], ['/', 'the front']] as const) expect(await offline(path)).toBe(text)
})

it('keeps the newest version when a tab of an older one ends later', async () => {
  const before = fetch
  const [older, newer] = ['the page', 'the page, with another bundle'].map(site)
  await visit('/a/', 'the page')
  await visit('/a/', 'the page, with another bundle')
  expect([...all.keys()]).toEqual([cacheName(newer!)])
  served.set(`${ORIGIN}/a/`, 'the page')
  vi.stubGlobal('fetch', async (address: string) => (address === 'site.json' ? new Response(JSON.stringify(newer)) : before(address)))
  expect(await keepForOffline(older!, [])).toBe(true)
  expect([...all.keys()]).toEqual([cacheName(newer!)])
})

it('shows nothing that another site of the origin has kept', async () => {
  await visit('/a/', 'site A')
  all.get(cacheName(site('site A')))!.set(`${ORIGIN}/b/`, 'not its own')
  expect(await offline('/b/')).toBeNull()
})

it('keeps the site.json by which it has checked the files, whatever the host answers by now', async () => {
  const before = fetch
  for (const answer of [new Response('a proxy', { status: 502 }), new Response(JSON.stringify(site('site A, mended')))]) {
    vi.stubGlobal('fetch', async (address: string) => (address === 'site.json' ? answer : before(address)))
    await visit('/a/', 'site A')
    expect(JSON.parse(all.get(cacheName(site('site A')))!.get(`${ORIGIN}/a/site.json`)!)).toEqual(site('site A'))
  }
})

it('is renewed where the browser has older copies of files whose address stays', async () => {
  const copies = new Map<string, Response>() // the browser's own cache, as it is in Chromium, whatever the host says of a copy
  let asked: string[] = []
  vi.stubGlobal('fetch', async (address: string, { cache = 'default' }: RequestInit = {}) => {
    const found = copies.get(url(address))
    if (found && cache === 'force-cache') return found.clone()
    asked.push(address)
    const response = new Response(served.get(url(address)) ?? '{}')
    copies.set(url(address), response.clone())
    return response
  })
  vi.stubGlobal('document', { baseURI: `${ORIGIN}/a/index.html` })
  folder = '/a/'
  const files = ['index.html', 'recorder.js', 'icon.svg', 'manifest.webmanifest', 'assets/index-1.js']
  const text = (version: string, file: string) => (file.startsWith('assets/') ? 'the same' : `the ${version} one`)
  for (const version of ['first', 'second']) {
    for (const file of files) served.set(url(file === 'index.html' ? './' : file), text(version, file))
    const found: Site = { format: 1, made_by: '', files: Object.fromEntries(files.map((file) => [file, site(text(version, file)).files['index.html']!])) }
    asked = []
    expect(await keepForOffline(found, [])).toBe(true)
    expect([...all.keys()]).toEqual([cacheName(found)])
  }
  for (const file of files) expect(await offline('/a/', file === 'index.html' ? '' : file), file).toBe(text('second', file))
  expect(asked).not.toContain('assets/index-1.js')
})

it('keeps nothing, and not the wrong file, where the host itself has another', async () => {
  served.set(`${ORIGIN}/a/`, 'of a third one')
  folder = '/a/'
  vi.stubGlobal('document', { baseURI: `${ORIGIN}/a/index.html` })
  await expect(keepForOffline(site('the page'), [])).rejects.toThrow('index.html is damaged')
  expect(all.get(cacheName(site('the page')))!.size).toBe(0)
})

it('shows the newest version of a site wherever it is, and asks for what has its hash in its name once', async () => {
  const newest = async () => new Response('the newest')
  for (const path of ['/', '/a/', '/assets/', '/assets/site/', '/litert-demo/']) {
    await visit(path, 'an older one')
    const kept = all.get(cacheName(site('an older one')))!
    for (const file of ['assets/index-1.js', 'litert-2.5.3/a.wasm', 'bundle/theta.bin?sha256=ab']) {
      kept.set(ORIGIN + path + file, 'as it was')
      expect(await offline(path, file, newest), path + file).toBe('as it was')
    }
    expect(await offline(path, '', newest), path).toBe('the newest')
    expect(await offline(path, 'site.json', newest), path).toBe('the newest')
    expect(await offline(path)).toBe('an older one')
  }
})
