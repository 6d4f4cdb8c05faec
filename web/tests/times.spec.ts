/**
 * Not a test: measures sites on this machine, and prints Markdown.
 *
 *     make web-test WEB_TEST_ARGS=tests/times.spec.ts TFPFL_WEB_TIMES=site,other/site
 */
import { readdirSync, readFileSync } from 'node:fs'
import { resolve } from 'node:path'
import { gzipSync } from 'node:zlib'
import { expect, it } from 'vitest'
import { harness, launch } from './browser'
import { serve } from './server'

const SITES = (process.env.TFPFL_WEB_TIMES ?? '').split(',').filter(Boolean)

it.skipIf(SITES.length === 0)(
  'times and sizes',
  async () => {
    const lines = ['| network | threads | N | features | 49 head steps | round | memory |', '|---|---|---|---|---|---|---|']
    const sizes = ['| network | page | LiteRT.js | bundle | all | gzip |', '|---|---|---|---|---|---|']
    const browser = await launch()
    for (const site of SITES.map((folder) => resolve(import.meta.dirname, '../..', folder))) {
      const { network } = JSON.parse(readFileSync(`${site}/bundle/manifest.json`, 'utf8')) as { network?: string }
      for (const isolated of [false, true]) {
        const host = await serve(site, { isolated, folders: { '/harness/': harness() } })
        for (const n of [32, 128]) {
          const page = await browser.newPage() // a fresh memory for each
          await page.goto(`${host.url}harness/`)
          await page.waitForFunction(() => 'harness' in globalThis)
          const litert = readdirSync(site).find((name) => name.startsWith('litert-'))!
          const found = await page.evaluate(measure, { n, litert: `${host.url}${litert}/` })
          const [features, steps, round] = [found.features, found.steps, found.round].map((times) => best(times))
          lines.push(`| ${network ?? site} | ${found.threads} | ${n} | ${features} | ${steps} | ${round} | ${(found.memory / 2 ** 20).toFixed(0)} MB |`)
          await page.close()
        }
        await host.close()
      }
      const { files } = JSON.parse(readFileSync(`${site}/site.json`, 'utf8')) as { files: Record<string, { bytes: number }> }
      const groups = { page: 0, litert: 0, bundle: 0 }
      let zipped = 0
      for (const [name, { bytes }] of Object.entries(files)) {
        if (/_(compat|threaded)_/.test(name)) continue
        groups[name.startsWith('litert-') ? 'litert' : name.startsWith('bundle/') ? 'bundle' : 'page'] += bytes
        zipped += gzipSync(readFileSync(`${site}/${name}`)).length
      }
      const text = [groups.page, groups.litert, groups.bundle, groups.page + groups.litert + groups.bundle, zipped].map((b) => b.toLocaleString('en'))
      sizes.push(`| ${network ?? site} | ${text.join(' | ')} |`)
    }
    await browser.close()
    console.info([...lines, '', ...sizes].join('\n'))
    expect(lines.length).toBeGreaterThan(2)
  },
  1_200_000,
)

/** Milliseconds: the fastest, and the median. */
function best(times: number[]): string {
  const sorted = [...times].sort((a, b) => a - b)
  const text = (ms: number) => (ms < 10 ? ms.toFixed(1) : ms.toFixed(0))
  return `${text(sorted[0]!)} (${text(sorted[sorted.length >> 1]!)})`
}

/** In the browser. */
async function measure({ n, litert }: { n: number; litert: string }) {
  const { Device, Runtime } = globalThis.harness
  const get = async (path: string) => new Uint8Array(await (await fetch(path)).arrayBuffer())
  const theta = new Float32Array((await get('/bundle/theta.bin')).buffer)
  const runtime = await Runtime.start(litert, await get('/bundle/program_browser.tflite'))
  const device = await Device.open(runtime, theta)
  const pixels = runtime.shape('x', 'features').slice(1).reduce((a, b) => a * b, 1)
  const x = Float32Array.from({ length: n * pixels }, (_, i) => (Math.sin(i * 12.9898) * 43758.5453) % 1)
  const labels = Int32Array.from({ length: n }, (_, i) => i % 5)
  const head = { kernel: new Float32Array(device.features * 5), bias: new Float32Array(5) }
  const timed = async (work: () => Promise<unknown>) => {
    const times: number[] = []
    await work() // the first call prepares
    for (let i = 0; i < 15; i++) {
      const begin = performance.now()
      await work()
      times.push(performance.now() - begin)
    }
    return times
  }
  const phi = await device.phi(x)
  const settings = { steps: 49, beta: 0.001, rate: 0.01, safeguard: true }
  const features = await timed(() => device.phi(x))
  const steps = await timed(() => device.fitHead(phi, labels, head, 49, 0.001))
  const round = await timed(() => device.round(x, labels, head, settings))
  const { memory, threads } = device
  runtime.stop()
  return { features, steps, round, memory, threads }
}
