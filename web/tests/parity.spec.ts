/** The exported program in a browser against TensorFlow Federated: every signature, to 1e-5 of the largest number. */
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import type { Browser, Page } from 'playwright-core'
import core from '../node_modules/@litertjs/core/package.json' with { type: 'json' }
import { fixture, harness, launch, noBrowser } from './browser'
import { serve, type Host } from './server'

const BOUND = 1e-5

describe.skipIf(noBrowser)('parity with the TFF engine', () => {
  let browser: Browser
  beforeAll(async () => {
    browser = await launch()
  })
  afterAll(() => browser?.close())

  for (const network of ['mlp', 'cnn']) {
    for (const isolated of [false, true]) {
      describe(`${network}, ${isolated ? 'threads' : 'one thread'}`, () => {
        let host: Host
        let page: Page
        beforeAll(async () => {
          const folders = { '/harness/': harness(), '/fixtures/': fixture() }
          host = await serve(fixture(`site-${network}`), { isolated, folders })
          page = await browser.newPage()
          await page.goto(`${host.url}harness/`)
          await page.waitForFunction(() => 'harness' in globalThis)
        })
        afterAll(async () => {
          await page?.close()
          await host?.close()
        })

        it('features, personalize and round', async () => {
          const found = await page.evaluate(compare, { network, litert: `${host.url}${litert()}/` })
          expect(found.threads > 1).toBe(isolated)
          expect(found.calls).toMatchObject({ features: 1, features_one: 1, personalize: 1, round: 1 })
          for (const [name, difference] of Object.entries(found.differences)) {
            expect(difference, `${name} of ${network}`).toBeLessThan(BOUND)
          }
          expect(Object.keys(found.differences)).toHaveLength(13)
          console.info(network, isolated ? 'threads' : 'one thread', found.differences)
        })
      })
    }
  }

  it('LiteRT.js refuses open shapes: every signature of the dynamic program', async () => {
    const host = await serve(fixture('site-mlp'), { folders: { '/harness/': harness(), '/fixtures/': fixture() } })
    const page = await browser.newPage()
    await page.goto(`${host.url}harness/`)
    await page.waitForFunction(() => 'harness' in globalThis)
    const refusals = await page.evaluate(runDynamic, `${host.url}${litert()}/`)
    expect(Object.keys(refusals).sort()).toEqual(['features', 'head_step', 'joint_gradient', 'personalize', 'predict', 'round'])
    for (const [name, why] of Object.entries(refusals)) expect(why, name).toMatch(/does not match expected ranked tensor type \w+\[.*-1/)
    await page.close()
    await host.close()
  })
})

function litert(): string {
  return `litert-${core.version}`
}

/** In the browser: {output: difference}. */
async function compare({ network, litert }: { network: string; litert: string }) {
  const { Device, Runtime, readSafetensors, relativeDifference, resized, CLOSED } = globalThis.harness
  const get = async (path: string) => new Uint8Array(await (await fetch(path)).arrayBuffer())
  const file = readSafetensors(await get(`/fixtures/${network}.safetensors`))
  const [f, ints] = [(name: string) => file.get(name)!.data as Float32Array, (name: string) => file.get(name)!.data as Int32Array]
  const theta = f('theta')
  const runtime = await Runtime.start(litert, await get('/bundle/program_browser.tflite'))
  const calls: Record<string, number> = {}
  const run = runtime.run.bind(runtime)
  runtime.run = (signature, inputs) => {
    calls[signature] = (calls[signature] ?? 0) + 1
    return run(signature, inputs)
  }
  const device = await Device.open(runtime, theta)
  const head = { kernel: f('kernel'), bias: f('bias') }
  const [labels, beta, rate] = [ints('labels'), f('beta')[0]!, f('rate')[0]!]
  const n = labels.length
  const steps = 49

  const x = f('x')
  const phi = await device.phi(x)
  const one = await device.phi(x.slice(0, x.length / n))
  const fitted = await device.fitHead(f('phi'), labels, head, steps, beta)
  const stepped = await device.stepByStep(f('phi'), labels, head, steps, beta)
  const round = await device.round(x, labels, head, { steps, beta, rate, safeguard: true })
  const counted = { ...calls }
  // The same examples twice have the same mean: 2 n examples go through chunks, and must give the same round.
  const twice = { x: new Float32Array(2 * x.length), labels: new Int32Array(2 * n) }
  twice.x.set(x)
  twice.x.set(x, x.length)
  twice.labels.set(labels)
  twice.labels.set(labels, n)
  const chunks = await device.round(twice.x, twice.labels, head, { steps, beta, rate, safeguard: true })
  const theta1 = theta.map((value, i) => value - rate * round.dtheta[i]!)
  const many = await device.stepByStep(concat(f('phi'), 6), concat(labels, 6) as Int32Array, head, steps, beta)
  function concat<T extends Float32Array | Int32Array>(values: T, times: number): T {
    const all = new (values.constructor as new (n: number) => T)(values.length * times)
    for (let i = 0; i < times; i++) all.set(values, i * values.length)
    return all
  }
  const threads = runtime.threads
  runtime.stop()
  const wide = resized(head, device.room, CLOSED)
  if (wide.bias.length <= head.bias.length) throw new Error('the head was not widened: nothing is tested')
  return {
    threads,
    calls: counted,
    differences: {
      features: relativeDifference(phi, f('phi')),
      'features of one': relativeDifference(one, f('phi').slice(0, device.features)),
      'personalize, kernel': relativeDifference(fitted.head.kernel, f('fitted.kernel')),
      'personalize, bias': relativeDifference(fitted.head.bias, f('fitted.bias')),
      'step by step, kernel': relativeDifference(stepped.head.kernel, f('fitted.kernel')),
      'steps in chunks, kernel': relativeDifference(many.head.kernel, f('fitted.kernel')),
      'round, gradient of theta': relativeDifference(round.dtheta, f('dtheta')),
      'round, kernel': relativeDifference(round.head.kernel, f('round.kernel')),
      'round, bias': relativeDifference(round.head.bias, f('round.bias')),
      'round, theta of the server': relativeDifference(theta1, f('round.theta')),
      'round in chunks, gradient of theta': relativeDifference(chunks.dtheta, f('dtheta')),
      'round in chunks, kernel': relativeDifference(chunks.head.kernel, f('round.kernel')),
      'round in chunks, loss': Math.abs(chunks.loss - round.loss) / round.loss,
    },
  }
}

/** In the browser: {signature: why it was refused}, with 3 for every open dimension. */
async function runDynamic(folder: string) {
  const { loadLiteRt, loadAndCompile, Tensor } = globalThis.harness.litert
  await loadLiteRt(folder)
  const model = await loadAndCompile('/fixtures/mlp/program.tflite', { accelerator: 'wasm' })
  const refusals: Record<string, string> = {}
  for (const [name, signature] of Object.entries(model.signatures)) {
    const tensors = signature.getInputDetails().map(({ name, dtype, shape }) => {
      const closed = [...shape].map((n) => (n < 0 ? 3 : n))
      const size = closed.reduce((a, b) => a * b, 1)
      return [name, new Tensor(dtype === 'int32' ? new Int32Array(size) : new Float32Array(size), closed)] as const
    })
    refusals[name] = await model.run(name, Object.fromEntries(tensors)).then(
      () => 'it ran',
      (error: Error) => error.message,
    )
  }
  return refusals
}
