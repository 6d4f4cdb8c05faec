/** Loads the site's bundle, starts the program, and then the parts of the page. */
import { openBundle, openClient, type Bundle } from './bundle'
import { ClientPage } from './client_page'
import { Device } from './device'
import { byId, bytesText, make, messageOf } from './elements'
import { FederationPage } from './federation_page'
import { LearnPage } from './learn_page'
import { LivePage } from './live_page'
import { cacheName, keepForOffline } from './offline'
import { Runtime } from './runtime'
import { openSite, type Site } from './site'

declare const __LITERT_FOLDER__: string
declare const __LITERT_VERSION__: string

const status = byId('status', HTMLElement)

async function main(): Promise<void> {
  const site = await openSite()
  const bundle = await openBundle(site)
  const client = await openClient(site, bundle.manifest)
  const litert = Object.entries(site.files).filter(([name]) => name.startsWith(`${__LITERT_FOLDER__}/`))
  const hashes = Object.fromEntries(litert.map(([name, { sha256 }]) => [name.slice(__LITERT_FOLDER__.length + 1), sha256]))
  const folder = new URL(`${__LITERT_FOLDER__}/`, document.baseURI).href
  const start = (program: Uint8Array) => Runtime.start(folder, program, { hashes, cache: cacheName(site) })
  const runtime = await start(bundle.program)
  const device = await Device.open(runtime, bundle.theta)
  const { drawing } = bundle.manifest.browser
  for (const id of ['learn', 'client', 'about']) byId(id, HTMLElement).hidden = false
  byId('no-drawing', HTMLElement).hidden = drawing !== null
  byId('learner', HTMLElement).hidden = drawing === null
  if (drawing) await LearnPage.open(device, bundle, client, drawing)
  new ClientPage(device, bundle, client)
  await LivePage.open(site, bundle.manifest, client, start)
  FederationPage.open(site, bundle, start)
  showFacts(site, bundle, runtime, 'no')
  status.textContent = `Ready: ${bundle.manifest.network ?? 'a backbone'}${trainedOn(bundle)}.`
  document.documentElement.dataset.ready = 'yes'

  const offline = await keepForOffline(site, runtime.files).catch((error: unknown) => `no: ${messageOf(error)}`)
  const text = offline === true ? 'yes: kept in this browser' : offline || 'no: that needs https or localhost'
  showFacts(site, bundle, runtime, text)
  document.documentElement.dataset.offline = String(offline === true)
}

function trainedOn({ manifest }: Bundle): string {
  if (!manifest.dataset) return ''
  if (manifest.round === undefined) return ` for ${manifest.dataset}`
  return `, trained on ${manifest.dataset} in ${manifest.round} rounds of ${manifest.algorithm}`
}

function showFacts(site: Site, bundle: Bundle, runtime: Runtime, offline: string): void {
  const { model, training } = bundle.manifest
  const bytes = (wanted: (file: string) => boolean) =>
    Object.entries(site.files).reduce((sum, [file, { bytes }]) => sum + (wanted(file) ? bytes : 0), 0)
  const litert = bytes((file) => runtime.files.some((used) => file.endsWith(`/${used}`)))
  const shape = model.example_shape.join(' × ')
  const facts: [string, string][] = [
    ['backbone', `${bundle.manifest.network ?? 'a Keras model'}${trainedOn(bundle)}`],
    ['its weights', `${model.num_backbone_weights.toLocaleString('en')}, sha256 ${bundle.thetaSha256.slice(0, 16)}…`],
    ['input, features', `${shape}, ${model.num_features}`],
    ['program', `${bytesText(bundle.program.length)}, builtin operations only; room for ${bundle.manifest.browser.room} classes`],
    ['in a round', `tau ${training.tau}, beta ${training.beta}, rho ${training.rho}`],
    ['runtime', `LiteRT.js ${__LITERT_VERSION__}, WebAssembly, ${runtime.threads} ${runtime.threads === 1 ? 'thread' : 'threads'}`],
    ['loaded', `${bytesText(bytes((file) => !file.startsWith('litert-')) + litert)} (LiteRT.js ${bytesText(litert)}), before compression`],
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
  document.documentElement.dataset.ready = 'failed'
})
