/** Reads a client's examples: train.npz, validation.npz and test.npz, as `tfpfl serve --data-for-devices` writes them. */
import { unzipped } from './zip'

export interface Split {
  /** [N, ...], row by row, preprocessed. */
  x: Float32Array
  y: Int32Array
}

export interface Examples {
  classes: number
  splits: Partial<Record<string, Split>>
}

export class ExamplesError extends Error {}

interface Read {
  shape: number[]
  values: ArrayLike<number>
}

const SPLITS = ['train', 'validation', 'test']

/**
 * Reads the files of a client: {name of the file: its bytes}. One .npz file alone is taken as train.npz; about.json says
 * the number of classes, if the labels do not show it.
 *
 * @throws ExamplesError: a file is no such file, or no examples to train on are among them.
 */
export async function readExamples(files: Map<string, Uint8Array>): Promise<Examples> {
  const splits: Examples['splits'] = {}
  const npz = [...files].filter(([name]) => name.endsWith('.npz'))
  for (const [name, bytes] of npz) {
    const split = SPLITS.find((s) => name === `${s}.npz`) ?? (npz.length === 1 ? 'train' : null)
    if (!split) throw new ExamplesError(`${name}: the files of a client are train.npz, validation.npz and test.npz.`)
    splits[split] = await readSplit(name, bytes)
  }
  const { train } = splits
  if (!train?.y.length) throw new ExamplesError('Choose train.npz, and if there are, validation.npz, test.npz and about.json.')
  const about = files.get('about.json')
  let classes: unknown = train.y.reduce((top, label) => Math.max(top, label), 0) + 1
  if (about) {
    try {
      classes = (JSON.parse(new TextDecoder().decode(about)) as { classes?: unknown }).classes
    } catch {
      throw new ExamplesError('about.json is not JSON.')
    }
  }
  if (!Number.isInteger(classes) || (classes as number) < 1) throw new ExamplesError('about.json says no number of classes.')
  return { classes: classes as number, splits }
}

async function readSplit(name: string, bytes: Uint8Array): Promise<Split> {
  const arrays = await unzipped(bytes)
  if (!arrays) throw new ExamplesError(`${name} is no .npz file, or is damaged.`)
  const [x, y] = ['x.npy', 'y.npy'].map((entry) => {
    const found = arrays.get(entry)
    if (!found) throw new ExamplesError(`${name} has no array ${entry.slice(0, 1)}.`)
    return readNpy(name, found)
  }) as [Read, Read]
  if (y.shape.length !== 1 || x.shape[0] !== y.shape[0]) {
    throw new ExamplesError(`${name}: x must be [N, ...] and y [N], found [${x.shape.join(', ')}] and [${y.shape.join(', ')}].`)
  }
  const split = { x: Float32Array.from(x.values), y: Int32Array.from(y.values) }
  if (!split.x.every(Number.isFinite)) throw new ExamplesError(`${name}: x holds NaN or infinity.`)
  if (!split.y.every((label, i) => label >= 0 && label === y.values[i])) throw new ExamplesError(`${name}: y must be labels from 0.`)
  return split
}

/** An array of numbers that are little-endian, as NumPy writes them on every usual machine. */
function readNpy(file: string, bytes: Uint8Array): Read {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength)
  if (bytes.length < 12 || new TextDecoder('latin1').decode(bytes.subarray(1, 6)) !== 'NUMPY') throw new ExamplesError(`${file} holds no NumPy array.`)
  const [start, length] = bytes[6] === 1 ? [10, view.getUint16(8, true)] : [12, view.getUint32(8, true)]
  const header = new TextDecoder('latin1').decode(bytes.subarray(start, start + length))
  const kind = /'descr': '([^']*)'/.exec(header)?.[1] ?? ''
  const shape = (/'shape': \(([^)]*)\)/.exec(header)?.[1] ?? '').split(',').flatMap((n) => (n.trim() ? [Number(n)] : []))
  const size = shape.reduce((a, b) => a * b, 1)
  const body = bytes.slice(start + length).buffer
  const readers: Record<string, [number, (i: number) => number]> = {}
  const data = new DataView(body)
  readers['<f4'] = [4, (i) => data.getFloat32(4 * i, true)]
  readers['<f8'] = [8, (i) => data.getFloat64(8 * i, true)]
  readers['<i8'] = [8, (i) => Number(data.getBigInt64(8 * i, true))]
  readers['<i4'] = [4, (i) => data.getInt32(4 * i, true)]
  readers['<i2'] = [2, (i) => data.getInt16(2 * i, true)]
  readers['|u1'] = [1, (i) => data.getUint8(i)]
  const reader = readers[kind]
  if (!reader || /'fortran_order': True/.test(header) || body.byteLength !== size * reader[0]) {
    throw new ExamplesError(`${file}: an array of ${kind || 'an unknown kind'} cannot be read: save x as float32 and y as int64.`)
  }
  return { shape, values: Array.from({ length: size }, (_, i) => reader[1](i)) }
}
