/** The page that `tfpfl report` writes: in a browser, from the file, at two widths, light and dark. */
import { mkdirSync } from 'node:fs'
import { join } from 'node:path'
import { pathToFileURL } from 'node:url'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import type { Browser, Page } from 'playwright-core'
import { fixture, launch, noBrowser } from './browser'
import { lowestContrast } from './contrast'

const LOOK = process.env.TFPFL_WEB_LOOK // a folder for pictures of the page, to be looked at

describe.skipIf(noBrowser)('the report', () => {
  let browser: Browser
  beforeAll(async () => {
    browser = await launch()
  })
  afterAll(() => browser?.close())

  for (const width of [390, 1280]) {
    for (const colorScheme of ['light', 'dark'] as const) {
      it(`is whole and readable: ${width} pixels, ${colorScheme}`, async () => {
        const { page, asked, complaints, close } = await open(browser, 'report.html', { viewport: { width, height: 844 }, colorScheme })
        const overflow = () => page.evaluate(() => document.scrollingElement!.scrollWidth - innerWidth)
        expect(await overflow()).toBeLessThanOrEqual(0)
        if (LOOK) {
          mkdirSync(LOOK, { recursive: true })
          await page.screenshot({ path: join(LOOK, `report-${width}-${colorScheme}.png`), fullPage: true })
        }

        const plots = await page.evaluate(sizes)
        // Six curves, the clients, fairness, gains against Local, FedAMP's attention.
        expect(plots).toHaveLength(10)
        for (const plot of plots) {
          expect(plot.width, plot.title).toBeGreaterThan(width < 500 ? 280 : 450)
          expect(plot.height, plot.title).toBeGreaterThan(0.4 * plot.width)
          expect(plot.drawn, plot.title).toBeGreaterThan(20)
          expect(plot.background, plot.title).toBe('rgb(255, 255, 255)') // in the dark as well
          expect(plot.letter, plot.title).toBeGreaterThan(4) // pixels: half of the size of the type
        }
        expect(plots.flatMap((plot) => plot.cut)).toEqual([])
        const paper = await page.evaluate(() => getComputedStyle(document.body).backgroundColor)
        expect(Math.max(...paper.match(/\d+/g)!.map(Number)) < 60).toBe(colorScheme === 'dark')

        await page.evaluate(() => document.querySelectorAll('details').forEach((details) => (details.open = true)))
        expect(await overflow()).toBeLessThanOrEqual(0)
        expect(await page.evaluate(clipped)).toEqual([])
        expect(await page.evaluate(lowestContrast)).toBeGreaterThanOrEqual(4.5)
        expect(complaints).toEqual([])
        expect(asked).toEqual([page.url()]) // the file, and nothing else
        await close()
      })
    }
  }

  it('says what it is to who cannot see it', async () => {
    const { page, close } = await open(browser, 'report.html', {})
    expect(await page.locator('h1').count()).toBe(1)
    expect(await page.title()).toBe(await page.locator('h1').textContent())
    const outline = await page.locator('h1, h2, h3').evaluateAll((all) => all.map((heading) => Number(heading.tagName[1])))
    outline.reduce((before, level) => (expect(level).toBeLessThanOrEqual(before + 1), level), 0)
    for (const figure of await page.locator('figure').all()) {
      expect((await figure.locator('figcaption').first().textContent())!.trim().length).toBeGreaterThan(20)
    }
    const names = await page.evaluate(() =>
      [...document.querySelectorAll('svg, table, .scroll, section')].map((element) => {
        const named = element.getAttribute('aria-labelledby')
        return (named && document.getElementById(named)?.textContent?.trim()) || element.outerHTML.slice(0, 80)
      }),
    )
    expect(names.filter((name) => name.startsWith('<'))).toEqual([])
    expect(await page.locator('tbody tr > th[scope=row]').count()).toBe(await page.locator('tbody tr').count())
    await close()
  })

  it('takes the reader to a section, and tables scroll by the keyboard in their own box', async () => {
    const { page, close } = await open(browser, 'report.html', { viewport: { width: 390, height: 844 } })
    for (const link of await page.locator('nav a').all()) {
      await link.click()
      const target = page.locator((await link.getAttribute('href'))!)
      expect(await target.evaluate((section) => section.getBoundingClientRect().top < innerHeight)).toBe(true)
    }
    const wide = page.locator('#results .scroll').first()
    expect(await wide.evaluate((box) => box.scrollWidth - box.clientWidth)).toBeGreaterThan(0)
    await wide.focus()
    await page.keyboard.press('ArrowRight')
    await expect.poll(() => wide.evaluate((box) => box.scrollLeft)).toBeGreaterThan(0)
    // The name of a row stays in sight.
    const [name, box] = [await wide.locator('tbody th').first().boundingBox(), await wide.boundingBox()]
    expect(Math.abs(name!.x - box!.x)).toBeLessThan(1)
    await close()
  })

  it('is readable for one run', async () => {
    const { page, complaints, close } = await open(browser, 'report-one.html', { viewport: { width: 390, height: 844 } })
    expect(await page.evaluate(() => document.scrollingElement!.scrollWidth - innerWidth)).toBeLessThanOrEqual(0)
    // The run, and its clients that took part and that did not.
    const names = await page.locator('#results tbody').first().locator('th').allTextContents()
    expect(names).toEqual(['PFLEGO', 'PFLEGO, 9 seen', 'PFLEGO, 1 never seen'])
    expect((await page.evaluate(sizes)).flatMap((plot) => plot.cut)).toEqual([])
    expect(complaints).toEqual([])
    await close()
  })
})

