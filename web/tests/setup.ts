/** Before all tests: the files of tests/fixtures.py must be there, and the harness is built. */
import { existsSync, mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { build } from 'vite'
import type { TestProject } from 'vitest/node'

declare module 'vitest' {
  interface ProvidedContext {
    fixtures: string
    harness: string
  }
}

export default async function setup(project: TestProject): Promise<() => void> {
  const fixtures = process.env.TFPFL_WEB_FIXTURES
  const written = ['pixels.safetensors', 'networks'] // the latter alone is what benchmarks/device_networks.py writes
  if (!fixtures || !written.some((name) => existsSync(join(fixtures, name)))) {
    throw new Error('TFPFL_WEB_FIXTURES names no folder of tests/fixtures.py; `make web-test` makes one and runs these tests')
  }
  const harness = mkdtempSync(join(tmpdir(), 'tfpfl-harness-'))
  await build({
    configFile: false,
    root: join(import.meta.dirname, 'harness'),
    base: './',
    logLevel: 'warn',
    worker: { format: 'iife' },
    build: { outDir: harness, emptyOutDir: true, target: 'es2022' },
  })
  project.provide('fixtures', fixtures)
  project.provide('harness', harness)
  return () => rmSync(harness, { recursive: true, force: true })
}
