/** Headless Chromium. Where there is none, tests that need it are skipped, unless TFPFL_BROWSER says that they must run. */
import { existsSync } from 'node:fs'
import { join } from 'node:path'
import { chromium, type Browser } from 'playwright-core'
import { inject } from 'vitest'

const FLAGS = [
  '--headless',
  '--no-sandbox',
  '--disable-gpu',
  '--disable-quic',
  '--no-first-run',
  '--disable-background-networking',
  '--disable-component-update',
  '--disable-sync',
]

const executable = [process.env.TFPFL_CHROMIUM, '/usr/bin/chromium', '/usr/bin/chromium-browser', '/usr/bin/google-chrome'].find(
  (path) => path && existsSync(path),
)

export const noBrowser = !executable && process.env.TFPFL_BROWSER !== 'required'
if (noBrowser) console.warn('Skipped: no Chromium here (TFPFL_CHROMIUM names one)')

export function launch(...flags: string[]): Promise<Browser> {
  if (!executable) throw new Error('Chromium is needed: install the package chromium, or set TFPFL_CHROMIUM')
  return chromium.launch({ executablePath: executable, args: [...FLAGS, ...flags] })
}

/** A file or folder that web/tests/fixtures.py wrote. */
export function fixture(...path: string[]): string {
  return join(inject('fixtures'), ...path)
}

/** The modules of the page, built for tests. */
export function harness(): string {
  return inject('harness')
}
