/**
 * Not a test: pictures of every state of the page, for docs/web.md. It writes docs/web_STATE.jpg.
 *
 *     make web-test WEB_TEST_ARGS=tests/pictures.spec.ts TFPFL_WEB_PICTURES=site
 *
 * Each picture shows one state at 1280 and at 390 pixels, light and dark. The site needs members; the live run is that of
 * the tests' fixtures, which `tfpfl serve` runs with two more tabs. TFPFL_WEB_STATES=first,live makes only these.
 */
import { cpSync, mkdtempSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join, resolve } from 'node:path'
import { expect, it } from 'vitest'
import type { Browser, BrowserContext, Page } from 'playwright-core'
import { fixture, launch } from './browser'
import { learn, openPage } from './page'
import { serve } from './server'
import { joinRun, serveRun, type Served } from './server_of_rounds'
import { arc, byHand, drawAll, numbers, type Point, type Sign } from './signs'

const SITE = process.env.TFPFL_WEB_PICTURES
const DOCS = resolve(import.meta.dirname, '../../docs')
const WIDE = { width: 1280, height: 860 }
const PHONE = { width: 390, height: 844 }

const SIGNS: Sign[] = [
  [Array.from({ length: 11 }, (_, i): Point => [(i % 2 ? 0.28 : 0.7) * Math.sin((i * Math.PI) / 5), (i % 2 ? -0.28 : -0.7) * Math.cos((i * Math.PI) / 5)])],
  [[[-0.5, 0.6], [-0.5, -0.1], [0, -0.6], [0.5, -0.1], [0.5, 0.6], [-0.5, 0.6]], [[-0.1, 0.6], [-0.1, 0.2], [0.15, 0.2], [0.15, 0.6]]], // prettier-ignore
  [arc(-1, 0, 0.25, -0.5), arc(1, 0, 0.25, 0), arc(-1, 0, 0.25, 0.5)],
]

type State = (page: Page, more: { context: BrowserContext; phone: boolean }) => Promise<unknown>

const random = numbers(3)
const draw = (page: Page, label: number, each: number) =>
  page.evaluate(drawAll, { drawings: Array.from({ length: each }, () => ({ label, sign: byHand(SIGNS[label]!, random) })), guesses: false })

/** Draws on the pad, and leaves it there. */
async function leave(page: Page, label: number): Promise<void> {
  const box = (await page.locator('#pad').boundingBox())!
  for (const stroke of byHand(SIGNS[label]!, random)) {
    const at = ([x, y]: Point): [number, number] => [box.x + (box.width * (1 + x)) / 2, box.y + (box.height * (1 + y)) / 2]
    await page.mouse.move(...at(stroke[0]!))
    await page.mouse.down()
    for (const point of stroke.slice(1)) await page.mouse.move(...at(point))
    await page.mouse.up()
  }
}

async function taught(page: Page): Promise<void> {
  await page.locator('#pad').hover()
  for (const label of SIGNS.keys()) await draw(page, label, 6)
  expect(await learn(page)).toMatch(/^Learned/)
  await leave(page, 2)
  await expect.poll(() => page.locator('#guess').textContent()).toMatch(/^“/)
}

const show = (page: Page, part: string) => page.locator(part).evaluate((element) => element.scrollIntoView({ block: 'start', behavior: 'instant' }))

const STATES: Record<string, State> = {
  first: async () => undefined,
  drawing: async (page) => {
    await page.locator('#pad').hover()
    for (const label of SIGNS.keys()) await draw(page, label, 1)
    await leave(page, 0)
  },
  learned: taught,
  federation: async (page) => {
    await show(page, '#federation')
    await expect.poll(() => page.locator('#federation').getAttribute('data-state')).toBe('ready')
    for (const head of ['one', 'own']) {
      await page.locator(`input[value=${head}]`).check()
      await expect.poll(() => page.locator('#federation').getAttribute('data-state')).toBe('ready')
      await page.locator('#federation-play').click()
      await expect.poll(async () => Number(/\d+/.exec((await page.locator('#federation-round').textContent())!)![0]), { timeout: 300_000 }).toBeGreaterThan(1)
      if (head === 'one') await page.locator('#federation-play').click()
    }
    await show(page, '#federation')
    await expect.poll(() => page.locator('#federation-stage .packet').count(), { interval: 20 }).toBeGreaterThan(0)
  },
  photo: async (page) => {
    await page.locator('#picture-file').setInputFiles({ name: 'photo.jpg', mimeType: 'image/jpeg', buffer: Buffer.from(await page.evaluate(photo)) })
    await expect.poll(() => page.locator('#result').textContent()).toMatch(/as it will be kept/)
  },
  offline: async (page, { context }) => {
    await expect.poll(() => page.evaluate(() => document.documentElement.dataset.offline)).toBe('true')
    await taught(page)
    await context.setOffline(true)
    await page.reload()
    await page.waitForFunction(() => document.documentElement.dataset.ready)
    await leave(page, 1)
    await expect.poll(() => page.locator('#guess').textContent()).toMatch(/^“/)
  },
  live: async (page) => {
    await show(page, '#federation')
    await expect.poll(() => page.locator('#crowd-rounds tbody tr').count(), { timeout: 120_000 }).toBeGreaterThan(2)
    await show(page, '#federation')
  },
}

