/** A live run of `tfpfl serve` as the federation's part shows it: two tabs join it by the page, and a visitor watches. */
import { execFileSync } from 'node:child_process'
import { cpSync, mkdtempSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import type { Browser, BrowserContext, Page } from 'playwright-core'
import { allRounds, status, type Row, type Shown } from '../src/federation_live'
import { complaints } from './axe'
import { fixture, launch, noBrowser } from './browser'
import { openPage, small } from './page'
import { joinRun, python, serveRun, type Served } from './server_of_rounds'

const ROUNDS = 10
const CLIENTS = [9, 0]

/** The rounds as the run's folder has them: [round, members, bytes that they sent, their mean score or null]. */
const STORED = `
import json, sys
from tfpfl.runs.run import Run
with Run.open(sys.argv[1]) as run:
    rows = run.store.history()
name = "personal test accuracy"
print(json.dumps([[r["round"], r["clients"], r["bytes_up"], r["bytes_down"], r.get(name)] for r in rows]))
`

describe.skipIf(noBrowser)('a live run of tfpfl serve on the page', () => {
  let browser: Browser
  let folder: string
  let server: Served
  beforeAll(async () => {
    browser = await launch()
    folder = mkdtempSync(join(tmpdir(), 'tfpfl-crowd-'))
    cpSync(fixture('live', 'run'), join(folder, 'run'), { recursive: true })
    server = await serveRun(join(folder, 'run'), '--wait-for', '2', '--web', join(import.meta.dirname, '../dist'))
  })
  afterAll(async () => {
    server?.stop()
    await browser?.close()
    rmSync(folder, { recursive: true, force: true })
  })

  const text = (page: Page, selector: string) => page.locator(selector).textContent()

  /** Opens the page and joins by the button in the federation's part. */
  async function member(context: BrowserContext, client: number, token: string): Promise<Page> {
    const page = await openPage(context, server.address)
    await page.locator('#crowd-join').click()
    expect(await page.evaluate(() => document.activeElement!.id)).toBe('live-token')
    await joinRun(page, client, token)
    await expect.poll(() => page.locator('#crowd-join').isVisible()).toBe(false)
    await expect.poll(() => text(page, '#crowd-self')).toMatch(/client|Round|Joined/)
    return page
  }

  it('shows who is here, rounds as they close and bytes; two tabs join; the numbers are those of the run', async () => {
    const tokens = JSON.parse(readFileSync(join(folder, 'run', 'tokens.json'), 'utf8')) as Record<string, string>
    const contexts = await Promise.all([0, 1, 2].map((i) => browser.newContext({ viewport: i ? { width: 390, height: 844 } : { width: 1280, height: 844 }, bypassCSP: true })))
    const visitor = await openPage(contexts[0]!, server.address)
    const asked: string[] = []
    visitor.on('request', (request) => asked.push(new URL(request.url()).pathname))
    await visitor.evaluate(() => {
      const seen = new MutationObserver((changes) => {
        for (const change of changes) for (const node of change.addedNodes) if (node instanceof HTMLElement && node.matches('.packet')) document.body.dataset[node.classList[1]!] = 'yes'
      })
      seen.observe(document.querySelector('#crowd-stage')!, { childList: true })
    })
    await visitor.locator('#federation-link').click()
    await expect.poll(() => text(visitor, '#crowd-status')).toBe('The first round begins when 2 members are here. 0 of 10 members are here.')
    expect(await text(visitor, '#crowd-about')).toMatch(/up to 10 members.*Their examples stay with them/)
    for (const part of ['#crowd-rounds', '#federation-source', '#federation-played']) expect(await visitor.locator(part).isVisible(), part).toBe(false)
    expect(await visitor.locator('#crowd-members').getAttribute('aria-label')).toBe('No member is here yet')

    const first = await member(contexts[1]!, CLIENTS[0]!, tokens[CLIENTS[0]!]!)
    await expect.poll(() => visitor.locator('#crowd-members').getAttribute('aria-label')).toBe('1 of 10 members are here: 1 wait')
    expect(await text(visitor, '#crowd-status')).toMatch(/begins when 2 members are here\. 1 of 10/)
    expect(await complaints(visitor)).toEqual([])
    const second = await member(contexts[2]!, CLIENTS[1]!, tokens[CLIENTS[1]!]!)
    await expect.poll(() => visitor.locator('#crowd-members .phone:not(.away)').count()).toBe(2)
    expect(await visitor.locator('#crowd-members .phone').count()).toBe(10) // a place for each
    await expect.poll(() => visitor.locator('#crowd-rounds tbody tr').count(), { timeout: 120_000 }).toBeGreaterThan(1)
    await expect.poll(() => text(visitor, '#crowd-status'), { timeout: 120_000 }).toBe(`The run is over: all ${ROUNDS} rounds are done.`)
    await expect.poll(() => visitor.locator('#federation').getAttribute('data-live')).toBe('done')
    for (const page of [first, second]) await expect.poll(() => text(page, '#crowd-self')).toBe('The run is over. Your head stays here.')
    expect(await server.ended).toBe(0)

    // What it shows is what the run's folder has.
    const rows = JSON.parse(execFileSync(python, ['-c', STORED, join(folder, 'run')], { encoding: 'utf8' })) as [number, number, number, number, number | null][]
    expect(rows).toHaveLength(ROUNDS)
    const sum = (at: 2 | 3) => rows.reduce((total, row) => total + row[at], 0)
    const amount = (bytes: number) => (bytes < 1e6 ? `${Math.round(bytes / 1000).toLocaleString('en')} kB` : `${(bytes / 1e6).toFixed(1)} MB`)
    expect(await text(visitor, '#crowd-bytes')).toBe(`${amount(sum(3))} sent to members, ${amount(sum(2))} sent back`)
    const shown = await visitor.locator('#crowd-rounds tbody tr').evaluateAll((all) => all.map((row) => [...row.children].map((cell) => cell.textContent)))
    const expected = rows.slice(-6).reverse().map(([round, clients, up, , score]) => [String(round), String(clients), score === null ? '–' : `${(100 * score).toFixed(0)} %`, amount(up)]) // prettier-ignore
    expect(shown.map((cells) => cells.slice(0, 4))).toEqual(expected)
    const scored = rows.filter((row) => row[4] !== null)
    expect(scored.length).toBeGreaterThan(3)
    const points = (await visitor.locator('#crowd-chart polyline').getAttribute('points'))!.split(' ')
    expect(points).toHaveLength(scored.length)
    expect(await visitor.locator('#crowd-chart').getAttribute('aria-label')).toBe(
      `Mean accuracy: all ${(100 * scored[0]![4]!).toFixed(0)} % to ${(100 * scored.at(-1)![4]!).toFixed(0)} % in ${ROUNDS} rounds`,
    )
    // Answers were seen to travel. (Whether theta is, depends on when the page asks: a round may open and close between.)
    expect(await visitor.evaluate(() => document.body.dataset.up)).toBe('yes')

    expect(await complaints(visitor)).toEqual([])
    expect(await complaints(first)).toEqual([])
    expect(await first.evaluate(small, 44)).toEqual([])
    expect(await first.evaluate(() => document.scrollingElement!.scrollWidth - innerWidth)).toBeLessThanOrEqual(0)
    // A visitor asks for nothing but the picture of all, and for no more of it when the run is over.
    expect([...new Set(asked.filter((path) => path.startsWith('/v1')))]).toEqual(['/v1/shown'])
    const before = asked.length
    await visitor.waitForTimeout(2500)
    expect(asked.length).toBe(before)
    await Promise.all(contexts.map((context) => context.close()))
  }, 400_000)
})

describe('the sentence on a live run', () => {
  const now: Shown = {
    ...{ doing: 'none', saved: 0, rounds: 20, clients: 9, wait_for: 3, round: null, bytes: { up: 0, down: 0 }, history: [] },
    counts: { late: 0, working: 0, sent: 0, here: 2 },
    score: { name: 'accuracy', fraction: true },
  }
  it('says what the rounds wait for', () => {
    expect(status(now)).toBe('The first round begins when 3 members are here. 2 of 9 members are here.')
    expect(status({ ...now, counts: { ...now.counts, sent: 2 } })).toBe('0 of 20 rounds are over. 4 of 9 members are here.')
    const round = { number: 4, invited: 5, came: 2 }
    expect(status({ ...now, doing: 'visit', saved: 3, round })).toBe('Round 4: 2 of 5 answers have come. 2 of 9 members are here.')
    expect(status({ ...now, doing: 'score', saved: 3, round })).toMatch(/^Round 4: the members see how much the new θ gets right/)
    expect(status({ ...now, doing: 'done', saved: 20 })).toBe('The run is over: all 20 rounds are done.')
  })

  it('has all rounds, and asks again for those whose scores may still come', async () => {
    const rounds = Array.from({ length: 50 }, (_, i): Row => ({ round: i + 1, clients: 1, seconds: 1, bytes_up: 1, bytes_down: 1, score: null }))
    let scoring: number | null = 5
    const asked: number[] = []
    const ask = async (since: number) => (asked.push(since), { ...now, saved: rounds.length, scoring, history: structuredClone(rounds.slice(since, since + 30)) })
    const rows = new Map<number, Row>()
    let from = (await allRounds(rows, 0, ask)).from
    expect([rows.size, asked.splice(0)]).toEqual([50, [0, 30]])
    rounds[4]!.score = 0.5 // 45 rounds later
    scoring = null
    from = (await allRounds(rows, from, ask)).from
    expect([rows.get(5)!.score, asked.splice(0)]).toEqual([0.5, [4, 34]])
    expect((await allRounds(rows, from, ask)).found.saved).toBe(50)
    expect(asked).toEqual([30]) // of a server that does not say which
  })
})
