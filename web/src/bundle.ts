/** Loads the site's bundle: manifest, theta, head, program and the client's examples. */
import { floatsOf } from './bytes'
import { readHead, type Head } from './head'
import { decoded, type DrawingSettings, type Preprocessing } from './preprocess'
import { readSafetensors } from './safetensors'
import type { AudioSettings } from './sound'
import { fetchFile, listed, type Site } from './site'
import type { Progress } from './transfer'

/** The part of manifest.json that the page reads. */
export interface Manifest {
  algorithm: string | null
  client: number | null
  client_name?: string
  dataset?: string
  network?: string
  round?: number
  model: { example_shape: number[]; num_features: number; num_classes: number; num_backbone_weights: number }
  training: { tau: number; beta: number; rho: number; head_rate: number; safeguard: boolean; rounds: boolean }
  preprocessing: Partial<Preprocessing> | AudioSettings
  labels: { names: string[] }
  browser: {
    room: number
    drawing: DrawingSettings | null
    client: { examples: number; of: number; rounds: number[] } | null
  }
}

export interface Bundle {
  manifest: Manifest
  program: Uint8Array
  theta: Float32Array
  /** The sha256 of theta's bytes; it identifies the backbone. */
  thetaSha256: string
  head: Head
}

/** Examples of one client, and TensorFlow's results of a round on the first n of them. */
export interface ClientFile {
  examples: number
  /** The examples as the federation stores them. */
  raw: Uint8Array | Float32Array
  x: Float32Array
  labels: Int32Array
  rounds: Map<number, Reference>
  bytes: number
}

export interface Reference {
  dtheta: Float32Array
  kernel: Float32Array
  bias: Float32Array
  loss: number
  losses: Float32Array
}

const MANIFEST = 'bundle/manifest.json'
const THETA = 'bundle/theta.bin'
const PROGRAM = 'bundle/program_browser.tflite'
const CLIENT = 'bundle/client.safetensors'
/** What the program needs before it computes anything. */
export const NEEDED = [PROGRAM, THETA, 'bundle/head.bin']

/** The manifest, and the hash that identifies its backbone: what the page needs for drawing. */
export async function openManifest(site: Site): Promise<{ manifest: Manifest; thetaSha256: string }> {
  const manifest = JSON.parse(new TextDecoder().decode(await fetchFile(site, MANIFEST))) as Manifest
  return { manifest, thetaSha256: listed(site, THETA).sha256 }
}

export function openProgram(site: Site, progress?: Progress): Promise<Uint8Array> {
  return fetchFile(site, PROGRAM, progress)
}

export async function openBundle(site: Site, manifest: Manifest, program: Promise<Uint8Array>, progress?: Progress): Promise<Bundle> {
  const load = (name: string) => fetchFile(site, name, progress)
  const [theta, head, code] = await Promise.all([load(THETA), load('bundle/head.bin'), program])
  const thetaSha256 = listed(site, THETA).sha256
  return {
    manifest,
    program: code,
    theta: finite(floatsOf(theta)),
    thetaSha256,
    head: readHead(head, manifest.model.num_features, thetaSha256),
  }
}

function finite(theta: Float32Array): Float32Array {
  if (!theta.every(Number.isFinite)) throw new Error('theta holds NaN or infinity.')
  return theta
}

export async function openClient(site: Site, manifest: Manifest): Promise<ClientFile | null> {
  if (!manifest.browser.client) return null
  const bytes = await fetchFile(site, CLIENT)
  const stored = readSafetensors(bytes)
  const get = (name: string) => {
    const found = stored.get(name)
    if (!found) throw new Error(`client.safetensors has no ${name}`)
    return found.data
  }
  const raw = get('x') as Uint8Array | Float32Array
  const floats = (name: string) => get(name) as Float32Array
  const rounds = manifest.browser.client.rounds.map((n): [number, Reference] => [
    n,
    {
      dtheta: floats(`round_${n}.dtheta`),
      kernel: floats(`round_${n}.kernel`),
      bias: floats(`round_${n}.bias`),
      loss: floats(`round_${n}.loss`)[0]!,
      losses: floats(`round_${n}.losses`),
    },
  ])
  return {
    examples: get('labels').length,
    raw,
    x: raw instanceof Uint8Array ? decoded(raw, manifest.preprocessing as Partial<Preprocessing>) : raw,
    labels: get('labels') as Int32Array,
    rounds: new Map(rounds),
    bytes: bytes.length,
  }
}