/** In the browser: a photo of a star on grey paper in a shadow, as JPEG. */
async function photo(): Promise<number[]> {
  const canvas = new OffscreenCanvas(640, 480)
  const context = canvas.getContext('2d')!
  const shade = context.createLinearGradient(0, 0, 640, 300)
  shade.addColorStop(0, '#d8d2c4')
  shade.addColorStop(1, '#8f897c')
  context.fillStyle = shade
  context.fillRect(0, 0, 640, 480)
  context.strokeStyle = '#2a3f6b'
  context.lineWidth = 11
  context.lineJoin = 'round'
  context.beginPath()
  for (let i = 0; i <= 10; i++) {
    const [radius, angle] = [i % 2 ? 62 : 150, (i * Math.PI) / 5 + 0.1]
    context.lineTo(320 + radius * Math.sin(angle), 245 - radius * Math.cos(angle))
  }
  context.stroke()
  return [...new Uint8Array(await (await canvas.convertToBlob({ type: 'image/jpeg', quality: 0.9 })).arrayBuffer())]
}

/** The four pictures of a state on one sheet. */
async function sheet(browser: Browser, state: string, pictures: { wide: boolean; bytes: Buffer }[]): Promise<void> {
  const page = await browser.newPage({ viewport: { width: 1800, height: 600 } })
  const image = ({ wide, bytes }: { wide: boolean; bytes: Buffer }) => `<img style="width:${wide ? 640 : 280}px" src="data:image/png;base64,${bytes.toString('base64')}">`
  await page.setContent(`<body style="margin:0;background:#888"><div style="display:inline-flex;gap:12px;padding:12px;align-items:flex-start">${pictures.map(image).join('')}</div>`)
  await page.waitForFunction(() => [...document.images].every((one) => one.complete))
  await page.locator('div').screenshot({ path: join(DOCS, `web_${state}.jpg`), type: 'jpeg', quality: 72 })
  await page.close()
}

it.skipIf(!SITE)(
  'pictures of every state',
  async () => {
    const site = resolve(import.meta.dirname, '../..', SITE!)
    const browser = await launch()
    const folder = mkdtempSync(join(tmpdir(), 'tfpfl-pictures-'))
    const wanted = process.env.TFPFL_WEB_STATES?.split(',') ?? Object.keys(STATES)
    for (const state of wanted) {
      const pictures: { wide: boolean; bytes: Buffer }[] = []
      for (const viewport of [WIDE, PHONE]) {
        for (const colorScheme of ['light', 'dark'] as const) {
          const phone = viewport === PHONE
          const host = await serve(site)
          let live: Served | null = null
          const tabs: BrowserContext[] = []
          if (state === 'live') {
            const run = join(folder, `${viewport.width}-${colorScheme}`)
            cpSync(fixture('live', 'run'), run, { recursive: true })
            live = await serveRun(run, '--wait-for', '2', '--rounds', '200', '--web', site)
            const tokens = JSON.parse(readFileSync(join(run, 'tokens.json'), 'utf8')) as Record<string, string>
            for (const client of [9, 0, 3]) {
              tabs.push(await browser.newContext())
              await joinRun(await openPage(tabs.at(-1)!, live.address), client, tokens[client]!)
            }
          }
          const context = await browser.newContext({ viewport, colorScheme, hasTouch: phone, isMobile: phone, bypassCSP: true })
          const page = await openPage(context, live?.address ?? host.url)
          await STATES[state]!(page, { context, phone })
          if (!['federation', 'live'].includes(state)) await page.evaluate(() => scrollTo({ top: 0, behavior: 'instant' }))
          const bytes = await page.screenshot()
          if (process.env.TFPFL_WEB_SINGLE) await page.screenshot({ path: join(process.env.TFPFL_WEB_SINGLE, `${state}_${viewport.width}_${colorScheme}.png`), fullPage: false })
          pictures.push({ wide: !phone, bytes })
          for (const one of [context, ...tabs]) await one.close()
          live?.stop()
          await host.close()
        }
      }
      await sheet(browser, state, pictures)
    }
    await browser.close()
    rmSync(folder, { recursive: true, force: true })
  },
  3_000_000,
)
