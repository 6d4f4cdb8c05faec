/** A browser tab, processes in C and devices in Python in the same secure rounds: the result is the simulated one. */
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

const python = process.env.TFPFL_WEB_PYTHON ?? join(import.meta.dirname, '../../.venv/bin/python')
const [TAB, GONE, ROUNDS] = [9, 3, 3]

interface Started {
  address: string
  tokens: Record<string, string>
  missing?: string
}

declare global {
  var asked: { path: string; size: number }[]
}

describe.skipIf(noBrowser)('Secure rounds', () => {
  let browser: Browser
  let folder: string
  let server: ChildProcess | undefined
  beforeAll(async () => {
    browser = await launch()
    folder = mkdtempSync(join(tmpdir(), 'tfpfl-secure-'))
  })
  afterAll(async () => {
    server?.kill('SIGKILL')
    await browser?.close()
    rmSync(folder, { recursive: true, force: true })
  })

  async function start(): Promise<Started & { ended: Promise<number | null> }> {
    const child = spawn(python, [join(import.meta.dirname, 'secure_live.py'), fixture('live'), folder, String(TAB)], { stdio: ['ignore', 'pipe', 'inherit'] })
    server = child
    const ended = new Promise<number | null>((resolve) => child.on('exit', (code) => resolve(code)))
    const line = await new Promise<string>((resolve, reject) => {
      createInterface({ input: child.stdout }).once('line', resolve)
      void ended.then((code) => reject(new Error(`the server ended with ${code}`)))
    })
    return { ...(JSON.parse(line) as Started), ended }
  }

  /** Opens the page. It notes what it sends; with `cut`, it goes silent when the server has taken its shares. */
  async function open(context: BrowserContext, url: string, cut: boolean): Promise<Page> {
    const page = await context.newPage()
    await page.addInitScript((cut) => {
      const real = globalThis.fetch
      globalThis.asked = []
      globalThis.fetch = async (input, init) => {
        const { pathname } = new URL(String(input), location.href)
        if (pathname.startsWith('/v1/secure/') && init?.method === 'PUT') globalThis.asked.push({ path: pathname, size: (init.body as Uint8Array).length })
        const response = await real(input, init)
        if (!cut || pathname !== '/v1/secure/1/shares') return response
        globalThis.cut = true
        return new Promise<Response>(() => {}) // for ever
      }
    }, cut)
    await page.goto(url)
    await page.waitForFunction(() => document.documentElement.dataset.ready)
    return page
  }

  it('of a tab, of C and of Python are the simulated ones, with one device that drops out and a tab that is closed', async (context_) => {
    const { address, tokens, ended, missing } = await start()
    if (missing) return context_.skip(missing)
    const context = await browser.newContext()
    const first = await open(context, address, true)
    await first.locator('#live-token').fill(tokens[TAB]!)
    await first.locator('#live-files').setInputFiles(['train.npz', 'test.npz', 'about.json'].map((name) => fixture('live', 'data', String(TAB), name)))
    await first.locator('#join').click()
    await first.waitForFunction(() => globalThis.cut, null, { timeout: 300_000 })
    expect(await first.evaluate(() => globalThis.asked.map(({ path }) => path))).toEqual(['/v1/secure/1/keys', '/v1/secure/1/shares'])
    await first.close() // and is opened again: it goes on with the keys that it has kept
    const page = await open(context, address, false)
    await expect.poll(() => page.locator('#live').getAttribute('data-state'), { timeout: 600_000 }).toBe('done')
    expect(await ended).toBe(0)

    const asked = await page.evaluate(() => globalThis.asked)
    const paths = Array.from({ length: ROUNDS }, (_, i) => ['keys', 'shares', 'masked'].map((phase) => `/v1/secure/${i + 1}/${phase}`)).flat()
    expect(asked.map(({ path }) => path).filter((path) => !path.endsWith('/unmask'))).toEqual(paths.slice(2)) // enough others may have sent theirs
    expect(asked.some(({ path }) => path.endsWith('/unmask'))).toBe(true)

    const read = (name: string) => readSafetensors(new Uint8Array(readFileSync(join(folder, `${name}.safetensors`))))
    const [live, simulated] = [read('live'), read('simulated')]
    const bytesOfTheta = 4 * live.get('theta')!.data.length
    for (const { path, size } of asked) if (path.endsWith('/masked')) expect(size / bytesOfTheta).toBeCloseTo(1, 1)
    const apart = (a: ArrayLike<number>, b: ArrayLike<number>) => {
      expect(a.length).toBe(b.length)
      return Array.from(a).reduce((most, value, i) => Math.max(most, Math.abs(value - b[i]!)), 0)
    }
    const theta = apart(live.get('theta')!.data, simulated.get('theta')!.data)
    expect([...live.keys()].length).toBe(1 + 2 * 9)
    let heads = Math.max(...[...live].filter(([name]) => name !== 'theta').map(([name, { data }]) => apart(data, simulated.get(name)!.data)))
    const [file] = await Promise.all([page.waitForEvent('download'), page.locator('#live-head').click()])
    const bytes = new Uint8Array(readFileSync(await file.path()))
    const kernel = simulated.get(`${TAB}.kernel`)!
    const head = readHead(bytes, kernel.shape[0]!, thetaOf(bytes))
    for (const part of ['kernel', 'bias'] as const) heads = Math.max(heads, apart(head[part], simulated.get(`${TAB}.${part}`)!.data))
    console.log(`Secure rounds of a tab, C and Python: theta ${theta.toExponential(1)}, heads ${heads.toExponential(1)} from the simulation`)
    expect(theta).toBeLessThan(1e-5)
    expect(heads).toBeLessThan(1e-5)

    const found = JSON.parse(readFileSync(join(folder, 'live.json'), 'utf8')) as { events: [string, number, number][]; said: Record<string, string> }
    const arrived = found.events.flatMap(([what, round, client]) => (what === 'arrived' ? [`${round} ${client}`] : []))
    const everybody = Array.from({ length: ROUNDS }, (_, i) => Array.from({ length: 10 }, (_, client) => `${i + 1} ${client}`)).flat()
    expect(arrived.sort()).toEqual(everybody.filter((both) => both !== `${ROUNDS} ${GONE}`).sort())
    expect(found.events.filter(([what]) => what.startsWith('failed'))).toEqual([])
    expect(found.said[GONE]).toContain(`round ${ROUNDS}: not counted: it ended without this device`)
    expect(await page.locator('#live-facts tr', { hasText: 'counted' }).first().locator('td').textContent()).toBe(String(ROUNDS))
    const left = await page.evaluate(async () => {
      const request = indexedDB.open('tfpfl-live')
      await new Promise((done) => (request.onsuccess = done))
      const keys = request.result.transaction('device').objectStore('device').getAllKeys()
      await new Promise((done) => (keys.onsuccess = done))
      return keys.result
    })
    expect(left).not.toContain('attempt') // no secret is left
    expect(left).not.toContain('visit')
    await context.close()
  }, 1_200_000)
})
