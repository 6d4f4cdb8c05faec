/** Records the microphone for a moment. What was recorded stays in this page. */
import { SoundError } from './sound'

export interface Recorded {
  sound: Float32Array
  /** Samples in a second, as the sound card has them. */
  rate: number
}

/** The browser's voice filters are off: they change a word in ways that depend on what came before it. */
const PLAIN: MediaTrackConstraints = { channelCount: 1, echoCancellation: false, noiseSuppression: false, autoGainControl: false }

const REFUSED: Record<string, string> = {
  NotAllowedError: 'The microphone is not allowed here. Allow it in the browser’s settings of this page, or choose a recording.',
  NotFoundError: 'There is no microphone. Connect one, or choose a recording.',
  NotReadableError: 'The microphone does not answer: another program may use it. Close that, or choose a recording.',
}

/** Why there can be no recording here; null if there can. */
export function noMicrophone(): string | null {
  if (!globalThis.isSecureContext) return 'A page may use the microphone over https or on localhost only. Choose a recording instead.'
  if (!('mediaDevices' in navigator) || !('AudioWorkletNode' in globalThis)) {
    return 'This browser cannot record. Use a newer one, or choose a recording.'
  }
  return null
}

/**
 * Records for so many seconds, or until `stop` fires.
 *
 * @param begun called when the microphone is open.
 * @param level called with the root mean square of the last samples, 1 at full scale.
 * @throws SoundError: there is no microphone, it is not allowed, or it was stopped before there was a sound.
 */
export async function recorded(seconds: number, stop: AbortSignal, begun: () => void, level: (value: number) => void): Promise<Recorded> {
  const problem = noMicrophone()
  if (problem) throw new SoundError(problem)
  const stream = await navigator.mediaDevices.getUserMedia({ audio: PLAIN }).catch((error: unknown) => {
    const name = error instanceof DOMException ? error.name : ''
    throw new SoundError(REFUSED[name] ?? `The microphone cannot be opened (${name || String(error)}). Choose a recording instead.`)
  })
  let context: AudioContext | undefined
  let quiet: ReturnType<typeof setTimeout> | undefined
  try {
    context = new AudioContext()
    const { sampleRate } = context
    await context.audioWorklet.addModule(new URL('recorder.js', document.baseURI).href)
    const node = new AudioWorkletNode(context, 'recorder', { numberOfOutputs: 0 })
    const parts: Float32Array[] = []
    let samples = 0
    const done = new Promise<void>((resolve, refuse) => {
      // A microphone that is switched off sends nothing at all.
      quiet = setTimeout(() => (samples ? resolve() : refuse(new SoundError('The microphone sends nothing: is it switched off?'))), 1000 * seconds + 3000)
      const end = () => (samples ? resolve() : refuse(new SoundError('That was stopped before there was a sound. Record again.')))
      if (stop.aborted) end() // while the browser asked for permission
      stop.addEventListener('abort', end, { once: true })
      for (const track of stream.getTracks()) track.addEventListener('ended', () => refuse(new SoundError('The microphone was taken away.')), { once: true })
      node.port.onmessage = ({ data }: MessageEvent<Float32Array>) => {
        parts.push(data)
        samples += data.length
        if (parts.length % 16 === 0) level(rootMeanSquare(parts.slice(-16)))
        if (samples >= seconds * sampleRate) resolve()
      }
    })
    done.catch(() => undefined) // if it is refused before it is waited for
    context.createMediaStreamSource(stream).connect(node)
    await context.resume()
    if (!stop.aborted) begun()
    await done
    const sound = new Float32Array(samples)
    parts.reduce((at, part) => (sound.set(part, at), at + part.length), 0)
    return { sound, rate: sampleRate }
  } finally {
    clearTimeout(quiet)
    for (const track of stream.getTracks()) track.stop()
    await context?.close()
  }
}

function rootMeanSquare(parts: readonly Float32Array[]): number {
  const sum = parts.reduce((all, part) => all + part.reduce((a, b) => a + b * b, 0), 0)
  return Math.sqrt(sum / parts.reduce((all, part) => all + part.length, 0))
}
