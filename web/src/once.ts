/** Loads something when it is first asked for, and once; if that failed, it is loaded again when it is asked for again. */
export function once<T>(load: () => Promise<T>): () => Promise<T> {
  let found: Promise<T> | undefined
  return () => {
    const loading = (found ??= load())
    loading.catch(() => {
      if (found === loading) found = undefined
    })
    return loading
  }
}
