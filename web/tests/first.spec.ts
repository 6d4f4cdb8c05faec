/**
 * Not a test: how long a visitor waits for the pad and for the first guess. It prints Markdown.
 *
 *     make web-test WEB_TEST_ARGS=tests/first.spec.ts TFPFL_WEB_FIRST=site
 *
 * The line is one of 9 Mbit/s with 85 ms to the host and back. The page's own thread is slowed 4 times. Chromium slows
 * and limits no workers: so the host itself sends slowly, and the program's own time is not slowed.
 */
import { resolve } from 'node:path'
import { expect, it } from 'vitest'
import { launch } from './browser'
import { draw } from './page'
import { serve } from './server'

const SITE = process.env.TFPFL_WEB_FIRST
const LINE = { bitsPerSecond: 9e6, latency: 85 }

it.skipIf(!SITE)(
  'time to the first drawing and to the first guess',
  async () => {
    const host = await serve(resolve(import.meta.dirname, '../..', SITE!), { line: LINE })
    const browser = await launch()
    const times: [number, number, number][] = []
    for (let i = 0; i < 3; i++) {
      const context = await browser.newContext({ viewport: { width: 390, height: 844 }, hasTouch: true, bypassCSP: true })
      const page = await context.newPage()
      await (await context.newCDPSession(page)).send('Emulation.setCPUThrottlingRate', { rate: 4 })
      const begin = performance.now()
      await page.goto(host.url, { waitUntil: 'commit' })
      await page.waitForFunction(() => document.documentElement.dataset.pad)
      await draw(page, 'ring')
      const drawn = performance.now() - begin
      await page.waitForFunction(() => document.documentElement.dataset.ready)
      const ready = performance.now() - begin
      // The client's head guesses at once: nothing has to be learned for it.
      await page.evaluate(() => document.getElementById('import-bundle')!.click())
      await page.waitForFunction(() => /^“/.test(document.getElementById('guess')!.textContent!))
      times.push([drawn, ready, performance.now() - begin])
      await context.close()
    }
    await browser.close()
    await host.close()
    const text = (i: number) => times.map((row) => (row[i]! / 1000).toFixed(1)).join(', ')
    console.info(`| a ring is drawn | the program runs | the first guess |\n|---|---|---|\n| ${text(0)} s | ${text(1)} s | ${text(2)} s |`)
    expect(times).toHaveLength(3)
  },
  600_000,
)
