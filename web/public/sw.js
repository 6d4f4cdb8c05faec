// Serves what offline.ts put into the cache when there is no network, and lets nothing but this site be fetched.
const LASTING = /^(assets|litert-[^/]+)\/|[?&]sha256=/ // the content never changes under these addresses, as seen from this site's folder
const PREFIX = `tfpfl-${new URL(self.registration.scope).pathname} ` // of this site's caches; other sites of the origin have theirs

self.addEventListener('install', () => self.skipWaiting())
self.addEventListener('activate', (event) => event.waitUntil(self.clients.claim()))
self.addEventListener('fetch', (event) => {
  const { request } = event
  const url = new URL(request.url)
  if (url.origin !== self.location.origin) event.respondWith(Response.error())
  else if (['v1/', 'watch'].some((name) => url.pathname.startsWith(new URL(name, self.registration.scope).pathname))) return // live rounds: straight to the server
  else if (request.method === 'GET') event.respondWith(LASTING.test(inSite(request.url)) ? cachedFirst(request) : cachedLast(request))
})

/** The address as seen from this site's folder, which may have any name itself. */
function inSite(url) {
  const { scope } = self.registration
  return url.startsWith(scope) ? url.slice(scope.length) : url
}

async function cached(request) {
  for (const name of await caches.keys()) {
    const found = name.startsWith(PREFIX) && (await (await caches.open(name)).match(request))
    if (found) return found
  }
  return undefined
}

async function cachedFirst(request) {
  return (await cached(request)) ?? fetch(request)
}

async function cachedLast(request) {
  try {
    return await fetch(request)
  } catch (error) {
    const found = (await cached(request)) ?? (request.mode === 'navigate' && (await cached('./')))
    if (found) return found
    throw error
  }
}
