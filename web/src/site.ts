/** The files of the site, checked: site.json names each with its size and sha256 (tflite_export/web.py). */
import { sha256 } from './sha256'

export interface Site {
  format: number
  made_by: string
  files: Record<string, { bytes: number; sha256: string }>
  /** Whether the host of the site runs live rounds, which the page can join. */
  live?: boolean
}

export class SiteError extends Error {}

export async function openSite(): Promise<Site> {
  const response = await fetch('site.json', { cache: 'no-cache' })
  if (!response.ok) throw new SiteError('This page has no bundle yet: python -m tflite_export web RUN_OR_BUNDLE puts one in.')
  const site = (await response.json()) as Site
  if (site.format !== 1) throw new SiteError(`This site has format ${site.format}; the page reads format 1.`)
  return site
}

/** The hash is part of the address, so that a cache never mixes two sites. */
export function address(site: Site, name: string): string {
  const file = site.files[name]
  if (!file) throw new SiteError(`The site has no ${name}.`)
  return `${name}?sha256=${file.sha256.slice(0, 16)}`
}

/** Loads a file of the site. @throws SiteError: it is missing, or is not the file that site.json describes. */
export async function fetchFile(site: Site, name: string): Promise<Uint8Array> {
  const response = await fetch(address(site, name))
  if (!response.ok) throw new SiteError(`${name} is missing.`)
  const bytes = new Uint8Array(await response.arrayBuffer())
  if (bytes.length !== site.files[name]?.bytes || sha256(bytes) !== site.files[name].sha256) {
    throw new SiteError(`${name} is damaged: its sha256 is not the one in site.json.`)
  }
  return bytes
}
