/** Files and numbers that Python and the page share, byte for byte. */
import { readFileSync } from 'node:fs'
import { describe, expect, it } from 'vitest'
import { CLOSED, headBytes, HeadError, readHead, resized, withoutColumn } from '../src/head'
import { crc32 } from '../src/crc32'
import { isManifest, manifestHash } from '../src/manifest_hash'
import { encodeGradient } from '../src/payload'
import { decoded, exampleOfDrawing } from '../src/preprocess'
import { readSafetensors } from '../src/safetensors'
import { isBetter, probabilities, score } from '../src/scores'
import { sha256 } from '../src/sha256'
import { unzipped, zipped } from '../src/zip'
import { fixture } from './browser'

const bytes = (...path: string[]) => new Uint8Array(readFileSync(fixture(...path)))
const stored = (...path: string[]) => {
  const found = readSafetensors(bytes(...path))
  return (name: string) => found.get(name)!
}
const theta = () => sha256(bytes('cnn', 'theta.bin'))

describe('pixels', () => {
  for (const name of ['omniglot', 'mnist', 'digits']) {
    it(`of a drawing become an example of ${name} as in Python, every one`, () => {
      const get = stored('pixels.safetensors')
      const [size, levels, area, pixels] = get(`${name}.settings`).data as Int32Array as unknown as [number, number, number, number]
      const settings = { size, levels, pen: 1, resample: area ? 'area' : 'bilinear' } as const
      const [scale, shift] = preprocessing(name)
      const grey = get(`${name}.grey`).data as Uint8Array
      const examples = grey.length / (size * size)
      expect(examples).toBe(3)
      for (let i = 0; i < examples; i++) {
        const raw = exampleOfDrawing(grey.slice(i * size * size, (i + 1) * size * size), settings, pixels)
        const rows = (key: string) => get(`${name}.${key}`).data.slice(i * pixels * pixels, (i + 1) * pixels * pixels)
        expect(raw).toEqual(rows('raw'))
        expect(decoded(raw, { scale, shift })).toEqual(rows('x'))
        expect(raw.some((value) => value > 0.4 * levels) && raw.some((value) => value < levels)).toBe(true)
      }
    })
  }
})

it('a manifest without scale and shift says that raw numbers are the example', () => {
  expect(decoded(Uint8Array.of(0, 7, 255), {})).toEqual(Float32Array.of(0, 7, 255))
  expect(decoded(Uint8Array.of(4), { scale: 0.5 })).toEqual(Float32Array.of(2))
})

function preprocessing(name: string): [number, number] {
  const values: Record<string, [number, number]> = { omniglot: [1 / 255, 0], mnist: [2 / 255, -1], digits: [1 / 16, 0] }
  return values[name]!
}

describe('a manifest', () => {
  it('of Python has the hash that it names', () => {
    for (const name of ['mlp', 'cnn']) {
      const file = bytes(name, 'manifest.json')
      const text = new TextDecoder().decode(file)
      expect(isManifest(file)).toBe(true)
      for (const changed of [text.replace('"format": 1', '"format": 2'), text.slice(1), '{"hash": ""}', 'null', '<p>']) {
        expect(isManifest(new TextEncoder().encode(changed)), changed.slice(0, 20)).toBe(false)
      }
    }
  })

  it('is written as Python writes JSON before it is hashed', () => {
    const numbers = '[1E5, -0, 1.50, 1e999, -0e0, 100000000000000000000000, 0.1e-6, 1e16, 9007199254740991.0, 0.0001, 0.00001, -1e-400]'
    const as = '[100000.0,0,1.5,Infinity,-0.0,100000000000000000000000,1e-07,1e+16,9007199254740991.0,0.0001,1e-05,-0.0]'
    const hash = (text: string) => sha256(new TextEncoder().encode(text))
    expect(manifestHash(`{"b": ${numbers},\n "a": [ ] , "hash": [{}]}`)).toBe(hash(`{"a":[],"b":${as}}`))
    expect(manifestHash('{"x": 1, "x": {"hash": null}}')).toBe(hash('{"x":{"hash":null}}'))
    expect(manifestHash('["é😀\\u007f\\/", "\\"\\\\,{", true]')).toBe(hash('["\\u00e9\\ud83d\\ude00\\u007f/","\\"\\\\,{",true]'))
    expect(manifestHash('{"😀": 1, "ￚ": 2}')).toBe(hash('{"\\uffda":2,"\\ud83d\\ude00":1}')) // by characters, not by halves of them
    // What manifest_hash of Python says.
    expect(manifestHash('{"a": 1E5, "b": -0, "c": 1.50, "d": 1e999, "e": -0e0, "g": 0.1e-6, "j":"\\u00e9\\/", "a": 2, "hash": {"x": 1}}')).toBe('39ff3bfad2f9dd565c69d35847ca737de95060c7b7cd6aab3786ac364b2c63d1')
  })
})

