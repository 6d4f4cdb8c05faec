/** The site as a whole: its files, its network, its widths. */
import { mkdtempSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { gunzipSync } from 'node:zlib'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import type { Browser } from 'playwright-core'
import litert from '../node_modules/@litertjs/core/package.json' with { type: 'json' }
import { fixture, launch, noBrowser } from './browser'
import { draw, learn, openPage, shown, small, teach } from './page'
import { serve } from './server'

const wasm = `litert-${litert.version}/litert_wasm_internal.wasm`

describe.skipIf(noBrowser)('the site', () => {
  let browser: Browser
  beforeAll(async () => {
    browser = await launch()
  })
  afterAll(() => browser?.close())

  it('asks nobody but its own host: the log of the whole browser', async () => {
    const folder = mkdtempSync(join(tmpdir(), 'tfpfl-netlog-'))
    const log = join(folder, 'net.json')
    const host = await serve(fixture('site-mlp'))
    const own = await launch(`--log-net-log=${log}`)
    const page = await openPage(await own.newContext(), host.url)
    await expect.poll(() => page.evaluate(() => document.documentElement.dataset.offline)).toBe('true')
    for (const [label, stroke] of (['line', 'bar', 'ring'] as const).entries()) {
      for (let i = 0; i < 3; i++) await teach(page, label, stroke, i)
    }
    expect(await learn(page)).toMatch(/^(Learned|Not better)/)
    await page.locator('#round').click()
    await expect.poll(() => page.locator('#round-status').textContent()).toMatch(/A round on/)
    await own.close()
    await host.close()

    const { constants, events } = JSON.parse(readFileSync(log, 'utf8')) as {
      constants: { logEventTypes: Record<string, number> }
      events: { type: number; params?: { url?: string; initiator?: string } }[]
    }
    const started = events.filter((event) => event.type === constants.logEventTypes.URL_REQUEST_START_JOB)
    // The browser itself looks for updates and the like; what a page asks for has the page's origin as its initiator.
    const asked = started.flatMap(({ params }) => (params?.url && params.initiator?.startsWith('http') ? [new URL(params.url)] : []))
    const { origin } = new URL(host.url)
    expect(asked.map(({ pathname }) => pathname)).toEqual(expect.arrayContaining(['/site.json', '/bundle/theta.bin.gz', '/sw.js']))
    expect(asked.some(({ pathname }) => pathname.endsWith('.wasm.gz'))).toBe(true)
    expect([...new Set(asked.map((url) => url.origin))]).toEqual([origin])
    rmSync(folder, { recursive: true })
  })

  for (const [guard, options] of [
    ['the policy of the page', { serviceWorkers: 'block' }],
    ['the service worker', { bypassCSP: true }],
  ] as const) {
    it(`may not ask others: ${guard} alone refuses it`, async () => {
      const host = await serve(fixture('site-mlp'))
      const other = await serve(fixture('site-mlp'))
      const page = await openPage(await browser.newContext(options), host.url)
      if (guard === 'the service worker') await page.waitForFunction(() => navigator.serviceWorker.controller !== null)
      const ask = (url: string) => page.evaluate((url) => fetch(url, { mode: 'no-cors' }).then(() => 'answered', () => 'refused'), url) // prettier-ignore
      expect(await ask(`${host.url}icon.svg`)).toBe('answered')
      expect(await ask(`${other.url}icon.svg`)).toBe('refused')
      const ran = await page.evaluate(() => {
        document.body.append(Object.assign(document.createElement('script'), { textContent: 'globalThis.inline = true' }))
        return 'inline' in globalThis
      })
      expect(ran).toBe('bypassCSP' in options)
      await page.close()
      await host.close()
      await other.close()
    })
  }

  it('opens without a network once it was loaded, learned head and all', async () => {
    const host = await serve(fixture('site-cnn'))
    const context = await browser.newContext({ bypassCSP: true })
    const page = await openPage(context, host.url)
    for (const [label, stroke] of (['line', 'bar', 'ring'] as const).entries()) {
      for (let i = 0; i < 3; i++) await teach(page, label, stroke, i)
    }
    expect(await learn(page)).toMatch(/Learned/)
    const before = await shown(page, 'ring')
    await expect.poll(() => page.evaluate(() => document.documentElement.dataset.offline)).toBe('true')
    expect(host.asked.filter((path) => path.includes('.wasm'))).toEqual([`/${wasm}.gz`]) // megabytes, once
    await page.close()
    await host.close() // nobody is there any more

    await context.setOffline(true)
    // In some versions of Chromium, a page that is opened then has a navigator that says otherwise.
    await context.addInitScript(() => Object.defineProperty(navigator, 'onLine', { get: () => false }))
    const again = await openPage(context, host.url)
    expect(await again.locator('#status').textContent()).toMatch(/^Ready, without a network/)
    expect(await shown(again, 'ring')).toBe(before)
    await again.locator('#round').click()
    await expect.poll(() => again.locator('#round-status').textContent()).toMatch(/A round on 32 examples/)
    await context.close()
  })

  for (const name of ['bundle/theta.bin', 'bundle/program_browser.tflite', 'bundle/manifest.json', 'bundle/client.safetensors', wasm]) {
    it(`refuses a changed ${name}`, async () => {
      const flip = (bytes: Buffer) => {
        bytes[Math.floor(bytes.length / 2)]! ^= 1
        return bytes
      }
      const host = await serve(fixture('site-mlp'), { damage: { [name]: flip, [`${name}.gz`]: flip } })
      const page = await browser.newPage()
      await page.goto(host.url)
      await page.waitForFunction(() => document.documentElement.dataset.ready)
      const late = name.includes('client')
      if (late) await page.locator('#client').scrollIntoViewIfNeeded()
      const said = page.locator(late ? '#round-status' : '#status')
      await expect.poll(() => said.textContent()).toMatch(`${name.split('/')[1]} is damaged: its sha256 is not the one in site.json.`)
      if (late) expect(await page.locator('#round').isDisabled()).toBe(true)
      else expect(await page.locator('#learn').isVisible()).toBe(false)
      await page.close()
      await host.close()
    })
  }

  it('works where the host unpacks the copies itself, and where the browser cannot', async () => {
    for (const plain of [true, false]) {
      const copies = Object.keys((JSON.parse(readFileSync(fixture('site-cnn', 'site.json'), 'utf8')) as { files: object }).files).map((name) => `${name}.gz`)
      const damage = Object.fromEntries(copies.map((name) => [name, (bytes: Buffer) => gunzipSync(bytes)])) // as with Content-Encoding: gzip
      const host = await serve(fixture('site-cnn'), { damage: plain ? {} : damage })
      const context = await browser.newContext()
      if (plain) {
        await context.addInitScript(() => Reflect.deleteProperty(globalThis, 'DecompressionStream'))
        await context.route('**/runtime.worker-*.js', async (route) => {
          const response = await route.fetch()
          await route.fulfill({ response, body: `delete self.DecompressionStream;${await response.text()}` })
        })
      }
      const page = await openPage(context, host.url)
      expect(host.asked.filter((path) => path.includes('.wasm'))).toEqual([plain ? `/${wasm}` : `/${wasm}.gz`])
      await page.locator('#round').click()
      await expect.poll(() => page.locator('#round-status').textContent()).toMatch(/A round on/)
      await context.close()
      await host.close()
    }
  })

  it('takes drawings before the program has come; they are learned from when it is there, and the client is loaded last', async () => {
    let release = () => {}
    const held = new Promise<void>((done) => (release = done))
    const host = await serve(fixture('site-cnn'))
    const context = await browser.newContext({ serviceWorkers: 'block', viewport: { width: 390, height: 844 } })
    await context.route('**/*.wasm.gz', async (route) => {
      await held
      await route.continue()
    })
    const page = await context.newPage()
    await page.goto(host.url)
    await page.waitForFunction(() => document.documentElement.dataset.pad)
    const place = () => page.locator('#pad').evaluate((pad) => pad.getBoundingClientRect().top + scrollY)
    const before = await place()
    for (const [label, stroke] of (['line', 'bar', 'ring'] as const).entries()) {
      for (let i = 0; i < 3; i++) await teach(page, label, stroke, i)
    }
    expect(await page.locator('#status').textContent()).toMatch(/You can draw already.*of \d\.\d MB/)
    const [have, all] = await page.locator('#loading').evaluate((bar: HTMLProgressElement) => [bar.value, bar.max])
    expect(have).toBeGreaterThan(0.1 * all!) // theta and the program have come
    expect(have).toBeLessThan(0.5 * all!) // most is WebAssembly
    await page.locator('#learn-button').click()
    await expect.poll(() => page.locator('#result').textContent()).toMatch(/Learning begins when/)
    expect(await page.evaluate(() => document.documentElement.dataset.ready)).toBeUndefined()
    expect(host.asked.some((path) => path.includes('client.safetensors'))).toBe(false)
    release()
    await expect.poll(() => page.locator('#result').textContent()).toMatch(/^Learned: 3 of 3/)
    await expect.poll(() => page.locator('#loading').isVisible()).toBe(false)
    expect(Math.abs((await place()) - before)).toBeLessThan(1) // it did not move under the finger
    await page.locator('#client').scrollIntoViewIfNeeded()
    await expect.poll(() => page.locator('#round').isEnabled()).toBe(true)
    expect(host.asked.some((path) => path.includes('client.safetensors'))).toBe(true)
    await context.close()
    await host.close()
  })

  it('keeps nothing for offline where a file of the page was changed', async () => {
    const comment = (bytes: Buffer) => Buffer.concat([bytes, Buffer.from('<!-- -->')])
    const host = await serve(fixture('site-mlp'), { damage: { 'icon.svg': comment } })
    const page = await openPage(await browser.newContext(), host.url)
    await expect.poll(() => page.locator('#facts').textContent()).toMatch(/no: icon.svg is damaged/)
    await page.close()
    await host.close()
  })

  it('writes nothing to the console on a clean visit', async () => {
    const host = await serve(fixture('site-cnn'), { isolated: true })
    for (const isolated of [false, true]) {
      const own = isolated ? host : await serve(fixture('site-cnn'))
      const page = await (await browser.newContext()).newPage()
      const lines: string[] = []
      page.on('console', (message) => lines.push(`${message.type()}: ${message.text()}`))
      page.on('pageerror', (error) => lines.push(String(error)))
      await page.goto(own.url)
      await expect.poll(() => page.evaluate(() => document.documentElement.dataset.offline)).toBe('true')
      await draw(page, 'ring')
      await page.locator('#keep').click()
      await expect.poll(() => page.locator('#class-list canvas').count()).toBe(1)
      await page.locator('#round').click()
      await expect.poll(() => page.locator('#round-status').textContent()).toMatch(/A round on/)
      expect(lines).toEqual([])
      await page.context().close()
      if (!isolated) await own.close()
    }
    await host.close()
  })

  for (const width of [390, 1280]) {
    for (const colorScheme of ['light', 'dark'] as const) {
      it(`fits ${width} pixels, ${colorScheme}, in readable contrast`, async () => {
        const live = (bytes: Buffer) => Buffer.from(bytes.toString().replace('{', '{"live": true,'))
        const host = await serve(fixture('site-cnn'), { damage: { 'site.json': live } })
        const context = await browser.newContext({ viewport: { width, height: 844 }, colorScheme, hasTouch: width < 500 })
        const page = await openPage(context, host.url)
        const overflow = () => page.evaluate(() => document.scrollingElement!.scrollWidth - innerWidth)
        expect(await overflow()).toBeLessThanOrEqual(0)
        await page.locator('#join').click()
        await expect.poll(() => page.locator('#live-status').textContent()).toMatch(/needs the token/)
        await page.locator('#name-0').fill('abcdefghij'.repeat(20)) // the longest one
        expect(await page.locator('.chip .name').first().evaluate((name) => name.scrollWidth - name.clientWidth)).toBeLessThanOrEqual(0) // all of it is shown
        for (const [label, stroke] of (['line', 'bar', 'ring'] as const).entries()) {
          for (let i = 0; i < 4; i++) await teach(page, label, stroke, i)
        }
        await learn(page)
        await draw(page, 'ring', 3)
        await page.locator('#round').click()
        await expect.poll(() => page.locator('#round-status').textContent()).toMatch(/A round on/)
        expect(await overflow()).toBeLessThanOrEqual(0)
        expect(await page.locator('#pad').evaluate((pad) => getComputedStyle(pad).touchAction)).toBe('none')
        await page.locator('details').evaluateAll((all) => (all as HTMLDetailsElement[]).forEach((details) => (details.open = true)))
        expect(await overflow()).toBeLessThanOrEqual(0)
        expect(await page.evaluate(lowestContrast)).toBeGreaterThan(4.5)
        expect(await page.evaluate(unnamed)).toEqual([])
        expect(await page.evaluate(small, 44)).toEqual([])
        await context.close()
        await host.close()
      })
    }
  }
})

/** In the browser: the lowest contrast of a text with what is behind it (WCAG's ratio). */
function lowestContrast(): number {
  // Mixed colours are given as color(srgb 0.5 0.5 0.5).
  const channels = (color: string) => (color.match(/[\d.]+/g) ?? []).map((part, i) => Number(part) * (color.startsWith('color(') && i < 3 ? 255 : 1))
  const luminance = (color: string) => {
    const [r, g, b] = channels(color).slice(0, 3).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4)) // prettier-ignore
    return 0.2126 * r! + 0.7152 * g! + 0.0722 * b!
  }
  const behind = (element: Element | null): string => {
    if (!element) return 'rgb(255, 255, 255)'
    const color = getComputedStyle(element).backgroundColor
    return (channels(color)[3] ?? 1) === 0 ? behind(element.parentElement) : color
  }
  let lowest = 21
  for (const element of document.querySelectorAll<HTMLElement>('body *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent!.trim())
    if (!own || !element.checkVisibility() || element.closest(':disabled, svg, .skip')) continue
    const [a, b] = [luminance(getComputedStyle(element).color), luminance(behind(element))]
    lowest = Math.min(lowest, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05))
  }
  return lowest
}

/** In the browser: controls and pictures that a screen reader has no name for. */
function unnamed(): string[] {
  const named = (element: HTMLElement) =>
    Boolean(
      element.ariaLabel ||
        element.textContent?.trim() ||
        (element as HTMLInputElement).labels?.length ||
        element.closest('label')?.textContent?.trim(),
    )
  return [...document.querySelectorAll<HTMLElement>('button, input, select, canvas, meter, [role=img]')]
    .filter((element) => element.checkVisibility() && !named(element))
    .map((element) => element.outerHTML.slice(0, 100))
}
