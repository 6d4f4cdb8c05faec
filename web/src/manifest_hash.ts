/** The hash of a bundle's manifest: `manifest_hash` of tflite_export/device/runtime.py. */
import { sha256 } from './sha256'

const TOKEN = /[{}[\]:,]|"(?:[^"\\]|\\.)*"|[^\s{}[\]:,"]+/g
const SHORT: Record<string, string> = { '"': '\\"', '\\': '\\\\', '\b': '\\b', '\f': '\\f', '\n': '\\n', '\r': '\\r', '\t': '\\t' }

/** Whether a file is a manifest that has the hash that it names. */
export function isManifest(file: Uint8Array): boolean {
  try {
    const text = new TextDecoder('utf-8', { fatal: true }).decode(file)
    return (JSON.parse(text) as { hash?: unknown }).hash === manifestHash(text)
  } catch {
    return false
  }
}

/** The sha256 of a manifest without its entry "hash", written as Python writes JSON with sorted keys and no spaces. */
export function manifestHash(text: string): string {
  JSON.parse(text) // so that what follows need not look for mistakes
  const tokens = text.match(TOKEN)!
  let at = 0
  const written = (leftOut?: string): string => {
    const token = tokens[at++]!
    if (token === '[') {
      const items: string[] = []
      for (; tokens[at] !== ']'; at += Number(tokens[at] === ',')) items.push(written())
      at++
      return `[${items.join(',')}]`
    }
    if (token === '{') {
      const members = new Map<string, string>()
      for (; tokens[at] !== '}'; at += Number(tokens[at] === ',')) {
        const name = JSON.parse(tokens[at]!) as string
        at += 2
        members.set(name, written())
      }
      at++
      const names = [...members.keys()].filter((name) => name !== leftOut).sort((a, b) => (points(a) < points(b) ? -1 : 1))
      return `{${names.map((name) => `${quoted(name)}:${members.get(name)}`).join(',')}}`
    }
    if (token.startsWith('"')) return quoted(JSON.parse(token) as string)
    return /^[-\d]/.test(token) ? number(token) : token
  }
  return sha256(new TextEncoder().encode(written('hash')))
}

/** What texts are sorted by in Python; JavaScript sorts by halves of characters. */
function points(text: string): string {
  return Array.from(text, (character) => character.codePointAt(0)!.toString(16).padStart(6, '0')).join()
}

function quoted(text: string): string {
  const escaped = (unit: string) => SHORT[unit] ?? `\\u${unit.charCodeAt(0).toString(16).padStart(4, '0')}`
  return `"${text.replace(/["\\]|[^ -~]/g, escaped)}"`
}

/** A number as Python writes it: with the same digits as JavaScript, but a float keeps its point, or has an exponent sooner. */
function number(token: string): string {
  if (!/[.eE]/.test(token)) return token === '-0' ? '0' : token // an integer has any number of digits
  const value = Number(token)
  if (Object.is(value, -0)) return '-0.0'
  const [digits, exponent] = value.toExponential().split('e') as [string, string?]
  const power = Number(exponent)
  if (value === 0 || (power >= -4 && power < 16)) return Number.isInteger(value) ? `${value}.0` : String(value)
  if (exponent === undefined) return digits // infinite: more than a float holds
  return `${digits}e${power < 0 ? '-' : '+'}${String(Math.abs(power)).padStart(2, '0')}`
}
