/** The files of the site, checked: site.json names each with its size and sha256 (tflite_export/web.py). */
import { content, packed, type Listed, type Progress } from './transfer'

export interface Site {
  format: number
  made_by: string
  files: Record<string, Listed>
  /** Whether the host of the site runs live rounds, which the page can join. */
  live?: boolean
}

/** The folder of this origin in which the site is: "/" or "/a/b/". Sites of one origin have folders of their own. */
export function folder(): string {
  return new URL('.', document.baseURI).pathname
}

export class SiteError extends Error {}

export async function openSite(): Promise<Site> {
  const response = await fetch('site.json', { cache: 'no-cache' })
  if (!response.ok) throw new SiteError('This page has no bundle yet: python -m tflite_export web RUN_OR_BUNDLE puts one in.')
  const site = (await response.json()) as Site
  if (site.format !== 1) throw new SiteError(`This site has format ${site.format}; the page reads format 1.`)
  return site
}

export function listed(site: Site, name: string): Listed {
  const file = site.files[name]
  if (!file) throw new SiteError(`The site has no ${name}.`)
  return file
}

/** Where the page finds a file. The hash is part of the address, so that a cache never mixes two sites. */
export function address(site: Site, name: string): string {
  const file = listed(site, name)
  const found = packed(file) ? `${name}.gz` : name
  return name.startsWith('bundle/') ? `${found}?sha256=${file.sha256.slice(0, 16)}` : found
}

/** Loads a file of the site. @throws TransferError: it is missing, or is not the file that site.json describes. */
export async function fetchFile(site: Site, name: string, progress?: Progress): Promise<Uint8Array> {
  return content(name, await fetch(address(site, name)), listed(site, name), progress)
}
