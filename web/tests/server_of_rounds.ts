/** A real `tfpfl serve`, and how a browser joins its run. */
import { spawn } from 'node:child_process'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import type { Page } from 'playwright-core'
import { fixture } from './browser'

export const python = process.env.TFPFL_WEB_PYTHON ?? join(import.meta.dirname, '../../.venv/bin/python')

export interface Served {
  address: string
  /** The exit code, when all rounds are done. */
  ended: Promise<number | null>
  stop(): void
}

/** Serves a run folder on a free port. */
export async function serveRun(run: string, ...options: string[]): Promise<Served> {
  const server = spawn(python, ['-m', 'tfpfl', 'serve', run, '--port', '0', ...options], { stdio: ['ignore', 'pipe', 'inherit'] })
  const ended = new Promise<number | null>((resolve) => server.on('exit', (code) => resolve(code)))
  const address = await new Promise<string>((resolve, reject) => {
    createInterface({ input: server.stdout }).on('line', (line) => {
      const found = /Listening on (\S+);/.exec(line)
      if (found) resolve(found[1]!)
    })
    void ended.then((code) => reject(new Error(`the server ended with ${code}`)))
  })
  return { address, ended, stop: () => server.kill('SIGKILL') }
}

/** Fills in the form with a token and the files of a client of the fixture's run, and presses Join. */
export async function joinRun(page: Page, client: number, token: string): Promise<void> {
  await page.locator('#live-token').fill(token)
  const files = ['train.npz', 'test.npz', 'about.json'].map((name) => fixture('live', 'data', String(client), name))
  await page.locator('#live-files').setInputFiles(files)
  await page.locator('#join').click()
}
