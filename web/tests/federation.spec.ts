/** The federation that the page plays: ten rounds against the local engine, and what can be seen and pressed of it. */
import { readFileSync } from 'node:fs'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import type { Browser, BrowserContext, Page } from 'playwright-core'
import core from '../node_modules/@litertjs/core/package.json' with { type: 'json' }
import type { Device } from '../src/device'
import { Federation } from '../src/federation'
import { guestOf } from '../src/federation_guest'
import type { MembersAbout } from '../src/members'
import { readSafetensors } from '../src/safetensors'
import { ServerStep } from '../src/server_step'
import { complaints } from './axe'
import { fixture, harness, launch, noBrowser } from './browser'
import { hosted, openPage, small, teach } from './page'
import { serve } from './server'

const BOUND = 1e-5
const ROUNDS = 10

describe.skipIf(noBrowser)('ten rounds in the page are those of the local engine', () => {
  let browser: Browser
  beforeAll(async () => {
    browser = await launch()
  })
  afterAll(() => browser?.close())

  for (const [name, mode] of [['members', 'own'], ['members', 'one'], ['members-exact', 'own']] as const) {
    it(`${name}, ${mode === 'own' ? 'heads of one’s own' : 'one head for all'}`, async () => {
      const folders = { '/harness/': harness(), '/fixtures/': fixture() }
      const host = await serve(fixture(`site-${name}`), { folders })
      const page = await browser.newPage()
      await page.goto(`${host.url}harness/`)
      await page.waitForFunction(() => 'harness' in globalThis)
      const litert = `${host.url}litert-${core.version}/`
      const found = await page.evaluate(playRounds, { name, mode, litert, rounds: ROUNDS })
      expect(found.moved).toBeGreaterThan(1000 * BOUND) // or the comparison would say nothing
      expect(found.theta).toBeLessThan(BOUND)
      expect(found.heads).toHaveLength(mode === 'own' ? 8 : 1)
      expect(Math.max(...found.heads)).toBeLessThan(BOUND)
      if (mode === 'own') {
        const expected = readSafetensors(new Uint8Array(readFileSync(fixture(`${name}.safetensors`))))
        expect(found.right).toEqual([...(expected.get('right')!.data as Int32Array)])
      }
      console.info(name, mode, found)
      await page.close()
      await host.close()
    })
  }
})

/** In the browser: the largest differences after so many rounds. */
async function playRounds({ name, mode, litert, rounds }: { name: string; mode: 'own' | 'one'; litert: string; rounds: number }) {
  const { Device, Federation, Runtime, openBundle, openManifest, openMembers, openProgram, openSite, readSafetensors } =
    globalThis.harness
  // The harness lies in a folder of the site.
  document.head.append(Object.assign(document.createElement('base'), { href: '/' }))
  const site = await openSite()
  const { manifest } = await openManifest(site)
  const bundle = await openBundle(site, manifest, openProgram(site))
  const members = await openMembers(site, bundle)
  const file = readSafetensors(new Uint8Array(await (await fetch(`/fixtures/${name}.safetensors`)).arrayBuffer()))
  const get = (name: string) => file.get(name)!.data as Float32Array
  const furthest = (a: Float32Array, b: Float32Array) => {
    if (a.length !== b.length) return Infinity
    return a.reduce((most, value, i) => Math.max(most, Math.abs(value - b[i]!)), 0)
  }
  const runtime = await Runtime.start(litert, bundle.program)
  const federation = new Federation(await Device.open(runtime, null), members, mode)
  for (let i = 0; i < rounds; i++) await federation.next()
  runtime.stop()
  const of = (head: { kernel: Float32Array; bias: Float32Array }, kernel: string, bias: string) =>
    Math.max(furthest(head.kernel, get(kernel)), furthest(head.bias, get(bias)))
  return {
    moved: furthest(members.theta, federation.theta),
    theta: furthest(federation.theta, get(mode === 'own' ? 'theta' : 'one.theta')),
    heads: mode === 'own' ? federation.heads.map((head, i) => of(head, `kernel_${i}`, `bias_${i}`)) : [of(federation.shared, 'one.kernel', 'one.bias')],
    right: federation.scores.map((score) => score!.correct),
  }
}

