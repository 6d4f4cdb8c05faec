/**
 * Networks that phones run, in a browser: a round's gradient against GradientTape's.
 *
 * web/tests/fixtures.py writes small ones; benchmarks/device_networks.py writes those of its table, and reads the times
 * and the gradient that are written beside each.
 */
import { existsSync, readdirSync, readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import type { Browser } from 'playwright-core'
import core from '../node_modules/@litertjs/core/package.json' with { type: 'json' }
import { fixture, harness, launch, noBrowser } from './browser'
import { serve, type Host } from './server'

/** What is beside a network's program. */
interface About {
  /** The largest L2 norm of the difference, in units of the gradient's. */
  bound: number
  /** How often each signature is run for its time. */
  repeat: number
}

const names = existsSync(fixture('networks')) ? readdirSync(fixture('networks')) : []

describe.skipIf(noBrowser)('networks that phones run', () => {
  let browser: Browser
  let host: Host
  beforeAll(async () => {
    browser = await launch()
    const folders = { '/harness/': harness(), '/networks/': fixture('networks') }
    host = await serve(join(import.meta.dirname, '../dist'), { folders })
  })
  afterAll(async () => {
    await browser?.close()
    await host?.close()
  })

  it('are there', () => expect(names).not.toEqual([]))

  for (const name of names) {
    it(
      name,
      async () => {
        const folder = fixture('networks', name)
        const { bound, repeat } = JSON.parse(readFileSync(join(folder, 'about.json'), 'utf8')) as About
        const page = await browser.newPage() // a fresh memory for each
        await page.goto(`${host.url}harness/`)
        await page.waitForFunction(() => 'harness' in globalThis)
        const given = { address: `/networks/${encodeURIComponent(name)}/`, litert: `${host.url}litert-${core.version}/`, repeat }
        const { dtheta, difference, ...found } = await page.evaluate(run, given)
        await page.close()
        writeFileSync(join(folder, 'dtheta.bin'), Buffer.from(dtheta, 'base64'))
        writeFileSync(join(folder, 'found.json'), JSON.stringify({ ...found, runtime: `LiteRT.js ${core.version}` }))
        console.info(name, difference, found)
        expect(difference).toBeLessThan(bound)
      },
      1_200_000,
    )
  }
})

/** In the browser: a round's gradient, how far it is from the one expected in L2, times and memory. */
async function run({ address, litert, repeat }: { address: string; litert: string; repeat: number }) {
  const { Runtime, readSafetensors } = globalThis.harness
  const get = async (path: string) => new Uint8Array(await (await fetch(path)).arrayBuffer())
  const file = readSafetensors(await get(`${address}round.safetensors`))
  const expected = file.get('dtheta')!.data
  const runtime = await Runtime.start(litert, await get(`${address}fixed.tflite`))
  await runtime.keep('theta', file.get('theta')!.data as Float32Array)
  const inputs = (signature: string) => {
    const wanted = Object.keys(runtime.signatures[signature]!).filter((input) => input !== 'theta')
    return Object.fromEntries(wanted.map((input) => [input, file.get(input)!.data as Float32Array | Int32Array]))
  }
  const fastest = async (signature: string) => {
    let best = Infinity
    for (let i = 0; i < repeat; i++) best = Math.min(best, (await runtime.run(signature, inputs(signature))).milliseconds)
    return best
  }

  const { outputs, memory } = await runtime.run('round', inputs('round'))
  const dtheta = outputs.dtheta as Float32Array
  let [off, whole] = [0, 0]
  dtheta.forEach((value, i) => {
    off += (value - expected[i]!) ** 2
    whole += expected[i]! ** 2
  })
  const [round, step] = [await fastest('round'), await fastest('joint_gradient')]
  runtime.stop()
  const bytes = new Uint8Array(dtheta.buffer, dtheta.byteOffset, dtheta.byteLength)
  let text = ''
  for (let i = 0; i < bytes.length; i += 32_768) text += String.fromCharCode(...bytes.subarray(i, i + 32_768))
  return { dtheta: btoa(text), difference: Math.sqrt(off / whole), round, step, memory }
}
