/** What a person does with the page. */
import { readFileSync } from 'node:fs'
import { afterAll, beforeAll, expect } from 'vitest'
import { unzipped } from '../src/zip'
import { fixture, launch } from './browser'
import { serve, type Host } from './server'
import type { Browser, BrowserContext, Page } from 'playwright-core'

export type Stroke = 'line' | 'bar' | 'ring' | 'cross'

/** A browser and a host of one of the fixtures' sites, for all tests of a `describe`. */
export function hosted(site: string): { browser: Browser; host: Host } {
  const found = {} as { browser: Browser; host: Host }
  beforeAll(async () => {
    found.browser = await launch()
    found.host = await serve(fixture(site))
  })
  afterAll(async () => {
    await found.browser?.close()
    await found.host?.close()
  })
  return found
}

/** Opens the site and waits until the program runs. */
export async function openPage(context: BrowserContext, url: string): Promise<Page> {
  const page = await context.newPage()
  page.on('pageerror', (error) => {
    throw error
  })
  await page.goto(url)
  await page.waitForFunction(() => document.documentElement.dataset.ready)
  expect(await page.locator('#status').textContent()).toMatch(/^Ready/)
  return page
}

/** Draws with the mouse, a little different every time. A cross is two strokes. */
export async function draw(page: Page, stroke: Stroke, variant = 0): Promise<void> {
  for (const slope of stroke === 'cross' ? [1, -1] : [0]) await drawStroke(page, stroke, variant, slope)
}

async function drawStroke(page: Page, stroke: Stroke, variant: number, slope: number): Promise<void> {
  const pad = page.locator('#pad')
  await pad.scrollIntoViewIfNeeded()
  const box = (await pad.boundingBox())!
  const [a, b] = [0.3 + 0.02 * (variant % 4), 0.03 * ((variant % 5) - 2)]
  const curve = (t: number): [number, number] => {
    if (stroke === 'line') return [b, a * (2 * t - 1)]
    if (stroke === 'bar') return [a * (2 * t - 1), b]
    if (stroke === 'cross') return [a * (2 * t - 1) + b, slope * a * (2 * t - 1)]
    return [a * Math.cos(2 * Math.PI * t) + b, a * Math.sin(2 * Math.PI * t)]
  }
  const at = (t: number): [number, number] => {
    const [x, y] = curve(t)
    return [box.x + box.width * (0.5 + x), box.y + box.height * (0.5 + y)]
  }
  await page.mouse.move(...at(0))
  await page.mouse.down()
  for (let i = 1; i <= 16; i++) await page.mouse.move(...at(i / 16))
  await page.mouse.up()
}

/** Draws an example and keeps it for a class. */
export async function teach(page: Page, label: number, stroke: Stroke, variant: number): Promise<void> {
  await page.locator(`#pick-${label}`).check()
  await draw(page, stroke, variant)
  const drawn = page.locator('#class-list > li').nth(label).locator('.strip canvas')
  const before = await drawn.count()
  await page.locator('#keep').click()
  await expect.poll(() => drawn.count()).toBe(before + 1)
}

/** Presses Learn, and returns what the page says of it. */
export async function learn(page: Page): Promise<string> {
  await page.locator('#learn-button').click()
  await expect.poll(() => result(page)).toMatch(/^(Learned:|Not better|Learning needs)/)
  return result(page)
}

export async function result(page: Page): Promise<string> {
  return (await page.locator('#result').textContent()) ?? ''
}

/** Clears the pad, draws, and waits for the prediction: [name of the class, percent]. */
export async function predicted(page: Page, stroke: Stroke, variant = 0): Promise<[string, number]> {
  await page.locator('#clear').click()
  await expect.poll(() => page.locator('#guess').textContent()).toMatch(/^(Draw|Press)/)
  await draw(page, stroke, variant)
  await expect.poll(() => page.locator('#guess').textContent()).toMatch(/^“|^Keep/)
  const text = (await page.locator('#guess').textContent())!
  const [, name = text, percent = '0'] = /^“(.*)”, (\d+) %$/.exec(text) ?? []
  return [name, Number(percent)]
}

/** Presses a button that is in a part of the page which may be folded up. */
export async function press(page: Page, id: string): Promise<void> {
  const folded = page.locator('details:not([open])', { has: page.locator(id) }).locator('> summary')
  if (await folded.count()) await folded.click()
  await page.locator(id).click()
}

/** The entries of the zip file that Export writes. */
export async function exported(page: Page): Promise<{ head: Uint8Array; names: string[] }> {
  const [file] = await Promise.all([page.waitForEvent('download'), press(page, '#export')])
  const entries = (await unzipped(new Uint8Array(readFileSync(await file.path()))))!
  return { head: entries.get('head.bin')!, names: JSON.parse(new TextDecoder().decode(entries.get('names.json'))) as string[] }
}

/** What the page says of a picture, always the same one of its kind: all of its probabilities. */
export async function shown(page: Page, stroke: Stroke): Promise<string> {
  await page.locator('#clear').click()
  await expect.poll(() => page.locator('#bars li').count()).toBe(0)
  await page.locator('#picture-file').setInputFiles(fixture(`${stroke}.png`))
  await expect.poll(() => page.locator('#guess').textContent()).toMatch(/^“|^Keep/)
  const bars = await page.locator('#bars meter').evaluateAll((all) => (all as HTMLMeterElement[]).map(({ value }) => value))
  await page.locator('#clear').click()
  return JSON.stringify(bars)
}

/** Changes what the page keeps in IndexedDB: `edit` gets the record. Waits until the page has written it. */
export async function editKept(page: Page, edit: (kept: { head: Uint8Array | null; previous: Uint8Array | null }) => unknown): Promise<void> {
  await page.evaluate(async (source) => {
    const change = new Function(`return (${source})`)() as (kept: unknown) => void
    const request = <T>(r: IDBRequest<T>) => new Promise<T>((done, failed) => ((r.onsuccess = () => done(r.result)), (r.onerror = () => failed(r.error))))
    const database = await request(indexedDB.open('tfpfl'))
    const store = database.transaction('learners', 'readwrite').objectStore('learners')
    const [key] = await request(store.getAllKeys())
    const kept: unknown = await request(store.get(key!))
    change(kept)
    await request(store.put(kept, key!))
    database.close()
  }, edit.toString())
}

/** In the browser: controls that are smaller than so many pixels. Links in a text may be (WCAG 2.5.8). */
export function small(pixels: number): string[] {
  return [...document.querySelectorAll<HTMLElement>('button, input, select, summary, nav a')]
    .filter((element) => element.checkVisibility())
    .filter((element) => [element.getBoundingClientRect()].some(({ width, height }) => Math.min(width, height) < pixels - 0.1))
    .map((element) => element.outerHTML.slice(0, 100))
}
