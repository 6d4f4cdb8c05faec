/** Sounds whose every sample is known, at any rate; and recordings of a speaker. */
import { execFileSync } from 'node:child_process'
import { mkdtempSync, readFileSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { readSafetensors } from '../src/safetensors'

const python = process.env.TFPFL_WEB_PYTHON ?? join(import.meta.dirname, '../../.venv/bin/python')
const SCRIPT = join(import.meta.dirname, 'voice.py')

/** 0.4 s of a tone that comes and goes smoothly, from time 0 on. voice.py has the same. */
export function tone(seconds: number, label: number, pitch = 1): number {
  if (seconds < 0 || seconds >= 0.4) return 0
  return 0.5 * Math.sin((Math.PI * seconds) / 0.4) ** 2 * Math.sin(2 * Math.PI * 300 * 2 ** label * pitch * seconds)
}

/** A WAV file of 16 bits. The second channel, if there is one, holds what makes the mean of both the tone. */
export function wav(seconds: number, rate: number, value: (t: number) => number, channels = 1): Buffer {
  const frames = Math.round(seconds * rate)
  const bytes = Buffer.alloc(44 + 2 * channels * frames)
  bytes.write('RIFF', 0)
  bytes.writeUInt32LE(bytes.length - 8, 4)
  bytes.write('WAVEfmt ', 8)
  bytes.writeUInt32LE(16, 16)
  bytes.writeUInt16LE(1, 20)
  bytes.writeUInt16LE(channels, 22)
  bytes.writeUInt32LE(rate, 24)
  bytes.writeUInt32LE(rate * 2 * channels, 28)
  bytes.writeUInt16LE(2 * channels, 32)
  bytes.writeUInt16LE(16, 34)
  bytes.write('data', 36)
  bytes.writeUInt32LE(2 * channels * frames, 40)
  for (let i = 0; i < frames; i++) {
    for (let c = 0; c < channels; c++) {
      const part = channels === 1 ? 1 : c === 0 ? 1.5 : 0.5
      bytes.writeInt16LE(Math.round(32767 * part * value(i / rate)), 44 + 2 * (i * channels + c))
    }
  }
  return bytes
}

/**
 * The largest difference of an example to the tone, for the best start to 1/64 sample and the best loudness (the page
 * scales a word); in units of the largest number.
 */
export function distance(example: ArrayLike<number>, rate: number, value: (t: number) => number, range: [number, number]): { best: number; at: number } {
  const difference = (at: number) => {
    let [worst, most, along, own] = [0, 0, 0, 0]
    for (let i = 0; i < example.length; i++) {
      const expected = value(at + i / rate)
      along += expected * example[i]!
      own += expected * expected
    }
    for (let i = 0; i < example.length; i++) {
      const expected = (value(at + i / rate) * along) / own
      worst = Math.max(worst, Math.abs(example[i]! - expected))
      most = Math.max(most, Math.abs(expected))
    }
    return worst / most
  }
  let found = { best: Infinity, at: 0 }
  const search = (from: number, to: number, step: number) => {
    for (let at = from; at <= to; at += step) {
      const best = difference(at)
      if (best < found.best) found = { best, at }
    }
  }
  search(...range, 1 / rate)
  search(found.at - 1 / rate, found.at + 1 / rate, 1 / (64 * rate))
  return found
}

export interface Taught {
  raw: number[]
  label: number
  heldOut: boolean
}

/** What Python computes of the same examples: voice.py --fit. */
export function byPython(bundle: string, examples: readonly Taught[]) {
  const folder = mkdtempSync(join(tmpdir(), 'tfpfl-voice-'))
  const [from, to] = [join(folder, 'examples.safetensors'), join(folder, 'out.safetensors')]
  const x = Float32Array.from(examples.flatMap((e) => e.raw))
  const arrays = {
    x: ['F32', [examples.length, x.length / examples.length], Buffer.from(x.buffer)],
    labels: ['I32', [examples.length], Buffer.from(Int32Array.from(examples, (e) => e.label).buffer)],
    fit: ['I32', [examples.length], Buffer.from(Int32Array.from(examples, (e) => Number(!e.heldOut)).buffer)],
  } as const
  let at = 0
  const header = Object.fromEntries(
    Object.entries(arrays).map(([name, [dtype, shape, bytes]]) => [name, { dtype, shape, data_offsets: [at, (at += bytes.length)] }]),
  )
  const text = Buffer.from(JSON.stringify(header).padEnd(Math.ceil(JSON.stringify(header).length / 8) * 8))
  const length = Buffer.alloc(8)
  length.writeBigUInt64LE(BigInt(text.length))
  writeFileSync(from, Buffer.concat([length, text, ...Object.values(arrays).map(([, , bytes]) => bytes)]))
  return fitted(bundle, from, to)
}

/** The same of the WAV files of a speaker in a folder, read and resampled by Python. */
export function speakerByPython(bundle: string, folder: string) {
  const out = mkdtempSync(join(tmpdir(), 'tfpfl-voice-'))
  const [from, to] = [join(out, 'examples.safetensors'), join(out, 'out.safetensors')]
  execFileSync(python, [SCRIPT, '--read', folder, from], { stdio: ['ignore', 'ignore', 'inherit'] })
  return fitted(bundle, from, to)
}

function fitted(bundle: string, from: string, to: string) {
  execFileSync(python, [SCRIPT, '--fit', bundle, from, to], { stdio: ['ignore', 'ignore', 'inherit'] })
  const found = readSafetensors(new Uint8Array(readFileSync(to)))
  const get = (name: string) => found.get(name)!.data as ArrayLike<number>
  return { phi: get('phi'), kernel: get('kernel'), bias: get('bias'), guesses: get('guesses') }
}

/** In the browser: what it keeps of the recordings, in their order. */
export async function kept(): Promise<Taught[]> {
  const request = <T>(r: IDBRequest<T>) => new Promise<T>((done, failed) => ((r.onsuccess = () => done(r.result)), (r.onerror = () => failed(r.error))))
  const database = await request(indexedDB.open('tfpfl'))
  const [record] = await request(database.transaction('learners').objectStore('learners').getAll())
  database.close()
  const { examples } = (record ?? { examples: [] }) as { examples: { raw: Float32Array; label: number; heldOut: boolean }[] }
  return examples.map(({ raw, label, heldOut }) => ({ raw: [...raw], label, heldOut }))
}
