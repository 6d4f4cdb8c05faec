/** Opens the page: the pad at once, and behind it what the others learned, the program, and then the other parts. */
import { NEEDED, openBundle, openClient, openManifest, openProgram, type Bundle, type Manifest } from './bundle'
import { Device } from './device'
import { byId, bytesText, make, messageOf } from './elements'
import { DrawingSource } from './drawing_source'
import { openFederation, showFederation } from './federation_source'
import { LateDevice } from './late_device'
import { LearnPage } from './learn_page'
import { Loading } from './loading'
import { whenNear } from './near'
import { cacheName, keepForOffline } from './offline'
import { once } from './once'
import { part } from './part'
import { Runtime } from './runtime'
import { openSite, type Site } from './site'
import { audioSettings } from './sound'
import { SoundSource } from './sound_source'
import { showKind, type Listener } from './source'
import { travels } from './transfer'

declare const __LITERT_FOLDER__: string
declare const __LITERT_VERSION__: string

const status = byId('status', HTMLElement)

async function main(): Promise<void> {
  const site = await openSite()
  const { manifest, thetaSha256 } = await openManifest(site)
  const { drawing, room } = manifest.browser
  for (const id of ['learn', 'client', 'about']) byId(id, HTMLElement).hidden = false
  for (const id of ['live', 'live-link']) byId(id, HTMLElement).hidden = !site.live // before the pad, which must not move later
  showFederation(site)
  const audio = drawing ? null : audioSettings(manifest.preprocessing, manifest.model.example_shape)
  showKind(audio ? 'voice' : 'drawing')
  byId('no-drawing', HTMLElement).hidden = (drawing ?? audio) !== null
  byId('learner', HTMLElement).hidden = (drawing ?? audio) === null

  const loading = new Loading(site, NEEDED, `${__LITERT_FOLDER__}/litert_wasm_internal.wasm`, audio ? 'record' : 'draw')
  const litert = Object.entries(site.files).filter(([name]) => name.startsWith(`${__LITERT_FOLDER__}/`))
  const files = Object.fromEntries(litert.map(([name, file]) => [name.slice(__LITERT_FOLDER__.length + 1), file]))
  const folder = new URL(`${__LITERT_FOLDER__}/`, document.baseURI).href
  const start = (program: Uint8Array | Promise<Uint8Array>, progress?: (bytes: number) => void) =>
    Runtime.start(folder, program, { files, cache: cacheName(site) }, globalThis.crossOriginIsolated, progress)
  const client = once(() => openClient(site, manifest))

  const program = openProgram(site, loading.came)
  const bundle = openBundle(site, manifest, program, loading.came)
  let begin!: () => void
  const drawable = new Promise<void>((done) => (begin = done))
  const runtime = drawable.then(() => start(program, loading.came)) // what it needs of the processor, the pad needs first
  const opened = Promise.all([bundle, runtime]).then(([{ theta }, runtime]) => Device.open(runtime, theta))
  // `opened` is awaited below; what fails first ends the progress, or else it would cover the error.
  for (const promise of [program, bundle, runtime, opened]) promise.catch(loading.done)
  const late = new LateDevice(manifest.model.num_features, room, opened)
  const source =
    (drawing && ((listener: Listener) => new DrawingSource(drawing, manifest, client, listener))) ??
    (audio && ((listener: Listener) => new SoundSource(audio, manifest, listener)))
  const page = source && (await LearnPage.open({ manifest, thetaSha256, device: late, bundle, client }, source))
  document.documentElement.dataset.pad = 'yes'
  setTimeout(begin)

  const device = await opened
  await page?.started()
  loading.done()
  // The other parts come after what the first drawing and the first guess need.
  whenNear(byId('client', HTMLElement), async () => {
    const found = await part('round-status', () => import('./client_page'))
    await found?.ClientPage.open(device, bundle, client)
  })
  const view = await openFederation(site, await bundle, start, () => byId('live-token', HTMLInputElement).focus())
  const live = site.live && (await part('live-status', () => import('./live_page')))
  if (live) await live.LivePage.open(manifest, client, start, view ?? { self: () => {} })
  showFacts(site, await bundle, await runtime, 'no')
  const ready = () => {
    status.textContent = navigator.onLine ? `Ready${trainedBy(manifest)}.` : 'Ready, without a network: all of this works in your browser.'
  }
  ready()
  for (const change of ['online', 'offline']) addEventListener(change, ready)
  document.documentElement.dataset.ready = 'yes'

  const offline = await keepForOffline(site, (await runtime).files).catch((error: unknown) => `no: ${messageOf(error)}`)
  const text = offline === true ? 'yes: kept in this browser' : offline || 'no: that needs https or localhost'
  showFacts(site, await bundle, await runtime, text)
  document.documentElement.dataset.offline = String(offline === true)
}

/** What the visitor starts from, in words without terms. */
function trainedBy({ dataset, round }: Manifest): string {
  if (!dataset || round === undefined) return ''
  return `: the others practised on ${dataset} for ${round} rounds`
}

function trainedOn({ manifest }: Bundle): string {
  if (!manifest.dataset) return ''
  if (manifest.round === undefined) return ` for ${manifest.dataset}`
  return `, trained on ${manifest.dataset} in ${manifest.round} rounds of ${manifest.algorithm}`
}

function showFacts(site: Site, bundle: Bundle, runtime: Runtime, offline: string): void {
  const { model, training } = bundle.manifest
  const bytes = (wanted: (file: string) => boolean) =>
    Object.entries(site.files).reduce((sum, [name, file]) => sum + (wanted(name) ? travels(file) : 0), 0)
  const litert = bytes((name) => runtime.files.some((used) => name.endsWith(`/${used}`)))
  const shape = model.example_shape.join(' × ')
  const facts: [string, string][] = [
    ['backbone', `${bundle.manifest.network ?? 'a Keras model'}${trainedOn(bundle)}`],
    ['its weights', `${model.num_backbone_weights.toLocaleString('en')}, sha256 ${bundle.thetaSha256.slice(0, 16)}…`],
    ['input, features', `${shape}, ${model.num_features}`],
    ['program', `${bytesText(bundle.program.length)}, builtin operations only; room for ${bundle.manifest.browser.room} classes`],
    ['in a round', `tau ${training.tau}, beta ${training.beta}, rho ${training.rho}`],
    ['runtime', `LiteRT.js ${__LITERT_VERSION__}, WebAssembly, ${runtime.threads} ${runtime.threads === 1 ? 'thread' : 'threads'}`],
    ['loaded', `${bytesText(bytes((name) => !name.startsWith('litert-')) + litert)} (LiteRT.js ${bytesText(litert)})`],
    ['works offline', offline],
    ['made by', site.made_by],
  ]
  byId('facts', HTMLElement).replaceChildren(
    ...facts.map(([name, value]) => make('tr', {}, make('th', { scope: 'row' }, name), make('td', {}, value))),
  )
}

main().catch((error: unknown) => {
  status.textContent = messageOf(error)
  status.classList.add('error')
  for (const id of ['learn', 'client', 'federation', 'live', 'loading']) byId(id, HTMLElement).hidden = true
  document.documentElement.dataset.ready = 'failed'
})
