/** Stores the site for use without a network: every file that a visit needs, checked against site.json. */
import { sha256 } from './sha256'
import { address, folder, openSite, type Site } from './site'
import { content, type Listed } from './transfer'

/** The browser keeps the first itself; the second is for pages that link here. */
const ELSEWHERE = ['sw.js', 'preview.png']

/** How the names of this site's caches begin; sw.js knows it, too. */
function prefix(): string {
  return `tfpfl-${folder()} `
}

/** The name of this site's cache. Another site, or a newer version, has another name. */
export function cacheName(site: Site): string {
  return prefix() + sha256(new TextEncoder().encode(JSON.stringify(site.files))).slice(0, 16)
}

/**
 * @param runtime the files of LiteRT.js that this browser uses; the others are not stored.
 * @returns whether the page will open without a network.
 */
export async function keepForOffline(site: Site, runtime: readonly string[]): Promise<boolean> {
  if (!('serviceWorker' in navigator) || !('caches' in globalThis)) return false // not on https or localhost
  await navigator.serviceWorker.register('./sw.js')
  await navigator.serviceWorker.ready
  const name = cacheName(site)
  const cache = await caches.open(name)
  const keep = async (file: string, url: string, found: Listed) => {
    if (await cache.match(url)) return
    for (const mode of ['force-cache', 'reload'] as const) {
      // The browser has just loaded most files. Its copy may be of an older version, as the hash shows: then the host has
      // the file, and `force-cache` would go on with the copy whatever the host says of it.
      const response = await fetch(url, { cache: mode })
      try {
        await content(file, response.clone(), found)
      } catch (error) {
        if (mode === 'reload') throw error
        continue
      }
      return cache.put(url, response)
    }
  }
  const wanted = (file: string) => !file.startsWith('litert-') || runtime.some((used) => file.endsWith(`/${used}`))
  for (const [file, found] of Object.entries(site.files)) {
    if (ELSEWHERE.includes(file) || !wanted(file)) continue
    await keep(file, file === 'index.html' ? './' : address(site, file), found)
  }
  // The one by which all of it was checked: the host may have another by now, or answer with an error.
  await cache.put('site.json', new Response(JSON.stringify(site), { headers: { 'Content-Type': 'application/json' } }))
  // A tab of an older version may end after one of the newest, whose copy must stay.
  const newest = await openSite().then(cacheName, () => name)
  const lasting = (await caches.keys()).includes(newest) ? newest : name
  for (const other of await caches.keys()) if (other.startsWith(prefix()) && other !== lasting) await caches.delete(other)
  return true
}
