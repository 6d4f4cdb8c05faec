/** The members of the federation that the page plays: members.json and members.safetensors (tflite_export/convert/members.py). */
import type { Bundle } from './bundle'
import type { Head } from './head'
import { decoded, type Preprocessing } from './preprocess'
import { readSafetensors } from './safetensors'
import type { ServerSettings } from './server_step'
import { fetchFile, SiteError, type Site } from './site'

export const ABOUT = 'bundle/members.json'
export const EXAMPLES = 'bundle/members.safetensors'

export interface MembersAbout {
  format: number
  members: { client: number; name: string; classes: string[]; class_ids: number[]; train: number; test: number; of: number }[]
  /** The classes of all members. */
  classes: string[]
  class_ids: number[]
  /** Number of clients of the run. */
  clients: number
  start: 'initial' | 'trained'
  training: { tau: number; beta: number; rho: number; rule: 'exact' | 'eq3'; head_rate: 'rho' | 'beta'; safeguard: boolean }
  server: ServerSettings
}

export interface Examples {
  raw: Uint8Array
  x: Float32Array
  /** 0 .. K-1 in the member's own classes. */
  labels: Int32Array
}

/** Who takes part, with what it starts with. */
export interface Member {
  name: string
  classes: string[]
  /** The columns of its classes in a head for the classes of all. */
  columns: number[]
  train: Examples
  /** Held-out examples: training never sees them. */
  test: Examples
  head: Head
}

export interface Members {
  about: MembersAbout
  members: Member[]
  /** The first head over the classes of all members. */
  shared: Head
  theta: Float32Array
}

export function hasMembers(site: Site): boolean {
  return ABOUT in site.files && EXAMPLES in site.files
}

/** @throws SiteError: a file is missing or damaged, or was written for another page. */
export async function openMembers(site: Site, bundle: Bundle): Promise<Members> {
  const [text, file] = await Promise.all([fetchFile(site, ABOUT), fetchFile(site, EXAMPLES)])
  return readMembers(text, file, bundle)
}

export function readMembers(text: Uint8Array, file: Uint8Array, { manifest, theta }: Pick<Bundle, 'manifest' | 'theta'>): Members {
  const about = JSON.parse(new TextDecoder().decode(text)) as MembersAbout
  if (about.format !== 2) throw new SiteError(`The members have format ${about.format}; the page reads format 2.`)
  const stored = readSafetensors(file)
  const get = <T>(name: string) => {
    const found = stored.get(name)
    if (!found) throw new SiteError(`members.safetensors has no ${name}`)
    return found.data as T
  }
  const labels = Int32Array.from(get<Uint8Array>('labels'))
  const pixels = manifest.model.example_shape.reduce((a, b) => a * b, 1)
  const raw = unpacked(get<Uint8Array>('mask'), get<Uint8Array>('ink'), labels.length * pixels)
  let at = 0
  const take = (n: number): Examples => {
    const part = raw.subarray(at * pixels, (at + n) * pixels)
    return { raw: part, x: decoded(part, manifest.preprocessing as Partial<Preprocessing>), labels: labels.slice(at, (at += n)) }
  }
  const head = (end: string): Head => ({ kernel: get<Float32Array>(`kernel${end}`), bias: get<Float32Array>(`bias${end}`) })
  const members = about.members.map((own, i) => ({
    name: own.name === String(own.client) ? `Client ${own.client}` : own.name.replaceAll('_', ' '),
    classes: own.classes,
    columns: own.class_ids.map((id) => about.class_ids.indexOf(id)),
    train: take(own.train),
    test: take(own.test),
    head: head(`_${i}`),
  }))
  return { about, members, shared: head(''), theta: about.start === 'initial' ? get<Float32Array>('theta') : theta }
}

/** The numbers of which `mask` has a bit each, the first one highest: 0, or else the next of `ink`. */
function unpacked(mask: Uint8Array, ink: Uint8Array, size: number): Uint8Array {
  let at = 0
  const found = Uint8Array.from({ length: size }, (_, i) => (mask[i >> 3]! & (0x80 >> (i & 7)) ? ink[at++]! : 0))
  if (mask.length !== Math.ceil(size / 8) || at !== ink.length) throw new SiteError('members.safetensors does not fit to the program’s examples.')
  return found
}
