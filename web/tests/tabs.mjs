/**
 * Browser tabs as devices of a server, for benchmarks/live.py: node web/tests/tabs.mjs URL RUN CLIENT...
 *
 * Each client is a tab of a browser of its own. The tokens are in RUN/tokens.json, the examples in RUN/data/CLIENT. The
 * first tab is closed when it has counted an update, and opened again. When the run is over, heads are saved in
 * RUN/devices/CLIENT/head.bin.
 */
import { existsSync, mkdirSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { chromium } from 'playwright-core'

const [url, run, ...clients] = process.argv.slice(2)
const tokens = JSON.parse(readFileSync(join(run, 'tokens.json'), 'utf8'))
const executablePath = process.env.TFPFL_CHROMIUM ?? '/usr/bin/chromium'
const args = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking']
const browser = await chromium.launch({ executablePath, args })
const pause = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds))
const fact = async (page, name) => Number(await page.locator('#live-facts tr', { hasText: name }).locator('td').textContent())

/** Opens the page, also if the server is away for a while. */
async function open(context) {
  for (let attempt = 0; ; attempt++) {
    const page = await context.newPage()
    try {
      await page.goto(url)
      await page.waitForFunction(() => document.documentElement.dataset.ready, null, { timeout: 120_000 })
      return page
    } catch (error) {
      await page.close()
      if (attempt === 60) throw error
      await pause(1)
    }
  }
}

async function takePart(client, dies) {
  const context = await browser.newContext({ acceptDownloads: true })
  let page = await open(context)
  await page.locator('#live-token').fill(tokens[client])
  const files = ['train.npz', 'validation.npz', 'test.npz', 'about.json'].map((name) => join(run, 'data', client, name))
  await page.locator('#live-files').setInputFiles(files.filter(existsSync))
  await page.locator('#join').click()
  if (dies) {
    await page.waitForFunction(
      () => [...document.querySelectorAll('#live-facts tr')].some((row) => /counted/.test(row.textContent) && /[1-9]/.test(row.textContent)),
      null,
      { timeout: 0, polling: 100 },
    )
    await page.close()
    console.log(`closed ${client}`)
    page = await open(context)
  }
  await page.waitForFunction(() => document.querySelector('#live').dataset.state === 'done', null, { timeout: 0, polling: 500 })
  console.log(`client ${client}: ${await fact(page, 'counted')} counted, ${await fact(page, 'that were not')} not`)
  const [file] = await Promise.all([page.waitForEvent('download'), page.locator('#live-head').click()])
  mkdirSync(join(run, 'devices', client), { recursive: true })
  await file.saveAs(join(run, 'devices', client, 'head.bin'))
}

await Promise.all(clients.map((client, i) => takePart(client, i === 0)))
await browser.close()