describe('heads', () => {
  const numbers = () => {
    const get = stored('head.safetensors')
    return { kernel: get('kernel').data as Float32Array, bias: get('bias').data as Float32Array }
  }

  it('are written and read as Python does', () => {
    const file = bytes('same.head')
    expect(readHead(file, 64, theta())).toEqual(numbers())
    expect(headBytes(numbers(), theta())).toEqual(file)
  })

  it.each(['named.head', 'saved.head'])('of a device are read with the names of its own classes or of its bundle: %s', (name) => {
    const file = bytes(name)
    const names = numbers().bias.reduce<string[]>((list, _, i) => [...list, `class “${i}”`], [])
    expect(readHead(file, 64, theta())).toEqual({ ...numbers(), names })
    expect(() => readHead(file.slice(0, -1), 64, theta())).toThrow(/damaged or cut off/)
    const nameless = file.slice(0, 52 + 4 * (numbers().kernel.length + names.length) + 4)
    new DataView(nameless.buffer).setUint32(nameless.length - 4, 0, true)
    new DataView(nameless.buffer).setUint32(48, crc32(nameless.subarray(52)), true)
    expect(() => readHead(nameless, 64, theta())).toThrow(/no names for its/)
  })

  it('of another backbone, of another width, cut off or changed in any byte are refused', () => {
    const file = bytes('same.head')
    expect(() => readHead(bytes('other.head'), 64, theta())).toThrow(/another backbone/)
    expect(() => readHead(file, 65, theta())).toThrow(/64 features.*65/)
    expect(() => readHead(file.slice(0, -4), 64, theta())).toThrow(/damaged or cut off/)
    expect(() => readHead(file.slice(0, 20), 64, theta())).toThrow(/not a head/)
    for (let i = 0; i < file.length; i += 7) {
      const changed = file.slice()
      changed[i]! ^= 16
      expect(() => readHead(changed, 64, theta()), `byte ${i}`).toThrow(HeadError)
    }
    const infinite = numbers()
    infinite.bias[1] = Infinity
    expect(() => readHead(headBytes(infinite, theta()), 64, theta())).toThrow(/not finite/)
  })

  it('grow, shrink and lose a class without touching the other columns', () => {
    const head = numbers()
    const wide = resized(head, 6, CLOSED)
    expect(resized(wide, 4)).toEqual(head)
    expect([...wide.bias.slice(4)]).toEqual([Math.fround(CLOSED), Math.fround(CLOSED)])
    const phi = Float32Array.from({ length: 64 }, (_, i) => Math.sin(i))
    const [narrow, padded] = [probabilities(head, phi), probabilities(wide, phi)]
    expect(padded).toEqual([...narrow, 0, 0])
    const less = withoutColumn(head, 1)
    expect(less.bias).toEqual(Float32Array.of(head.bias[0]!, head.bias[2]!, head.bias[3]!))
    expect(less.kernel[5 * 3 + 1]).toBe(head.kernel[5 * 4 + 2])
  })
})

describe('payloads', () => {
  for (const kind of ['float32', 'int8'] as const) {
    it(`in ${kind} are those of Python`, () => {
      const gradient = stored('gradient.safetensors')('gradient').data as Float32Array
      expect(encodeGradient(gradient, kind)).toEqual(bytes(`gradient.${kind}`))
    })
  }
  it('are refused where they are not finite', () => {
    expect(() => encodeGradient(Float32Array.of(1, NaN), 'int8')).toThrow(/not finite/)
  })
})

describe('scores', () => {
  const head = { kernel: Float32Array.of(1, 0, 0, 1), bias: Float32Array.of(0, 0) }
  const phi = [Float32Array.of(2, 0), Float32Array.of(0, 1), Float32Array.of(0.5, 0)]

  it('count and average', () => {
    const found = score(head, phi, [0, 1, 1])
    const loss = [2, 1, -0.5].map((margin) => Math.log1p(Math.exp(-margin))).reduce((a, b) => a + b) / 3
    expect(found).toMatchObject({ correct: 2, examples: 3 })
    expect(found.loss).toBeCloseTo(loss, 12)
    expect(score(head, phi, [0, 1, 2]).loss).toBe(Infinity) // a class that the head does not have
  })

  it('keep a head only if it is better', () => {
    const of = (correct: number, loss: number) => ({ correct, loss, examples: 4 })
    expect(isBetter(of(3, 9), of(2, 1))).toBe(true)
    expect(isBetter(of(3, 0.5), of(3, 0.6))).toBe(true)
    expect(isBetter(of(3, 0.6), of(3, 0.6))).toBe(false)
    expect(isBetter(of(2, 0.1), of(3, 9))).toBe(false)
    expect(isBetter(of(4, NaN), of(0, 9))).toBe(false)
  })
})

describe('zip files', () => {
  it('whose content was changed are refused, by the checksum of each entry', async () => {
    const content = Uint8Array.from({ length: 99 }, (_, i) => i)
    const file = zipped(new Map([['a', content], ['b', new Uint8Array()]])) // prettier-ignore
    expect(await unzipped(file)).toEqual(new Map([['a', content], ['b', new Uint8Array()]])) // prettier-ignore
    for (const at of [31, 31 + 98]) {
      const changed = file.slice()
      changed[at]! ^= 0x40
      expect(await unzipped(changed)).toBeNull()
    }
  })
})
