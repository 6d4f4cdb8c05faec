/** The page for operators of live rounds (tfpfl/live/watch_page), which needs no build: what it shows, and whom it asks. */
import { readFileSync } from 'node:fs'
import { createServer, type Server } from 'node:http'
import type { AddressInfo } from 'node:net'
import { join } from 'node:path'
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it } from 'vitest'
import type { Browser, BrowserContext, Page } from 'playwright-core'
import { launch, noBrowser } from './browser'
import { lowestContrast } from './contrast'

const LIVE = join(import.meta.dirname, '../../tfpfl/live')
// The policy is the one that the server sends: the texts in the parentheses behind its name.
const source = /"Content-Security-Policy": \(([^)]*)\)/.exec(readFileSync(join(LIVE, 'watch.py'), 'utf8'))![1]!
const POLICY = [...source.matchAll(/"(.*)"/g)].map((found) => found[1]).join('')
const FILES: Record<string, [string, string]> = {
  '/watch': ['index.html', 'text/html'],
  '/watch/page.css': ['page.css', 'text/css'],
  '/watch/page.js': ['page.js', 'text/javascript'],
}
const TOKEN = 'the-token-of-an-operator'
const HOSTILE = '<img src=x onerror="document.title=1">'

interface Row {
  round: number
  clients: number
  dropped: number
  loss: number | null
  seconds: number
  bytes_up: number
  bytes_down: number
  scores: Record<string, { score: number | null; loss: number }>
}

const row = (round: number): Row => ({
  ...{ round, clients: 3, dropped: round % 4 === 0 ? 1 : 0, loss: 1 / round, seconds: 2, bytes_up: 1500, bytes_down: 2500 },
  scores: round % 2 ? {} : { personal: { score: 1 - 1 / round, loss: 0.1 }, 'local copy': { score: round === 2 ? null : 0.5, loss: 0.1 } },
})
const member = (client: number, state: string, heard: number | null = 3, score: number | null = null) => ({
  ...{ client, name: client === 1 ? HOSTILE : String(client), state, invited: 4, came: 3, heard, score },
})

/** A state of 60 rounds of which `saved` are saved, and the third of four clients is late. */
function stateOf(saved: number) {
  const at = Date.now() / 1000 + 5000 // the server's clock is another one
  return {
    ...{ protocol: 1, at, doing: 'visit', saved, left_off: 2, bytes: { up: 1500 * saved, down: 2_500_000 } },
    run: {
      ...{ name: 'ward 7', id: 'abcdef0123456789', algorithm: 'pflego', clients: 6, rounds: 60, split: 'test', deadline: 60, quorum: 0.6, wait_for: 4 },
      score: { name: 'accuracy', fraction: true, larger_is_better: true },
    },
    round: { number: saved + 1, began: at - 40, deadline: at + 20, moved: false, invited: [0, 1, 2], came: [0, 1], waiting: [2] },
    counts: { late: 1, working: 0, sent: 2, here: 0, away: 1, 'not joined': 2, revoked: 0 },
    members: [member(2, 'late', 45), member(0, 'sent', 1, 0.875), member(1, 'sent'), member(3, 'away', 7300)],
    events: [
      { at, what: 'opened', round: saved + 1, client: null },
      { at, what: 'arrived', round: saved + 1, client: 1 },
    ],
    history: [] as Row[],
  }
}

