/** Runs the exported program by LiteRT.js, beside the page, which stays responsive meanwhile. */
import { getGlobalLiteRt, loadAndCompile, loadLiteRt, Tensor, type CompiledModel } from '@litertjs/core'
import type { Arrays, Numbers, Reply, Request, Signature, Started } from './runtime'

interface Scope {
  Module?: { mainScriptUrlOrBlob: string; locateFile: (file: string) => string }
  onmessage: ((event: MessageEvent<Request>) => void) | null
  postMessage(message: Reply, transfer: Transferable[]): void
}

const scope = self as unknown as Scope
const kept = new Map<string, Numbers>()
let model: CompiledModel | undefined

/** WebAssembly memory grows and never shrinks: its size is the largest that was needed so far. */
function memory(): number {
  return (getGlobalLiteRt().liteRtWasm as unknown as { HEAPU8: Uint8Array }).HEAPU8.length
}

async function start(request: Request & { kind: 'start' }): Promise<Started> {
  // In a worker, the threaded build would take the worker's own script for its threads.
  const script = `litert_wasm${request.threads ? '_threaded' : ''}_internal.js`
  scope.Module = {
    mainScriptUrlOrBlob: new URL(script, request.folder).href,
    locateFile: (file) => new URL(file, request.folder).href,
  }
  await loadLiteRt(request.folder, { threads: request.threads })
  model = await loadAndCompile(request.program, { accelerator: 'wasm' })
  const signatures: Record<string, Signature> = {}
  for (const [name, signature] of Object.entries(model.signatures)) {
    signatures[name] = Object.fromEntries(
      signature.getInputDetails().map((d) => [d.name, { dtype: d.dtype, shape: [...d.shape] }]),
    )
  }
  const loaded = performance.getEntriesByType('resource').map((entry) => new URL(entry.name).pathname.split('/').at(-1)!)
  const files = [...new Set(loaded.filter((file) => file.startsWith('litert_wasm')))]
  return { signatures, threads: model.options.cpuOptions.numThreads ?? 1, memory: memory(), files }
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
  if (request.kind === 'start') return { id: request.id, value: await start(request) }
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
