/** What becomes of a sound, against sounds by hand. */
import { describe, expect, it } from 'vitest'
import { audioSettings, QUIETEST, SoundError, spoken, wavOf } from '../src/sound'

const SETTINGS = { kind: 'audio', rate: 16000, samples: 16000 } as const
const FRAME = 320

/** Silence of so many frames, with a square wave of a height in some of them. */
function sound(frames: number, ...parts: [from: number, to: number, height: number][]): Float32Array {
  const found = new Float32Array(frames * FRAME)
  for (const [from, to, height] of parts) for (let i = from * FRAME; i < to * FRAME; i++) found[i] = i % 2 ? height : -height
  return found
}
/** The frames of an example that hold something. */
const loud = (example: Float32Array) => Array.from({ length: 50 }, (_, f) => f).filter((f) => example.subarray(f * FRAME, (f + 1) * FRAME).some((v) => v !== 0))

describe('the spoken part of a sound', () => {
  it('comes to the middle, wherever it was, and with 0.5 as its largest amplitude', () => {
    for (const [from, height] of [[30, 0.5], [80, 0.5], [15, 0.1]] as const) {
      const example = spoken(sound(100, [from, from + 10, height]), SETTINGS)
      expect(example).toHaveLength(16000)
      expect(loud(example)).toEqual([20, 21, 22, 23, 24, 25, 26, 27, 28, 29])
      expect(example[20 * FRAME]).toBeCloseTo(-0.5, 6)
      expect(example[20 * FRAME + 1]).toBeCloseTo(0.5, 6)
    }
  })

  it('is the loudest second, and what is 35 dB below its loudest frame is silence', () => {
    expect(loud(spoken(sound(200, [10, 20, 0.1], [120, 130, 0.5]), SETTINGS))).toHaveLength(10)
    const ends = (height: number) => loud(spoken(sound(60, [10, 20, 0.5], [20, 30, height]), SETTINGS)).length
    expect(ends(0.5 * 10 ** (-34 / 20))).toBe(20)
    expect(ends(0.5 * 10 ** (-36 / 20))).toBe(12) // two frames beside the word
  })

  it('may be shorter or longer than a second', () => {
    expect(spoken(sound(7, [0, 7, 0.3]), SETTINGS).findIndex((v) => v !== 0)).toBe(8000 - 3.5 * FRAME)
    expect(loud(spoken(sound(300, [0, 300, 0.3]), SETTINGS))).toHaveLength(50)
    expect(loud(spoken(sound(10, [0, 10, 3]), SETTINGS)).length).toBe(10)
    expect(Math.max(...spoken(sound(10, [0, 10, 3]), SETTINGS))).toBe(0.5)
  })

  it('is refused if it is too quiet or not there', () => {
    expect(() => spoken(sound(60, [10, 20, 0.99 * QUIETEST]), SETTINGS)).toThrow(/too quiet: come closer/)
    expect(() => spoken(sound(60, [10, 20, 1.01 * QUIETEST]), SETTINGS)).not.toThrow()
    for (const nothing of [new Float32Array(0), new Float32Array(900), Float32Array.of(NaN, NaN)]) expect(() => spoken(nothing, SETTINGS)).toThrow(SoundError)
  })
})

describe('the bundle', () => {
  it('says whether it hears', () => {
    expect(audioSettings(SETTINGS, [16000])).toEqual(SETTINGS)
    expect(audioSettings({ scale: 1, shift: 0 }, [28, 28, 1])).toBe(null)
    expect(() => audioSettings(SETTINGS, [8000])).toThrow(/not understood.*8000/)
    expect(() => audioSettings({ kind: 'audio', rate: 0.5, samples: 16000 }, [16000])).toThrow(SoundError)
  })
})

describe('a WAV file of floats', () => {
  it('has the bytes that the format asks for', () => {
    const bytes = Buffer.from(wavOf(Float32Array.of(0.25, -1), 48000))
    expect([bytes.toString('latin1', 0, 4), bytes.toString('latin1', 8, 16), bytes.toString('latin1', 36, 40)]).toEqual(['RIFF', 'WAVEfmt ', 'data'])
    expect([bytes.readUInt32LE(4), bytes.readUInt16LE(20), bytes.readUInt32LE(24), bytes.readUInt32LE(28), bytes.readUInt32LE(40)]).toEqual([44, 3, 48000, 192000, 8])
    expect([bytes.readFloatLE(44), bytes.readFloatLE(48)]).toEqual([0.25, -1])
    expect(bytes).toHaveLength(52)
  })
})
