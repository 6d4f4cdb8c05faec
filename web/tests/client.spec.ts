/** The page as a client of a round. */
import { readFileSync } from 'node:fs'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import type { Browser } from 'playwright-core'
import { readSafetensors } from '../src/safetensors'
import { sha256 } from '../src/sha256'
import { fixture, launch, noBrowser } from './browser'
import { openPage } from './page'
import { serve } from './server'

describe.skipIf(noBrowser)('Be a client', () => {
  let browser: Browser
  beforeAll(async () => {
    browser = await launch()
  })
  afterAll(() => browser?.close())

  for (const [network, sizes] of Object.entries({ mlp: [32, 102], cnn: [32, 100] })) {
    it(`runs a round of the ${network}, and says what it cost and what would leave`, async () => {
      const host = await serve(fixture(`site-${network}`))
      const page = await openPage(await browser.newContext(), host.url)
      const stored = readSafetensors(new Uint8Array(readFileSync(fixture(network, 'client.safetensors'))))
      const numbers = (name: string) => stored.get(name)!.data as Float32Array
      const table = async (id: string) => {
        const rows = await page.locator(`#${id} tr`).evaluateAll((all) => all.map((row) => [...row.children].map((cell) => cell.textContent!)))
        return Object.fromEntries(rows) as Record<string, string>
      }
      expect(await page.locator('#round-result').isVisible()).toBe(false) // nothing is shown of a round that was not run
      expect(await page.locator('#save-float32').isVisible()).toBe(false)
      for (const n of sizes) {
        await page.locator('#client-size').selectOption(String(n))
        await page.locator('#round').click()
        await expect.poll(() => page.locator('#round-status').textContent()).toMatch(new RegExp(`A round on ${n} examples`))

        const differences = await table('difference')
        expect(Object.keys(differences)).toEqual(['gradient of θ', 'head, kernel', 'head, bias', 'loss', 'loss by step'])
        for (const [name, text] of Object.entries(differences)) expect(parseFloat(text), `${name}: ${text}`).toBeLessThan(1e-5)
        const losses = numbers(`round_${n}.losses`)
        const status = (await page.locator('#round-status').textContent())!
        const [before, joint] = /loss (\S+) before, (\S+) at the joint gradient/.exec(status)!.slice(1).map(Number) as [number, number]
        const near = (shown: number, exact: number) => expect(Math.abs(shown - exact)).toBeLessThan(1e-5 * Math.abs(exact) + 1e-4) // four digits are shown
        near(before, losses[0]!)
        near(joint, numbers(`round_${n}.loss`)[0]!)
        expect((await page.locator('#loss-chart polyline').getAttribute('points'))!.split(' ')).toHaveLength(50)
        const [high, low] = (await page.locator('#loss-chart text').allTextContents()).slice(0, 2).map(Number) as [number, number]
        expect(high).toBeGreaterThan(low)
        const range = Math.max(...losses) - Math.min(...losses)
        expect(Math.abs(high - low - range)).toBeLessThan(0.2 * range)

        const p = numbers(`round_${n}.dtheta`).length
        const leaves = await table('leaves')
        expect(leaves).toMatchObject({
          'gradient of θ, float32': `${(16 + 4 * p).toLocaleString('en')} bytes`,
          'or as int8': `${(16 + p + 4 * Math.ceil(p / 1024)).toLocaleString('en')} bytes`,
          'number of examples, N': String(n),
        })
        const example = stored.get('x')!.data.byteLength / stored.get('labels')!.data.length
        expect((await table('stays'))[`${n} examples`]).toBe(`${(n * example).toLocaleString('en')} bytes`)
        const cost = await table('cost')
        expect(Object.keys(cost).slice(0, -3)).toEqual(n === 32 ? ['round'] : ['features', 'steps on the head', 'joint gradient'])
        expect(parseInt(cost['WebAssembly memory']!)).toBeGreaterThan(16)

        const [file] = await Promise.all([page.waitForEvent('download'), page.locator('#save-float32').click()])
        const payload = readFileSync(await file.path())
        expect(payload.length).toBe(16 + 4 * p)
        const sent = new Float32Array(new Uint8Array(payload).slice(16).buffer)
        const expected = numbers(`round_${n}.dtheta`)
        const largest = Math.max(...expected.map(Math.abs))
        expect(Math.max(...expected.map((value, i) => Math.abs(value - sent[i]!))) / largest).toBeLessThan(1e-5)
      }
      await page.close()
      await host.close()
    })
  }

  it('says so where the result is not TensorFlow’s', async () => {
    const site = fixture('site-mlp')
    const file = readFileSync(`${site}/bundle/client.safetensors`)
    const header = Number(file.readBigUInt64LE())
    const entries = JSON.parse(file.subarray(8, 8 + header).toString()) as Record<string, { data_offsets: [number, number] }>
    file.writeFloatLE(7, 8 + header + entries['round_32.dtheta']!.data_offsets[0])
    const whole = sha256(new Uint8Array(readFileSync(`${site}/bundle/client.safetensors`)))
    const renamed = (bytes: Buffer) => Buffer.from(bytes.toString().replace(whole, sha256(new Uint8Array(file))))
    const host = await serve(site, { damage: { 'bundle/client.safetensors.gz': () => file, 'site.json': renamed } })
    const page = await openPage(await browser.newContext(), host.url)
    await page.locator('#round').click()
    await expect.poll(() => page.locator('#round-status').textContent()).toMatch(/A round on/)
    expect(parseFloat((await page.locator('#difference td').first().textContent())!)).toBeGreaterThan(0.9)
    expect(parseFloat((await page.locator('#difference td').nth(1).textContent())!)).toBeLessThan(1e-5)
    await page.close()
    await host.close()
  })
})
