// Serves what offline.ts put into the cache when there is no network, and lets nothing but this site be fetched.
const LASTING = /\/(assets|litert-[^/]+)\/|[?&]sha256=/ // the content never changes under these addresses

self.addEventListener('install', () => self.skipWaiting())
self.addEventListener('activate', (event) => event.waitUntil(self.clients.claim()))
self.addEventListener('fetch', (event) => {
  const { request } = event
  const url = new URL(request.url)
  if (url.origin !== self.location.origin) event.respondWith(Response.error())
  else if (['v1/', 'watch'].some((name) => url.pathname.startsWith(new URL(name, self.registration.scope).pathname))) return // live rounds: straight to the server
  else if (request.method === 'GET') event.respondWith(LASTING.test(request.url) ? cachedFirst(request) : cachedLast(request))
})

async function cachedFirst(request) {
  return (await caches.match(request)) ?? fetch(request)
}

async function cachedLast(request) {
  try {
    return await fetch(request)
  } catch (error) {
    const found = (await caches.match(request)) ?? (request.mode === 'navigate' && (await caches.match('./')))
    if (found) return found
    throw error
  }
}
