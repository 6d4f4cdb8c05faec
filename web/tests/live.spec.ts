/** Two browsers and eight devices in the rounds of a server: the result is the simulated one. */
import { spawn, type ChildProcess } from 'node:child_process'
import { mkdtempSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import type { Browser, BrowserContext, Page } from 'playwright-core'
import { readHead, thetaOf } from '../src/head'
import { readSafetensors } from '../src/safetensors'
import { fixture, launch, noBrowser } from './browser'
import { openPage } from './page'
import { serve } from './server'
import { joinRun, python } from './server_of_rounds'

const read = (path: string) => JSON.parse(readFileSync(path, 'utf8')) as unknown
const arrays = (path: string) => readSafetensors(new Uint8Array(readFileSync(path)))

interface Started {
  address: string
  tokens: Record<string, string>
}
type Scores = Record<string, [number, number, number]>

declare global {
  var cut: boolean | undefined
}

describe.skipIf(noBrowser)('Join a live run', () => {
  let browser: Browser
  let folder: string
  let server: ChildProcess | undefined
  beforeAll(async () => {
    browser = await launch()
    folder = mkdtempSync(join(tmpdir(), 'tfpfl-live-'))
  })
  afterAll(async () => {
    server?.kill('SIGKILL')
    await browser?.close()
    rmSync(folder, { recursive: true, force: true })
  })

  /** Starts the server and the devices that are no browsers. */
  async function start(browsers: number[]): Promise<Started & { ended: Promise<number | null> }> {
    const arguments_ = [join(import.meta.dirname, 'live.py'), 'serve', fixture('live'), folder, ...browsers.map(String)]
    const child = spawn(python, arguments_, { stdio: ['ignore', 'pipe', 'inherit'] })
    server = child
    const ended = new Promise<number | null>((resolve) => child.on('exit', (code) => resolve(code)))
    const line = await new Promise<string>((resolve, reject) => {
      createInterface({ input: child.stdout }).once('line', resolve)
      void ended.then((code) => reject(new Error(`the server ended with ${code}`)))
    })
    return { ...(JSON.parse(line) as Started), ended }
  }

  const status = (page: Page) => page.locator('#live-status').textContent()
  const state = (page: Page) => page.locator('#live').getAttribute('data-state')
  const fact = (page: Page, name: string) => page.locator('#live-facts tr', { hasText: name }).locator('td').textContent()

  /** Opens a tab that goes silent at its first update: before it is sent, or when the server has taken it. */
  async function silent(context: BrowserContext, url: string, when: 'before' | 'after'): Promise<Page> {
    const page = await context.newPage()
    await page.addInitScript((when) => {
      const real = globalThis.fetch
      globalThis.fetch = async (input, init) => {
        if (!String(input).includes('/v1/update/')) return real(input, init)
        if (when === 'after') await real(input, init)
        globalThis.cut = true
        return new Promise<Response>(() => {}) // for ever
      }
    }, when)
    await page.goto(url)
    await page.waitForFunction(() => document.documentElement.dataset.ready)
    return page
  }

  it('takes the examples of the page’s client if there are no files, and only where the host runs live rounds', async () => {
    const live = (bytes: Buffer) => Buffer.from(bytes.toString().replace('{', '{"live": true,'))
    const host = await serve(fixture('site-mlp'), { damage: { 'site.json': live } })
    const context = await browser.newContext({ serviceWorkers: 'block' }) // a route of this context does not see its requests
    const page = await openPage(context, host.url)
    const asked: Record<string, unknown>[] = []
    await page.route('**/v1/join', async (route) => {
      asked.push(route.request().postDataJSON() as Record<string, unknown>)
      await route.fulfill({ status: 403, json: { error: 'this token was revoked' } })
    })
    const stored = readSafetensors(new Uint8Array(readFileSync(fixture('mlp', 'client.safetensors'))))
    const n = stored.get('labels')!.data.length
    expect(await page.locator('#live-own').textContent()).toContain(`the ${n} examples of this page’s client`)
    await page.locator('#live-token').fill('a token')
    await page.locator('#join').click()
    await expect.poll(() => status(page)).toBe('The server refused (403): this token was revoked')
    expect(asked).toEqual([{ protocol: 1, token: 'a token', examples: n, classes: 3, key: expect.stringMatching(/^B[\w+/]{86}=$/), secure: 1 }])
    await page.locator('#live-files').setInputFiles([fixture('line.png')])
    await page.locator('#join').click()
    await expect.poll(() => status(page)).toMatch(/needs the token/) // the form is as it was, but for the token
    await page.locator('#live-token').fill('a token')
    await page.locator('#join').click()
    await expect.poll(() => status(page)).toMatch(/Choose train.npz/)
    await context.close()
    await host.close()

    const elsewhere = await serve(fixture('site-mlp'))
    const other = await openPage(await browser.newContext(), elsewhere.url)
    expect(await other.locator('#live').isVisible()).toBe(false)
    expect(await other.locator('#live-link').isVisible()).toBe(false)
    expect(elsewhere.asked.some((path) => path.startsWith('/v1'))).toBe(false)
    await other.close()
    await elsewhere.close()
  })

  it('computes what a simulation does, with tabs that are closed in the middle of a round', async () => {
    const expected = read(fixture('live', 'simulated.json')) as { cohorts: number[][]; scores: Scores }
    // A client that is invited to most rounds, and one whose examples fit into a single call of the program.
    const invited = (client: number) => expected.cohorts.filter((ids) => ids.includes(client)).length
    const tabs = [9, 0]
    expect(tabs.map(invited)).toEqual([8, 6])
    const { address, tokens, ended } = await start(tabs)
    const contexts = await Promise.all(tabs.map(() => browser.newContext()))
    const pages: Page[] = []
    for (const [i, client] of tabs.entries()) {
      const page = await silent(contexts[i]!, address, i === 0 ? 'after' : 'before')
      pages.push(page)
      expect(await page.locator('#join').isVisible()).toBe(true)
      if (i === 0) {
        await page.locator('#join').click()
        await expect.poll(() => status(page)).toMatch(/needs the token/)
        await joinRun(page, client, 'no-such-token')
        await expect.poll(() => status(page)).toBe('The server refused (401): this token is unknown: ask for one')
        await joinRun(page, client, tokens[tabs[1]!]!)
        await expect.poll(() => status(page)).toMatch(/The server refused \(409\): client \d+ has \d+ examples/)
        expect(await page.locator('#join').isVisible()).toBe(true)
      }
      await joinRun(page, client, tokens[client]!)
      await expect.poll(() => fact(page, 'client')).toBe(String(client))
    }

    // Each tab is closed at its first update. One is opened again; for the other, a tab beside it goes on by itself.
    const second = await Promise.all(
      pages.map(async (page, i) => {
        await page.waitForFunction(() => globalThis.cut, null, { timeout: 300_000 })
        if (i === 1) {
          await page.close()
          return openPage(contexts[i]!, address)
        }
        const beside = await openPage(contexts[i]!, address)
        await expect.poll(() => status(beside)).toMatch(/Another tab of this browser is the client/)
        expect(await beside.locator('#live-leave').isVisible()).toBe(false)
        await page.close()
        return beside
      }),
    )
    for (const page of second) await expect.poll(() => state(page), { timeout: 300_000 }).toBe('done')
    expect(await ended).toBe(0)

    const theta = (path: string) => arrays(path).get('theta')!.data as Float32Array
    const simulated = arrays(fixture('live', 'simulated.safetensors'))
    const live = arrays(join(folder, 'live.safetensors'))
    const apart = (a: ArrayLike<number>, b: ArrayLike<number>) => {
      expect(a.length).toBe(b.length)
      return Array.from(a).reduce((most, value, i) => Math.max(most, Math.abs(value - b[i]!)), 0)
    }
    const differences = { theta: apart(theta(join(folder, 'live.safetensors')), theta(fixture('live', 'simulated.safetensors'))), heads: 0 }
    for (const [i, client] of tabs.entries()) {
      const page = second[i]!
      expect(await fact(page, 'counted')).toBe(String(invited(client)))
      expect(await fact(page, 'that were not')).toBe('0')
      const [file] = await Promise.all([page.waitForEvent('download'), page.locator('#live-head').click()])
      const bytes = new Uint8Array(readFileSync(await file.path()))
      const kernel = simulated.get(`${client}.kernel`)!
      const head = readHead(bytes, kernel.shape[0]!, thetaOf(bytes))
      for (const part of ['kernel', 'bias'] as const) {
        differences.heads = Math.max(differences.heads, apart(head[part], simulated.get(`${client}.${part}`)!.data))
      }
    }
    for (const [name, { data }] of live) {
      if (name !== 'theta') differences.heads = Math.max(differences.heads, apart(data, simulated.get(name)!.data))
    }
    expect([...live.keys()].length).toBe(1 + 2 * 8)
    console.log(`Live rounds with browsers: theta ${differences.theta.toExponential(1)}, heads ${differences.heads.toExponential(1)} from the simulation`)
    expect(differences.theta).toBeLessThan(1e-5)
    expect(differences.heads).toBeLessThan(1e-5)

    const found = read(join(folder, 'live.json')) as { events: [string, number, number][]; scores: Scores }
    const arrived = found.events.flatMap(([what, round, client]) => (what === 'arrived' ? [`${round} ${client}`] : []))
    expect(arrived.sort()).toEqual(expected.cohorts.flatMap((ids, i) => ids.map((client) => `${i + 1} ${client}`)).sort())
    expect(Object.keys(found.scores).sort()).toEqual(Object.keys(expected.scores).sort())
    for (const [key, [examples, score, loss]] of Object.entries(expected.scores)) {
      expect(found.scores[key]![0], key).toBe(examples)
      expect(found.scores[key]![1], key).toBeCloseTo(score, 6)
      expect(found.scores[key]![2] / loss, key).toBeCloseTo(1, 4)
    }

    const [page] = second
    page!.on('dialog', (dialog) => void dialog.accept())
    await page!.locator('#live-leave').click()
    await expect.poll(() => state(page!)).toBe('new')
    const left = await page!.evaluate(async () => {
      const request = indexedDB.open('tfpfl-live')
      await new Promise((done) => (request.onsuccess = done))
      const keys = request.result.transaction('device').objectStore('device').getAllKeys()
      await new Promise((done) => (keys.onsuccess = done))
      return keys.result
    })
    expect(left).toEqual([])
    await Promise.all(contexts.map((context) => context.close()))
  }, 900_000)
})