async function open(browser: Browser, name: string, options: Parameters<Browser['newContext']>[0]) {
  const context = await browser.newContext(options)
  const page: Page = await context.newPage()
  const asked: string[] = []
  const complaints: string[] = []
  page.on('request', (request) => asked.push(request.url()))
  page.on('console', (message) => complaints.push(message.text()))
  page.on('pageerror', (error) => complaints.push(String(error)))
  await page.goto(pathToFileURL(fixture(name)).href)
  return { page, asked, complaints, close: () => context.close() }
}

/** In the browser: every plot, how large it is, and the texts in it that are cut off by its edge. */
function sizes() {
  return [...document.querySelectorAll<SVGSVGElement>('.plot svg')].map((svg) => {
    const { width, height, left, right, top, bottom } = svg.getBoundingClientRect()
    const title = svg.querySelector('title')!.textContent!.slice(0, 60)
    const shapes = [...svg.querySelectorAll('path, use, image')].map((shape) => shape.getBoundingClientRect())
    const texts = [...svg.querySelectorAll('g[id*="text_"]')].map((text) => text.getBoundingClientRect())
    const outside = texts.filter((box) => box.left < left - 1 || box.right > right + 1 || box.top < top - 1 || box.bottom > bottom + 1)
    const letters = [...svg.querySelectorAll('g[id*="text_"] use')].map((letter) => letter.getBoundingClientRect()).map((box) => Math.max(box.width, box.height))
    return {
      title,
      width,
      height,
      drawn: shapes.filter((box) => box.width + box.height > 0).length,
      letter: letters.sort((a, b) => a - b)[letters.length >> 1]!,
      background: getComputedStyle(svg.closest('.plot')!).backgroundColor,
      cut: outside.map((box) => `${title}: a text at ${Math.round(box.left - left)}, ${Math.round(box.top - top)}`),
    }
  })
}

/** In the browser: headings, cells and captions whose text does not fit into them. */
function clipped(): string[] {
  return [...document.querySelectorAll<HTMLElement>('h1, h2, h3, th, td, figcaption, p, dt, dd, summary, pre, footer, a')]
    .filter((element) => element.checkVisibility() && element.clientWidth > 0)
    .filter((element) => element.scrollWidth > element.clientWidth + 1 || element.scrollHeight > element.clientHeight + 2)
    .map((element) => `${element.tagName}: ${element.textContent!.slice(0, 60)}`)
}
