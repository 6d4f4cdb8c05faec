/** Runs the exported program by LiteRT.js in a worker, so that the page stays responsive. */
import { Environment, getGlobalLiteRt, loadAndCompile, loadLiteRt, supportsFeature, Tensor, type CompiledModel } from '@litertjs/core'
import type { Arrays, Numbers, Reply, Request, Signature, Started } from './runtime'
import { content, packed } from './transfer'

interface Scope {
  Module?: {
    mainScriptUrlOrBlob: string
    locateFile: (file: string) => string
    wasmBinary: Uint8Array
    printErr: (line: string) => void
  }
  onmessage: ((event: MessageEvent<Request>) => void) | null
  postMessage(message: Reply, transfer: Transferable[]): void
}

const scope = self as unknown as Scope
const kept = new Map<string, Numbers>()
let model: CompiledModel | undefined

// Without this, LiteRT.js asks for a GPU that it does not need here, and complains where there is none.
const create = Environment.create.bind(Environment)
Environment.create = (options) => create({ webGpuDevice: null, ...options })

/** WebAssembly memory grows and never shrinks: its size is the largest that was needed so far. */
function memory(): number {
  return (getGlobalLiteRt().liteRtWasm as unknown as { HEAPU8: Uint8Array }).HEAPU8.length
}

type Load = Request & { kind: 'load' }

/** LiteRT.js's WebAssembly, from the cache that is for offline or from the host; checked, and put into the cache. */
async function webAssembly(file: string, { id, folder, files, cache: name }: Load): Promise<Uint8Array> {
  const found = files[file]
  const url = new URL(found && packed(found) ? `${file}.gz` : file, folder).href
  const tell = (came: number) => scope.postMessage({ id, came }, [])
  // A browser that lets pages store nothing refuses a cache, too.
  const cache = name !== null && 'caches' in globalThis ? await caches.open(name).catch(() => null) : null
  const kept = await cache?.match(url)
  const whole = kept && (await content(file, kept, found, tell).catch(() => null))
  if (whole) return whole
  if (kept) await cache!.delete(url) // or else the service worker would answer with it again
  const response = await fetch(url)
  const copy = response.clone()
  const bytes = await content(file, response, found, tell)
  await cache?.put(url, copy).catch(() => undefined) // no room: it works, but not offline
  return bytes
}

let used: string[] = []

async function load(request: Load): Promise<void> {
  const kind = request.threads ? '_threaded' : (await supportsFeature('relaxedSimd')) ? '' : '_compat'
  const files = [`litert_wasm${kind}_internal.js`, `litert_wasm${kind}_internal.wasm`] as const
  scope.Module = {
    // In a worker, the threaded build would take the worker's own script for its threads.
    mainScriptUrlOrBlob: new URL(files[0], request.folder).href,
    locateFile: (file) => new URL(file, request.folder).href,
    wasmBinary: await webAssembly(files[1], request),
    // LiteRT writes news of its start as if they were errors; and a browser has no NPU.
    printErr: (line) => {
      if (!/^INFO:|npu_registry/.test(line)) console.warn(line)
    },
  }
  await loadLiteRt(request.folder, { threads: request.threads })
  used = [...files]
}

async function start(program: Uint8Array): Promise<Started> {
  model = await loadAndCompile(program, { accelerator: 'wasm' })
  const signatures: Record<string, Signature> = {}
  for (const [name, signature] of Object.entries(model.signatures)) {
    signatures[name] = Object.fromEntries(
      signature.getInputDetails().map((d) => [d.name, { dtype: d.dtype, shape: [...d.shape] }]),
    )
  }
  return { signatures, threads: model.options.cpuOptions.numThreads ?? 1, memory: memory(), files: used }
}

async function run(signature: string, inputs: Arrays): Promise<{ outputs: Arrays; milliseconds: number }> {
  const runner = model?.signatures[signature]
  if (!model || !runner) throw new Error(`the program has no signature ${signature}`)
  const tensors: Record<string, Tensor> = {}
  const outputs: Arrays = {}
  let found: Record<string, Tensor> = {}
  const begin = performance.now()
  try {
    for (const { name, shape } of runner.getInputDetails()) {
      const data = inputs[name] ?? kept.get(name)
      if (!data) throw new Error(`${signature} needs the input ${name}`)
      tensors[name] = new Tensor(data, [...shape])
    }
    found = await model.run(signature, tensors)
    for (const [name, tensor] of Object.entries(found)) outputs[name] = (await tensor.data()).slice() as Numbers
  } finally {
    for (const tensor of [...Object.values(tensors), ...Object.values(found)]) tensor.delete()
  }
  return { outputs, milliseconds: performance.now() - begin }
}

async function answer(request: Request): Promise<Reply> {
  if (request.kind === 'load') {
    await load(request)
    return { id: request.id, value: null }
  }
  if (request.kind === 'start') return { id: request.id, value: await start(request.program) }
  if (request.kind === 'keep') {
    kept.set(request.name, request.data)
    return { id: request.id, value: null }
  }
  return { id: request.id, value: { ...(await run(request.signature, request.inputs)), memory: memory() } }
}

// One request after the other.
let last: Promise<void> = Promise.resolve()
scope.onmessage = ({ data }) => {
  last = last.then(async () => {
    try {
      scope.postMessage(await answer(data), [])
    } catch (error) {
      scope.postMessage({ id: data.id, error: error instanceof Error ? error.message : String(error) }, [])
    }
  })
}
