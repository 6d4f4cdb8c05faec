/** A static host on this machine, such as anyone would put the site on; with the faults that a test asks for. */
import { createReadStream, existsSync, readFileSync, statSync } from 'node:fs'
import { createServer, type Server, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { extname, join, normalize } from 'node:path'

const TYPES: Record<string, string> = {
  '.html': 'text/html',
  '.js': 'text/javascript',
  '.css': 'text/css',
  '.svg': 'image/svg+xml',
  '.png': 'image/png',
  '.json': 'application/json',
  '.webmanifest': 'application/manifest+json',
  '.wasm': 'application/wasm',
}

const PACKET = 14_000

export interface Options {
  /** Send the headers of cross-origin isolation, which threads need. */
  isolated?: boolean
  /** Path -> what is done to its bytes. */
  damage?: Record<string, (bytes: Buffer) => Buffer>
  /** More folders, by the path that they appear under. */
  folders?: Record<string, string>
  /** A slow line, which all answers share. */
  line?: { bitsPerSecond: number; /** Milliseconds to the host and back. */ latency: number }
}

export interface Host {
  url: string
  /** The paths that were asked for. */
  asked: string[]
  close(): Promise<void>
}

export async function serve(folder: string, { isolated = false, damage = {}, folders = {}, line }: Options = {}): Promise<Host> {
  const asked: string[] = []
  let free = 0 // when the line has sent what was given to it
  const server: Server = createServer((request, response) => {
    const path = normalize(decodeURIComponent(new URL(request.url ?? '/', 'http://host').pathname))
    asked.push(path)
    const mounted = Object.entries(folders).find(([prefix]) => path.startsWith(prefix))
    let file = mounted ? join(mounted[1], path.slice(mounted[0].length)) : join(folder, path)
    if (existsSync(file) && statSync(file).isDirectory()) file = join(file, 'index.html')
    if (isolated) {
      response.setHeader('Cross-Origin-Opener-Policy', 'same-origin')
      response.setHeader('Cross-Origin-Embedder-Policy', 'require-corp')
    }
    if (!existsSync(file)) {
      response.writeHead(404).end()
      return
    }
    response.setHeader('Content-Type', TYPES[extname(file)] ?? 'application/octet-stream')
    const change = damage[path.slice(1)]
    if (change) response.end(change(readFileSync(file)))
    else if (line) void slowly(response, readFileSync(file), line)
    else createReadStream(file).pipe(response)
  })
  async function slowly(response: ServerResponse, bytes: Buffer, { bitsPerSecond, latency }: NonNullable<Options['line']>) {
    const pause = (ms: number) => new Promise((done) => setTimeout(done, ms))
    await pause(latency)
    for (let at = 0; at < bytes.length; at += PACKET) {
      const part = bytes.subarray(at, at + PACKET)
      free = Math.max(free, performance.now()) + (8000 * part.length) / bitsPerSecond
      await pause(free - performance.now())
      response.write(part)
    }
    response.end()
  }
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve))
  return {
    url: `http://localhost:${(server.address() as AddressInfo).port}/`,
    asked,
    close: () =>
      new Promise((resolve) => {
        server.close(() => resolve())
        server.closeAllConnections()
      }),
  }
}
