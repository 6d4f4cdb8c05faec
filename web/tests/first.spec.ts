/**
 * Not a test: how long a visitor waits for the first ink and for the first guess. It prints Markdown.
 *
 *     make web-test WEB_TEST_ARGS=tests/first.spec.ts TFPFL_WEB_FIRST=site
 *
 * The line is one of 9 Mbit/s with 85 ms to the host and back. The page's own thread is slowed 4 times. Chromium slows
 * and limits no workers: so the host itself sends slowly, and the program's own time is not slowed. All times are the
 * page's own clock, from the beginning of the navigation on. Ink is there when the frame after the first touch has it.
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
    const blank = await browser.newPage() // a visitor's browser runs already
    await blank.goto('data:text/html,<canvas>')
    await blank.waitForTimeout(2000)
    await blank.close()
    const times: number[][] = []
    for (let i = 0; i < 3; i++) {
      const context = await browser.newContext({ viewport: { width: 390, height: 844 }, hasTouch: true, bypassCSP: true })
      const page = await context.newPage()
      await (await context.newCDPSession(page)).send('Emulation.setCPUThrottlingRate', { rate: 4 })
      await page.addInitScript(watch)
      await page.goto(host.url, { waitUntil: 'commit' })
      await page.waitForFunction(() => document.documentElement.dataset.pad)
      const box = (await page.locator('#pad').boundingBox())!
      await page.mouse.move(box.x + box.width / 2, box.y + box.height / 2)
      await page.mouse.down()
      await page.mouse.up()
      await draw(page, 'ring')
      const drawn = await page.evaluate(() => performance.now())
      await page.waitForFunction(() => document.documentElement.dataset.ready)
      // The client's head guesses at once: nothing has to be learned for it.
      await page.evaluate(() => document.getElementById('import-bundle')!.click())
      await page.waitForFunction(() => /^“/.test(document.getElementById('guess')!.textContent!))
      times.push(await page.evaluate((drawn) => [...globalThis.seen, drawn, performance.now()], drawn))
      await context.close()
    }
    await browser.close()
    await host.close()
    const text = (i: number) => times.map((row) => (row[i]! / 1000).toFixed(1)).join(', ')
    const names = ['the pad is there', 'the first ink', 'a ring is drawn', 'the first guess']
    console.info(`| ${names.join(' | ')} |\n|---|---|---|---|\n| ${names.map((_, i) => `${text(i)} s`).join(' | ')} |`)
    expect(times.flat().filter((ms) => ms > 0)).toHaveLength(3 * names.length)
  },
  600_000,
)

declare global {
  /** Milliseconds: when the pad was there, and when it had ink. */
  var seen: number[]
}

/** In the browser, before the page: fills `seen`. */
function watch(): void {
  globalThis.seen = []
  const there = new MutationObserver(() => {
    if (!document.documentElement?.dataset.pad) return
    there.disconnect()
    seen[0] = performance.now()
  })
  there.observe(document, { attributes: true, subtree: true })
  const touched = ({ target }: Event) => {
    if (!(target instanceof HTMLCanvasElement)) return
    removeEventListener('pointerdown', touched)
    requestAnimationFrame(() =>
      setTimeout(() => {
        const { data } = target.getContext('2d')!.getImageData(target.width / 2, target.height / 2, 1, 1)
        if (data[0]! < 128) seen[1] = performance.now()
      }),
    )
  }
  addEventListener('pointerdown', touched)
}
