/** The exported program, run by LiteRT.js in a worker. */
import type { Listed, Progress } from './transfer'

export type Numbers = Float32Array | Int32Array
export type Arrays = Record<string, Numbers>
/** {input: its shape}. Shapes are fixed: LiteRT.js 2.5 refuses a tensor of another shape. */
export type Signature = Record<string, { dtype: string; shape: number[] }>

/** What LiteRT.js's files must be, by their name, and the cache that keeps them for offline. */
export interface Checks {
  files: Record<string, Listed>
  cache: string | null
}

export type Request = { id: number } & (
  | ({ kind: 'load'; folder: string; threads: boolean } & Checks)
  | { kind: 'start'; program: Uint8Array }
  | { kind: 'keep'; name: string; data: Numbers }
  | { kind: 'run'; signature: string; inputs: Arrays }
)
export interface Started {
  signatures: Record<string, Signature>
  threads: number
  memory: number
  /** The files of LiteRT.js that this browser uses. */
  files: string[]
}
export interface Ran {
  outputs: Arrays
  milliseconds: number
  /** The largest memory of WebAssembly so far, in bytes. */
  memory: number
}
export type Reply = { id: number } & ({ value: Started | Ran | null } | { error: string } | { came: number })
type Unnumbered<T> = T extends unknown ? Omit<T, 'id'> : never

export class RuntimeError extends Error {}

export class Runtime {
  signatures: Record<string, Signature> = {}
  threads = 1
  memory = 0
  files: string[] = []
  private readonly waiting = new Map<number, (reply: Reply) => void>()
  private next = 0

  private constructor(
    private readonly worker: Worker,
    private readonly progress: Progress,
  ) {
    worker.onmessage = ({ data }: MessageEvent<Reply>) => {
      if ('came' in data) return this.progress(data.came)
      this.waiting.get(data.id)?.(data)
      this.waiting.delete(data.id)
    }
    worker.onerror = (event) => {
      for (const [id, done] of this.waiting) done({ id, error: event.message || 'the worker stopped' })
      this.waiting.clear()
    }
  }

  /**
   * @param folder the address of LiteRT.js's WebAssembly files; ends with a slash.
   * @param program a .tflite file, which may still be on its way.
   * @param checks the size and sha256 of the files in the folder.
   * @param threads whether to use the build with threads, if the page is cross-origin isolated.
   * @param progress is told of WebAssembly's bytes as they come.
   */
  static async start(
    folder: string,
    program: Uint8Array | Promise<Uint8Array>,
    checks: Checks = { files: {}, cache: null },
    threads = globalThis.crossOriginIsolated,
    progress: Progress = () => {},
  ): Promise<Runtime> {
    const runtime = new Runtime(new Worker(new URL('./runtime.worker.ts', import.meta.url)), progress)
    let started: Started
    try {
      await runtime.ask({ kind: 'load', folder, threads, ...checks })
      started = (await runtime.ask({ kind: 'start', program: await program })) as Started
    } catch (error) {
      runtime.stop()
      if (!threads) throw error
      return Runtime.start(folder, program, checks, false, progress) // a browser without relaxed SIMD has no build with threads
    }
    return Object.assign(runtime, started)
  }

  /** Keeps an input, such as theta, in the worker for all later runs. */
  async keep(name: string, data: Numbers): Promise<void> {
    await this.ask({ kind: 'keep', name, data })
  }

  /** The shape of a signature's input. */
  shape(input: string, signature: string): number[] {
    const found = this.signatures[signature]?.[input]
    if (!found) throw new RuntimeError(`the program has no signature ${signature} with an input ${input}`)
    return found.shape
  }

  has(signature: string): boolean {
    return signature in this.signatures
  }

  async run(signature: string, inputs: Arrays): Promise<Ran> {
    const ran = (await this.ask({ kind: 'run', signature, inputs })) as Ran
    this.memory = ran.memory
    return ran
  }

  stop(): void {
    this.worker.terminate()
  }

  private ask(request: Unnumbered<Request>): Promise<unknown> {
    const id = this.next++
    return new Promise((resolve, reject) => {
      this.waiting.set(id, (reply) => {
        if ('error' in reply) reject(new RuntimeError(reply.error))
        else if ('value' in reply) resolve(reply.value)
      })
      this.worker.postMessage({ ...request, id })
    })
  }
}
