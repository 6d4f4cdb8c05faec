/** Makes an example of a sound: the spoken part of its loudest second, in the middle of silence. Uses no element. */

/** The manifest's preprocessing of a model that hears. */
export interface AudioSettings {
  kind: 'audio'
  /** Samples in a second. */
  rate: number
  /** Samples of an example. */
  samples: number
}

export class SoundError extends Error {}

/** A frame is so long, in seconds. */
const FRAME = 0.02
/** The root mean square of the loudest frame must be as high; 1 is full scale. The quietest of FSDD's 3,000 words has 0.004. */
export const QUIETEST = 0.003
/** At the ends, a frame with less than this part of the loudest frame's energy is silence: 35 dB below. */
const SILENCE = 10 ** -3.5
/** So many frames beside what was spoken are kept. */
const MARGIN = 2
/** The largest amplitude of an example. */
const PEAK = 0.5

/** The settings, if the manifest's preprocessing is one of audio. @throws SoundError: this page does not know it. */
export function audioSettings(preprocessing: object, shape: readonly number[]): AudioSettings | null {
  const { kind, rate, samples } = preprocessing as Partial<AudioSettings>
  if (kind !== 'audio') return null
  const whole = [rate, samples].every((value) => Number.isInteger(value) && value! > 0)
  if (!whole || shape.reduce((a, b) => a * b, 1) !== samples) {
    throw new SoundError(
      `The bundle's sound is not understood: ${samples} samples at ${rate} Hz, and examples of ${shape.join(' × ')}. Export it again.`,
    )
  }
  return { kind, rate: rate!, samples: samples! }
}

/**
 * The example, `samples` numbers in [-1, 1], of a sound of any length at the settings' rate.
 *
 * @throws SoundError: it is too quiet or has no sample.
 */
export function spoken(sound: Float32Array, { rate, samples }: AudioSettings): Float32Array {
  const frame = Math.round(FRAME * rate)
  const energy = energies(sound, frame)
  const most = energy.reduce((a, b) => Math.max(a, b), 0)
  if (!(Math.sqrt(most / frame) >= QUIETEST)) {
    throw new SoundError('That was too quiet: come closer to the microphone, speak louder, or choose another microphone. Then record again.')
  }
  const first = loudest(energy, Math.floor(samples / frame))
  let [from, to] = [first, Math.min(energy.length, first + Math.floor(samples / frame))]
  const within = energy.subarray(from, to)
  const floor = SILENCE * within.reduce((a, b) => Math.max(a, b), 0)
  const [begin, end] = [from, to]
  while (energy[from]! < floor) from++
  while (energy[to - 1]! < floor) to--
  const start = Math.max(begin, from - MARGIN)
  const part = sound.subarray(start * frame, Math.min(end, to + MARGIN) * frame)
  const peak = part.reduce((a, b) => Math.max(a, Math.abs(b)), 0)
  const example = new Float32Array(samples)
  const word = Math.min(to * frame, sound.length) - from * frame
  const before = Math.floor((samples - word) / 2) - (from - start) * frame // as `word` of tfpfl: speech trunks have heard words in the middle
  part.forEach((value, i) => (example[before + i] = (value * PEAK) / peak))
  return example
}

/** The sum of squares in each frame; the last one may be shorter. */
function energies(sound: Float32Array, frame: number): Float64Array {
  const found = new Float64Array(Math.ceil(sound.length / frame))
  sound.forEach((value, i) => (found[Math.floor(i / frame)]! += value * value))
  return found
}

/** The first of the `count` frames one after the other that are loudest together. */
function loudest(energy: Float64Array, count: number): number {
  let [best, most] = [0, -1]
  for (let first = 0; first + count <= Math.max(count, energy.length); first++) {
    const sum = energy.subarray(first, first + count).reduce((a, b) => a + b, 0)
    if (sum > most) [best, most] = [first, sum]
  }
  return best
}

/** A WAV file of one channel in float32. The browser decodes it as any other: so it alone changes rates. */
export function wavOf(sound: Float32Array, rate: number): ArrayBuffer {
  const bytes = new ArrayBuffer(44 + 4 * sound.length)
  const view = new DataView(bytes)
  const text = (at: number, value: string) => [...value].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)))
  text(0, 'RIFF')
  view.setUint32(4, 36 + 4 * sound.length, true)
  text(8, 'WAVEfmt ')
  view.setUint32(16, 16, true)
  view.setUint16(20, 3, true) // IEEE floats
  view.setUint16(22, 1, true)
  view.setUint32(24, rate, true)
  view.setUint32(28, 4 * rate, true)
  view.setUint16(32, 4, true)
  view.setUint16(34, 32, true)
  text(36, 'data')
  view.setUint32(40, 4 * sound.length, true)
  sound.forEach((value, i) => view.setFloat32(44 + 4 * i, value, true))
  return bytes
}

/** The samples of a file at this rate, mean of its channels. @throws SoundError: the browser cannot decode it. */
export async function decodedSound(file: ArrayBuffer, rate: number, name = 'The recording'): Promise<Float32Array> {
  if (!('OfflineAudioContext' in globalThis)) throw new SoundError('This browser decodes no sound: use a newer one.')
  let buffer: AudioBuffer
  try {
    buffer = await new OfflineAudioContext(1, 1, rate).decodeAudioData(file) // resamples to the context's rate
  } catch {
    throw new SoundError(`${name} is no sound that this browser can read: choose a WAV, MP3, Ogg or M4A file.`)
  }
  const channels = Array.from({ length: buffer.numberOfChannels }, (_, i) => buffer.getChannelData(i))
  return Float32Array.from({ length: buffer.length }, (_, i) => channels.reduce((sum, channel) => sum + channel[i]!, 0) / channels.length)
}