describe.skipIf(noBrowser)('The page for operators', () => {
  let browser: Browser
  let server: Server
  let url: string
  let context: BrowserContext
  let asked: { path: string; token: string | undefined }[]
  let present: ReturnType<typeof stateOf> | 'away'
  const problems: string[] = []
  beforeAll(async () => {
    browser = await launch()
    server = createServer((request, response) => {
      const path = new URL(request.url!, 'http://host').pathname
      const file = FILES[path]
      if (file) {
        response.writeHead(200, { 'Content-Type': file[1], 'Content-Security-Policy': POLICY })
        return response.end(readFileSync(join(LIVE, 'watch_page', file[0])))
      }
      asked.push({ path: request.url!, token: request.headers.authorization })
      if (present === 'away') return request.socket.destroy()
      const right = request.headers.authorization === `Bearer ${TOKEN}`
      response.writeHead(right ? 200 : 401, { 'Content-Type': 'application/json' })
      const since = Number(new URL(request.url!, 'http://host').searchParams.get('since'))
      const rows = Array.from({ length: present.saved }, (_, i) => row(i + 1)).slice(since, since + 30) // in parts
      return response.end(JSON.stringify(right ? { ...present, history: rows } : { error: 'no' }))
    })
    await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve))
    url = `http://127.0.0.1:${(server.address() as AddressInfo).port}/watch`
  })
  afterAll(async () => {
    await browser?.close()
    server.closeAllConnections()
    server.close()
  })
  beforeEach(async () => {
    asked = []
    present = stateOf(58)
    problems.length = 0
    context = await browser.newContext()
  })
  afterEach(() => context.close())

  async function open(target = `${url}#${TOKEN}`): Promise<Page> {
    const page = await context.newPage()
    page.on('pageerror', (error) => problems.push(error.message))
    page.on('console', (message) => problems.push(message.text()))
    await page.goto(target)
    return page
  }
  const text = (page: Page, selector: string) => page.locator(selector).textContent()

  it('shows who is here, who is late, bytes and curves, and follows the rounds', async () => {
    const page = await open()
    await expect.poll(() => text(page, '#now-text')).toBe('2 of 3 updates have come')
    expect(page.url()).toBe(url) // the token is not in the address any more
    expect(await text(page, '#now-number')).toBe('59 of 60')
    expect(await text(page, '#now-left')).toMatch(/^(20|19|18|17) s until the deadline/)
    expect(await page.locator('#now-cells li').evaluateAll((all) => all.map((li) => (li as HTMLElement).dataset.state))).toEqual(['sent', 'sent', 'late'])
    const tiles = await page.locator('#tiles > div').allInnerTexts()
    expect(tiles.map((tile) => tile.replace(/\n+/g, ': '))).toEqual([
      'here: 3 of 6: 1 away, 2 not joined',
      'late: 1: the round waits for it',
      'accuracy: 98.3 %: all clients, round 58',
      'sent in all: 2.6 MB: 2.5 MB to devices, 87 kB from them',
    ])
    expect(asked.map(({ path }) => path).slice(0, 2)).toEqual([0, 30].map((since) => `/v1/watch?since=${since}`))
    expect(await page.locator('#score-chart svg').getAttribute('aria-label')).toBe(
      'all clients: from 50.0 % in round 2 to 98.3 % in round 58; after own work: from 50.0 % in round 4 to 50.0 % in round 58',
    )
    expect(await page.locator('#came-chart rect').count()).toBe(58 + 14) // in every fourth round one was missing
    expect((await page.locator('#clients tr').allInnerTexts()).map((line) => line.replace(/\s+/g, ' '))).toEqual([
      '2 late 45 s ago 3 of 4 –',
      '0 sent now 3 of 4 87.5 %',
      `1 ${HOSTILE} sent 3 s ago 3 of 4 –`,
      '3 away 2 h ago 3 of 4 –',
    ])
    expect(await text(page, '#left-off')).toBe('2 more clients are not shown.')
    expect(await text(page, '#events li:first-child')).toContain('Client 1 sent its update of round 59')

    const kept = await page.locator('#clients tr').first().elementHandle()
    const filter = page.locator('#filter button', { hasText: 'sent' })
    await filter.focus()
    await page.keyboard.press('Enter')
    expect(await page.locator('#clients tr').count()).toBe(2)
    present = stateOf(59)
    await expect.poll(() => text(page, '#now-number')).toBe('60 of 60')
    expect(await filter.evaluate((button) => button === document.activeElement && button.getAttribute('aria-pressed'))).toBe('true')
    await page.locator('#filter button', { hasText: 'all' }).click()
    expect(await kept!.evaluate((line) => line.isConnected)).toBe(false)
    await page.locator('#numbers summary').click()
    await expect.poll(() => page.locator('#numbers-rows tr').count()).toBe(59)

    const box = (await page.locator('#loss-chart svg').boundingBox())!
    await page.mouse.move(box.x + 41, box.y + 60)
    expect(await text(page, '#loss-chart .key')).toBe('of the round’s clients 1.000round 1')
    await page.mouse.move(box.x, box.y + 400)
    await expect.poll(() => text(page, '#loss-chart .key')).toBe('of the round’s clients 0.017round 59')

    present = { ...stateOf(60), doing: 'done', round: null as never }
    await expect.poll(() => text(page, '#link-text')).toBe('the run is over')
    const before = asked.length
    await page.waitForTimeout(2500)
    expect(asked.length).toBe(before)
    expect(problems).toEqual([])
  })

  it('asks for the token, keeps it in the tab, and says when it is wrong', async () => {
    const page = await open(url)
    expect(await page.locator('#enter').isVisible()).toBe(true)
    expect(asked).toEqual([])
    await page.locator('#token').fill('wrong')
    await page.keyboard.press('Enter')
    await expect.poll(() => text(page, '#banner')).toMatch(/refuses this token/)
    expect(await page.locator('#shown').isVisible()).toBe(false)
    await page.locator('#token').fill(` ${TOKEN} `)
    await page.keyboard.press('Enter')
    await expect.poll(() => page.locator('#shown').isVisible()).toBe(true)
    expect(await page.locator('#banner').isVisible()).toBe(false)
    await page.reload()
    await expect.poll(() => text(page, '#name')).toBe('ward 7')
    const another = await open(url)
    expect(await another.locator('#enter').isVisible()).toBe(true)
    expect(asked.every(({ path }) => path.startsWith('/v1/watch?since='))).toBe(true)
    expect(problems.filter((problem) => !problem.includes('401'))).toEqual([]) // the browser tells of it by itself
  })

  it('says that the server is away, goes on when it is back, and ends when all rounds are saved', async () => {
    const page = await open()
    await expect.poll(() => text(page, '#link-text')).toBe('live')
    present = 'away'
    await expect.poll(() => text(page, '#banner')).toMatch(/^The server does not answer.*What you see is of/)
    expect(await text(page, '#link-text')).toBe('no answer')
    present = stateOf(60)
    await expect.poll(() => text(page, '#link-text')).toBe('live')
    expect(await page.locator('#banner').isVisible()).toBe(false)
    present = 'away'
    await expect.poll(() => text(page, '#banner')).toMatch(/^All rounds are saved, and the server has ended/)
    expect(problems.filter((problem) => !problem.includes('net::ERR'))).toEqual([])
  })

  it('is readable in both schemes and at both widths', async () => {
    for (const colorScheme of ['light', 'dark'] as const) {
      for (const [width, height] of [[1280, 900], [390, 844]] as const) { // prettier-ignore
        const other = await browser.newContext({ colorScheme, viewport: { width, height } })
        const page = await other.newPage()
        await page.goto(`${url}#${TOKEN}`)
        await expect.poll(() => page.locator('#clients tr').count()).toBe(4)
        await page.locator('details').evaluateAll((all) => all.forEach((one) => ((one as HTMLDetailsElement).open = true)))
        expect(await page.evaluate(lowestContrast)).toBeGreaterThanOrEqual(4.5)
        expect(await page.evaluate(() => document.documentElement.scrollWidth)).toBeLessThanOrEqual(width)
        await other.close()
      }
    }
  })
})
