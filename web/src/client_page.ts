/** The part of the page that is a client of a PFLEGO round. */
import type { Bundle, ClientFile } from './bundle'
import type { Device, RoundResult } from './device'
import { byId, bytesText, download, make, messageOf, millisecondsText } from './elements'
import { thumbnail } from './pad'
import { encodeGradient } from './payload'

const SHOWN = 24

export class ClientPage {
  private readonly size = byId('client-size', HTMLSelectElement)
  private readonly status = byId('round-status', HTMLElement)
  private readonly runButton = byId('round', HTMLButtonElement)
  private last: RoundResult | null = null

  /** Opens this part when it comes near the screen. */
  static async open(device: Device, bundle: Promise<Bundle>, client: () => Promise<ClientFile | null>): Promise<void> {
    try {
      new ClientPage(device, await bundle, await client())
    } catch (error) {
      const status = byId('round-status', HTMLElement)
      status.textContent = messageOf(error)
      status.classList.add('error')
    }
  }

  private constructor(
    private readonly device: Device,
    private readonly bundle: Bundle,
    private readonly client: ClientFile | null,
  ) {
    const { manifest } = bundle
    const about = byId('client-about', HTMLElement)
    const sizes = [...(client?.rounds.keys() ?? [])]
    if (!client || sizes.length === 0) {
      about.textContent = client
        ? `This model comes from ${manifest.algorithm ?? 'a training'} as it is, of which the program computes no rounds.`
        : 'This bundle has no examples of a client.'
      for (const element of [this.runButton, this.size.parentElement!]) element.hidden = true
      return
    }
    const { of } = manifest.browser.client!
    const { tau, beta } = manifest.training
    const name = manifest.client_name && manifest.client_name !== String(manifest.client) ? ` (${manifest.client_name})` : ''
    about.textContent =
      `Here are the drawings of one of the others, client ${manifest.client ?? ''}${name} of ${manifest.dataset ?? 'a federation'}: ` +
      `${client.examples} of its ${of}, in ${manifest.model.num_classes} classes. In a round, its device first improves its own layer. Then it ` +
      'computes in which direction the shared part should change, and would send that direction alone.'
    byId('round-terms', HTMLElement).textContent = `${tau - 1} steps on the head at beta ${beta}, then one joint gradient for the backbone (tau ${tau}).`
    for (const n of sizes) {
      const how = n <= device.batch ? 'one call of “round”' : `chunks of ${device.batch}`
      this.size.append(make('option', { value: String(n) }, `${n}, ${how}`))
    }
    this.showExamples()
    this.runButton.onclick = () => void this.run()
    this.runButton.disabled = false
    for (const kind of ['float32', 'int8'] as const) {
      byId(`save-${kind}`, HTMLButtonElement).onclick = () => {
        if (this.last) download(`update.${kind}`, encodeGradient(this.last.dtheta, kind))
      }
    }
  }

  private showExamples(): void {
    const { raw, labels } = this.client!
    const shape = this.bundle.manifest.model.example_shape
    if (!(raw instanceof Uint8Array) || shape[0] !== shape[1] || (shape[2] ?? 1) !== 1) return
    const pixels = shape[0]!
    const most = raw.reduce((a, b) => Math.max(a, b), 1)
    const strip = byId('client-examples', HTMLElement)
    for (let i = 0; i < Math.min(SHOWN, labels.length); i++) {
      const canvas = make('canvas', { role: 'img' })
      canvas.ariaLabel = `Example of “${this.bundle.manifest.labels.names[labels[i]!]}”`
      thumbnail(canvas, raw.subarray(i * pixels * pixels, (i + 1) * pixels * pixels), pixels, most)
      strip.append(canvas)
    }
  }

  private async run(): Promise<void> {
    this.runButton.disabled = true
    this.status.textContent = 'Computing …'
    this.status.classList.remove('error')
    try {
      await this.round(Number(this.size.value))
    } catch (error) {
      this.status.textContent = messageOf(error)
      this.status.classList.add('error')
    } finally {
      this.runButton.disabled = false
    }
  }

