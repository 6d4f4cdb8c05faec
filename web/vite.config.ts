import { cpSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { defineConfig, type Plugin } from 'vite'

const LITERT = join(import.meta.dirname, 'node_modules/@litertjs/core')
const { version } = JSON.parse(readFileSync(join(LITERT, 'package.json'), 'utf8')) as { version: string }
// The version is in the address, so that a browser may keep these files for good.
const FOLDER = `litert-${version}`

/** LiteRT.js loads one of these by what the browser can do; its JSPI build is for GPUs and NPUs only. */
function litertFiles(): Plugin {
  let out = ''
  return {
    name: 'litert-files',
    configResolved(config) {
      out = join(config.root, config.build.outDir)
    },
    closeBundle() {
      for (const kind of ['', '_compat', '_threaded']) {
        for (const end of ['js', 'wasm']) {
          const file = `litert_wasm${kind}_internal.${end}`
          cpSync(join(LITERT, 'wasm', file), join(out, FOLDER, file))
        }
      }
    },
  }
}

export default defineConfig({
  base: './',
  plugins: [litertFiles()],
  define: { __LITERT_FOLDER__: JSON.stringify(FOLDER), __LITERT_VERSION__: JSON.stringify(version) },
  // A classic worker: LiteRT.js loads its WebAssembly by importScripts, which a module worker does not have.
  worker: { format: 'iife' },
  build: { target: 'es2022', modulePreload: { polyfill: false } },
})