describe.skipIf(noBrowser)('the federation of the page', () => {
  const site = hosted('site-members')
  let context: BrowserContext
  let page: Page

  const text = (selector: string) => page.locator(selector).textContent()
  const round = async () => Number(/\d+/.exec((await text('#federation-round'))!)![0])
  const reach = (n: number) => expect.poll(round).toBeGreaterThanOrEqual(n)
  const scores = () => page.locator('#federation-cards .score').allTextContents()
  const ready = () => expect.poll(() => page.locator('#federation').getAttribute('data-state')).toBe('ready')

  async function open(options: Parameters<Browser['newContext']>[0] = {}) {
    context = await site.browser.newContext({ reducedMotion: 'reduce', ...options })
    page = await openPage(context, site.host.url)
    await page.locator('#federation').scrollIntoViewIfNeeded()
    await ready()
  }

  it('plays, pauses and starts again; both heads; what is shown is the engine’s', async () => {
    await open()
    expect(await page.locator('#federation-cards .card:not(.guest) h3').allTextContents()).toEqual(Array.from({ length: 8 }, (_, i) => `school ${i}`))
    expect(await page.locator('#federation-cards .card:not(.guest) canvas').count()).toBe(24)
    expect(await scores()).toEqual(Array<string>(8).fill('not scored yet'))
    await page.locator('#federation-play').click()
    await reach(2)
    await page.locator('#federation-play').click()
    await ready()
    const paused = await round()
    await page.waitForTimeout(1200) // longer than the rest between two rounds
    expect(await round()).toBe(paused)
    expect(await text('#federation-play')).toBe('Play')

    for (let n = paused; n < ROUNDS; n++) {
      await page.locator('#federation-step').click()
      await reach(n + 1)
      await ready()
    }
    expect(await round()).toBe(ROUNDS)
    const expected = readSafetensors(new Uint8Array(readFileSync(fixture('members.safetensors'))))
    const right = [...(expected.get('right')!.data as Int32Array)]
    const shown = await scores()
    expect(shown.map((line) => Number(/: (\d+) of 32$/.exec(line)![1]))).toEqual(right)
    const mean = right.reduce((a, b) => a + b, 0) / 256
    expect(await text('#federation-status')).toBe(`Round ${ROUNDS}: ${(100 * mean).toFixed(0)} % of the held-out pictures are right.`)
    const messages = Number(JSON.parse(readFileSync(fixture('site-members', 'bundle', 'manifest.json'), 'utf8')).model.num_backbone_weights) * 4 + 16
    expect(await page.locator('#federation-cards .sent').first().textContent()).toBe(`sent ${((ROUNDS * messages) / 1000).toFixed(0)} kB`)
    const points = await page.locator('#federation-chart polyline.own').getAttribute('points')
    expect(points!.split(' ')).toHaveLength(ROUNDS + 1)

    await page.locator('input[value=one]').check()
    await expect.poll(round).toBe(0)
    expect(await text('#federation-mode-about')).toMatch(/averaged, too: all have the same head/)
    await page.locator('#federation-step').click()
    await reach(1)
    await ready()
    expect(await text('#federation-status')).toMatch(/^Round 1: \d+ % of .*; with a head of one’s own it was \d+ %\.$/)
    expect(await page.locator('#federation-chart polyline').count()).toBe(2)

    await page.locator('#federation-reset').click()
    await expect.poll(round).toBe(0)
    expect(await page.locator('#federation-chart polyline').count()).toBe(0)
    expect(await scores()).toEqual(Array<string>(8).fill('not scored yet'))
    await page.locator('input[value=own]').check()
    for (let n = 0; n < 2; n++) {
      await page.locator('#federation-step').click()
      await reach(n + 1)
      await ready()
    }
    await context.close()
  })

  it('Reset and the other head end a round that is being computed', async () => {
    await open({ reducedMotion: 'no-preference' })
    await page.locator('#federation-play').click()
    await expect.poll(() => page.locator('#federation').getAttribute('data-state')).toBe('computing')
    await page.locator('input[value=one]').check()
    await expect.poll(round).toBe(0)
    await ready()
    expect(await text('#federation-play')).toBe('Play')
    await page.waitForTimeout(300)
    expect(await round()).toBe(0)
    expect(await page.locator('#federation-stage .packet').count()).toBe(0)
    await page.locator('#federation-step').click()
    await expect.poll(() => page.locator('#federation-stage .packet').count()).toBeGreaterThan(7) // theta is on its way to everyone
    await reach(1)
    await expect.poll(() => page.locator('#federation-stage .packet').count()).toBe(0)
    await context.close()
  })

  it('after Pause, One round is one round, also while the last one of Play is still computed', async () => {
    await open()
    await page.evaluate(() => {
      for (const button of ['play', 'play', 'step']) document.getElementById(`federation-${button}`)!.click()
    })
    await reach(1)
    await expect.poll(() => text('#federation-play'), { timeout: 60_000 }).toBe('Play')
    expect(await round()).toBe(1)
    await context.close()
  })

  it('nothing travels where motion is not wanted', async () => {
    await open()
    await page.evaluate(() => {
      const seen = new MutationObserver((changes) => {
        const added = changes.flatMap((change) => [...change.addedNodes])
        if (added.some((node) => node instanceof HTMLElement && node.matches('.packet'))) document.body.dataset.moved = 'yes'
      })
      seen.observe(document.querySelector('#federation-stage')!, { childList: true, subtree: true })
    })
    await page.locator('#federation-step').click()
    await reach(1)
    expect(await page.evaluate(() => document.body.dataset.moved)).toBeUndefined()
    await context.close()
  })

  it('can be played by keyboard', async () => {
    await open()
    await page.locator('#federation-play').focus()
    await page.keyboard.press('Enter')
    await reach(1)
    await page.keyboard.press('Space') // Pause
    await ready()
    await expect.poll(() => text('#federation-play')).toBe('Play')
    const order = []
    for (let i = 0; i < 3; i++) {
      await page.keyboard.press('Tab')
      order.push(await page.evaluate(() => document.activeElement?.id || (document.activeElement as HTMLInputElement).value))
    }
    expect(order).toEqual(['federation-step', 'federation-reset', 'own'])
    await page.keyboard.press('ArrowRight')
    expect(await page.locator('input[value=one]').isChecked()).toBe(true)
    await expect.poll(round).toBe(0)
    await context.close()
  })

  it('the visitor is a member once two classes are drawn', async () => {
    await open()
    expect(await text('#federation-cards .guest')).toMatch(/Draw at least two classes/)
    for (const [label, stroke] of (['line', 'bar', 'ring'] as const).entries()) {
      for (let i = 0; i < 3; i++) await teach(page, label, stroke, i)
    }
    await page.locator('#federation-step').click()
    await reach(1)
    expect(await page.locator('#federation-cards .card').count()).toBe(9)
    const own = page.locator('#federation-cards .guest')
    expect(await own.locator('canvas').count()).toBe(3)
    expect(await own.locator('.score').textContent()).toMatch(/: [0-3] of 3$/)
    for (let n = 1; n < 4; n++) {
      await page.locator('#federation-step').click()
      await reach(n + 1)
    }
    expect(await own.locator('.score').textContent()).toBe('100 %: 3 of 3') // three strokes are easy
    await page.locator('input[value=one]').check()
    await expect.poll(round).toBe(0)
    await page.locator('#federation-step').click()
    await reach(1)
    expect(await own.locator('.score').textContent()).toMatch(/of 3$/)
    await context.close()
  })

  it('a site without members has no federation', async () => {
    const other = await serve(fixture('site-mlp'))
    const context = await site.browser.newContext()
    const page = await openPage(context, other.url)
    for (const part of ['#federation', '#federation-link']) expect(await page.locator(part).isVisible()).toBe(false)
    await context.close()
    await other.close()
  })

  it('refuses changed examples of the members, and the rest of the page works', async () => {
    const flip = (bytes: Buffer) => {
      bytes[bytes.length - 9]! ^= 1
      return bytes
    }
    const damaged = 'bundle/members.safetensors'
    const other = await serve(fixture('site-members'), { damage: { [damaged]: flip, [`${damaged}.gz`]: flip } })
    const context = await site.browser.newContext()
    const page = await openPage(context, other.url)
    await page.locator('#federation').scrollIntoViewIfNeeded()
    await expect.poll(() => page.locator('#federation-status').textContent()).toMatch(/members.safetensors is damaged/)
    await context.close()
    await other.close()
  })

  it('a part whose code does not come says so, and the rest of the page works', async () => {
    const context = await site.browser.newContext()
    await context.route(/\/assets\/(federation|client)_page-/, (route) => route.abort())
    const page = await openPage(context, site.host.url)
    for (const status of ['#federation-status', '#round-status']) {
      await page.locator(`section:has(> ${status}), section:has(> div > ${status})`).scrollIntoViewIfNeeded()
      await expect.poll(() => page.locator(status).textContent()).toMatch(/^This part of the page could not be loaded \(.*Open the page again\.$/)
    }
    await teach(page, 0, 'line', 0)
    await context.close()
  })

  for (const width of [390, 1280]) {
    for (const colorScheme of ['light', 'dark'] as const) {
      it(`fits ${width} pixels while it plays, and passes WCAG 2.2 AA: ${colorScheme}`, async () => {
        await open({ viewport: { width, height: 844 }, colorScheme, reducedMotion: 'no-preference', bypassCSP: true })
        await page.locator('#federation-play').click()
        await reach(1)
        expect(await page.evaluate(() => document.scrollingElement!.scrollWidth - innerWidth)).toBeLessThanOrEqual(0)
        await page.locator('#federation-play').click()
        await ready()
        expect(await complaints(page)).toEqual([])
        expect(await page.locator('#federation-facts').isVisible()).toBe(true) // it was looked at, too
        expect(await page.evaluate(small, 44)).toEqual([])
        await context.close()
      })
    }
  }

  it('is found by the link in the header, which is not there without a federation', async () => {
    context = await site.browser.newContext({ reducedMotion: 'reduce' })
    page = await openPage(context, site.host.url)
    await page.locator('#federation-link').click()
    await ready()
    await expect.poll(() => page.locator('#federation').evaluate((part) => Math.abs(part.getBoundingClientRect().top))).toBeLessThan(40)
    await context.close()
  })
})

describe('the server’s step', () => {
  it('SGD, momentum and Adam by hand', () => {
    const theta = Float32Array.of(1, -2)
    const sgd = new ServerStep({ name: 'sgd', rate: 0.5, momentum: 0 }, 2)
    expect([...sgd.step(theta, Float32Array.of(1, 2))]).toEqual([0.5, -3])
    const momentum = new ServerStep({ name: 'momentum', rate: 0.5, momentum: 0.5 }, 1)
    const first = momentum.step(Float32Array.of(0), Float32Array.of(1))
    expect([...momentum.step(first, Float32Array.of(1))]).toEqual([-1.25]) // v = 1, then 1.5
    const adam = new ServerStep({ name: 'adam', rate: 0.001, beta_1: 0.9, beta_2: 0.999, epsilon: 1e-8 }, 2)
    const moved = adam.step(theta, Float32Array.of(0.3, -7))
    expect(moved[0]! - 1).toBeCloseTo(-0.001, 6) // the first step is the rate, whatever the gradient
    expect(moved[1]! + 2).toBeCloseTo(0.001, 6)
  })
})

describe('a round that diverges', () => {
  it('is refused, and changes nothing', async () => {
    const one = { raw: Uint8Array.of(1), x: Float32Array.of(1), labels: Int32Array.of(0) }
    const head = { kernel: Float32Array.of(1, 2), bias: Float32Array.of(0, 0) }
    const member = { name: 'a', classes: ['0', '7'], columns: [0, 1], train: one, test: one, head }
    const training = { tau: 2, beta: 1, rho: 1, rule: 'exact', head_rate: 'rho', safeguard: false }
    const about = { classes: ['0', '7'], class_ids: [0, 7], training, server: { name: 'sgd', rate: 1, momentum: 0 } } as unknown as MembersAbout
    for (const [dtheta, kernel, why] of [[NaN, 1, /diverged/], [1, Infinity, /diverged/], [1, 1, null]] as const) {
      const round = async () => ({ dtheta: Float32Array.of(dtheta), head: { ...head, kernel: Float32Array.of(kernel, 2) }, loss: 1, parts: {} })
      const device = { features: 1, receive: async () => {}, phi: async () => Float32Array.of(1), round } as unknown as Device
      const federation = new Federation(device, { about, members: [member], shared: head, theta: Float32Array.of(5) }, 'own')
      if (why) await expect(federation.next()).rejects.toThrow(why)
      else expect(await federation.next()).toBe(true)
      expect([federation.round, [...federation.theta], federation.sent]).toEqual(why ? [0, [5], [0]] : [1, [4], [20]])
    }
  })
})

describe('the visitor as a member', () => {
  const about = { classes: ['0', '7'], class_ids: [0, 7] } as MembersAbout
  const setting = { about, preprocessing: { scale: 1, shift: 0 }, pixels: 2, features: 3, room: 4 }
  const drawn = (label: number, heldOut = false) => ({ raw: Uint8Array.of(label, 1), label, heldOut })

  it('takes its own columns, except where a name is one of theirs', () => {
    const found = guestOf({ names: ['star', '7', 'none'], examples: [drawn(0), drawn(1), drawn(1, true), drawn(2, true)] }, setting)
    if (typeof found === 'string') throw new Error(found)
    const { columns, classes, train, test, head } = found.member
    expect([columns, classes]).toEqual([[2, 1], ['star', '7']])
    expect([[...train.labels], [...test.labels], [...test.x]]).toEqual([[0, 1], [1], [1, 1]])
    expect([head.kernel.length, head.bias.length]).toEqual([6, 2])
  })

  it('has the examples that the manifest says: raw numbers where it names neither scale nor shift', () => {
    for (const [preprocessing, x] of [[{}, [0, 1, 1, 1]], [{ scale: 3 }, [0, 3, 3, 3]], [{ shift: 2 }, [2, 3, 3, 3]]] as const) {
      const found = guestOf({ names: ['a', 'b'], examples: [drawn(0), drawn(1)] }, { ...setting, preprocessing })
      if (typeof found === 'string') throw new Error(found)
      expect([...found.member.train.x]).toEqual(x)
    }
  })

  it('says what is missing', () => {
    expect(guestOf({ names: ['a', 'b'], examples: [drawn(0), drawn(1, true)] }, setting)).toMatch(/at least two classes/)
    expect(guestOf({ names: ['7', '7'], examples: [drawn(0), drawn(1)] }, setting)).toMatch(/one name/)
    expect(guestOf({ names: ['a', 'b'], examples: [drawn(0), drawn(1)] }, { ...setting, room: 3 })).toMatch(/room for 3 classes/)
  })

  it('keeps what was trained for a class when another class gets its first drawing, or another name', () => {
    const pixel = (label: number) => ({ raw: Uint8Array.of(1), label, heldOut: false })
    const guest = (names: string[], ...labels: number[]) => {
      const found = guestOf({ names, examples: labels.map(pixel) }, { about, preprocessing: { scale: 1, shift: 0 }, pixels: 1, features: 1, room: 9 })
      if (typeof found === 'string') throw new Error(found)
      return found.member
    }
    const head = (...values: number[]) => ({ kernel: Float32Array.from(values), bias: Float32Array.from(values, (value) => 0 - value) })
    const start = { about: { ...about, server: { name: 'sgd', rate: 1 } as unknown as MembersAbout['server'] }, members: [], shared: head(1, 2), theta: new Float32Array(1) }
    const federation = new Federation(null, start, 'own', guest(['A', 'B', 'C'], 1, 2))
    federation.heads[0] = head(10, 20)
    federation.shared = head(1, 2, 30, 40)
    federation.join(guest(['A', 'B', 'C'], 1, 2, 0))
    expect(federation.heads[0]).toEqual(head(0, 10, 20))
    expect(federation.shared).toEqual(head(1, 2, 0, 30, 40))
    federation.join(guest(['A', 'house', 'C'], 1, 2, 0)) // B was renamed
    expect(federation.heads[0]).toEqual(head(0, 10, 20))
    federation.join(guest(['house', 'C'], 0, 1)) // A was removed
    expect(federation.heads[0]).toEqual(head(10, 20))
    expect(federation.shared).toEqual(head(1, 2, 30, 40))
    federation.leave() // all was forgotten
    expect([federation.members, federation.heads, federation.scores, federation.sent]).toEqual([[], [], [], []])
    expect(federation.shared).toEqual(head(1, 2))
    federation.join(guest(['A', 'B'], 0, 1))
    expect(federation.heads[0]).toEqual(head(0, 0))
  })
})