  private async round(n: number): Promise<void> {
    const { client, bundle, device } = this
    const { x, labels, raw, rounds } = client!
    const { tau, beta, head_rate: rate, safeguard } = bundle.manifest.training
    const used = { x: x.subarray(0, (x.length / labels.length) * n), labels: labels.subarray(0, n) }
    const begin = performance.now()
    const result = await device.round(used.x, used.labels, bundle.head, { steps: tau - 1, beta, rate, safeguard })
    const milliseconds = performance.now() - begin
    const { memory } = device
    this.last = result
    const { losses } = await device.stepByStep(await device.phi(used.x), used.labels, bundle.head, tau - 1, beta)

    this.status.textContent = `A round on ${n} examples in ${millisecondsText(milliseconds)}: loss ${losses[0]!.toFixed(4)} before, ${result.loss.toFixed(4)} at the joint gradient.`
    byId('loss-text', HTMLElement).textContent = `Loss ${losses[0]!.toFixed(4)} before the first of ${tau - 1} steps, ${losses.at(-1)!.toFixed(4)} after the last.`
    chart(byId('loss-chart', SVGSVGElement), losses)
    rows('cost', [
      ...Object.entries(result.parts).map(([part, time]): [string, string] => [part, millisecondsText(time)]),
      ['all, with what the page does', millisecondsText(milliseconds)],
      ['WebAssembly memory', `${(memory / 2 ** 20).toFixed(0)} MB, the most so far`],
      ['threads', String(device.threads)],
    ])
    rows('leaves', [
      ['gradient of θ, float32', bytesText(encodeGradient(result.dtheta, 'float32').length)],
      ['or as int8', bytesText(encodeGradient(result.dtheta, 'int8').length)],
      ['number of examples, N', String(n)],
      ['training loss, for logs', result.loss.toFixed(4)],
    ])
    const own = n * (raw.byteLength / labels.length)
    rows('stays', [
      [`${n} examples`, bytesText(own)],
      [`${n} labels`, bytesText(4 * n)],
      ['the head', `${(result.head.kernel.length + result.head.bias.length).toLocaleString('en')} numbers`],
    ])
    this.showBytes(n, own, encodeGradient(result.dtheta, 'float32').length, encodeGradient(result.dtheta, 'int8').length)
    const reference = rounds.get(n)!
    rows('difference', [
      ['gradient of θ', relative(result.dtheta, reference.dtheta)],
      ['head, kernel', relative(result.head.kernel, reference.kernel)],
      ['head, bias', relative(result.head.bias, reference.bias)],
      ['loss', relative([result.loss], [reference.loss])],
      ['loss by step', relative(losses, reference.losses)],
    ])
    byId('round-result', HTMLElement).hidden = false
  }

  /** What leaves and what stays, as bars of one scale. */
  private showBytes(n: number, examples: number, float32: number, int8: number): void {
    const largest = Math.max(examples, float32)
    const bar = (kind: string, name: string, bytes: number) => {
      const found = make('div', { className: `bytes ${kind}` }, make('span', {}, name), make('span', { className: 'track' }, make('i')), make('span', {}, bytesText(bytes)))
      found.style.setProperty('--part', String(bytes / largest))
      return found
    }
    byId('byte-bars', HTMLElement).replaceChildren(
      bar('stays', `stays: ${n} drawings`, examples),
      bar('leaves', 'leaves: the direction', float32),
      bar('leaves', 'or rounded to int8', int8),
    )
    const times = (bytes: number) => (bytes / examples).toFixed(bytes < 10 * examples ? 1 : 0)
    byId('byte-text', HTMLElement).textContent =
      (float32 > examples
        ? `The direction is ${times(float32)} times as large as the drawings, rounded still ${times(int8)} times. It is sent all the same, because `
        : 'The direction is sent, because ') +
      'then nobody else ever holds the drawings: the server adds up the directions of many devices, and needs no drawing for that.'
  }
}

/** The largest difference in units of the largest number. */
export function relativeDifference(found: ArrayLike<number>, expected: ArrayLike<number>): number {
  if (found.length !== expected.length) return Infinity
  let [difference, largest] = [0, 0]
  for (let i = 0; i < expected.length; i++) {
    difference = Math.max(difference, Math.abs(found[i]! - expected[i]!))
    largest = Math.max(largest, Math.abs(expected[i]!))
  }
  return difference / Math.max(largest, 1e-6)
}

function relative(found: ArrayLike<number>, expected: ArrayLike<number>): string {
  return relativeDifference(found, expected).toExponential(1)
}

function rows(id: string, pairs: [string, string][]): void {
  byId(id, HTMLElement).replaceChildren(
    ...pairs.map(([name, value]) => make('tr', {}, make('th', { scope: 'row' }, name), make('td', {}, value))),
  )
}

function chart(svg: SVGSVGElement, losses: number[]): void {
  const [left, right, top, bottom] = [44, 312, 10, 136]
  const [low, high] = [Math.min(...losses), Math.max(...losses)]
  // As many digits as tell the ends of the axis apart.
  const digits = Math.min(8, Math.max(2, Math.ceil(1 - Math.log10(high - low || 1))))
  const x = (i: number) => left + ((right - left) * i) / Math.max(1, losses.length - 1)
  const y = (loss: number) => bottom - ((bottom - top) * (loss - low)) / (high - low || 1)
  const element = (name: string, attributes: Record<string, string | number>, text = '') => {
    const found = document.createElementNS('http://www.w3.org/2000/svg', name)
    for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, String(value))
    found.textContent = text
    return found
  }
  svg.setAttribute('aria-label', `Loss by step: from ${losses[0]!.toFixed(3)} to ${losses.at(-1)!.toFixed(3)}`)
  svg.replaceChildren(
    element('line', { x1: left, y1: bottom, x2: right, y2: bottom }),
    element('line', { x1: left, y1: top, x2: left, y2: bottom }),
    element('polyline', { points: losses.map((loss, i) => `${x(i).toFixed(1)},${y(loss).toFixed(1)}`).join(' ') }),
    element('text', { x: left - 6, y: top + 4, 'text-anchor': 'end' }, high.toFixed(digits)),
    element('text', { x: left - 6, y: bottom, 'text-anchor': 'end' }, low.toFixed(digits)),
    element('text', { x: left, y: bottom + 16 }, '0'),
    element('text', { x: right, y: bottom + 16, 'text-anchor': 'end' }, `${losses.length - 1} steps`),
  )
}
