/** Finds and makes elements of the page. */

/** The element with this id. @throws Error: the page has no such element of this kind. */
export function byId<T extends Element>(id: string, kind: new () => T): T {
  const found = document.getElementById(id)
  if (!(found instanceof kind)) throw new Error(`the page has no ${kind.name} #${id}`)
  return found
}

export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  properties: Partial<HTMLElementTagNameMap[K]> = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const element = Object.assign(document.createElement(tag), properties)
  element.append(...children)
  return element
}

export function download(name: string, bytes: Uint8Array): void {
  const url = URL.createObjectURL(new Blob([bytes as Uint8Array<ArrayBuffer>], { type: 'application/octet-stream' }))
  make('a', { href: url, download: name }).click()
  setTimeout(() => URL.revokeObjectURL(url), 10_000)
}

export function bytesText(bytes: number): string {
  return `${bytes.toLocaleString('en')} bytes`
}

export function kilobytes(bytes: number): string {
  return bytes < 1e6 ? `${Math.round(bytes / 1000).toLocaleString('en')} kB` : `${(bytes / 1e6).toFixed(1)} MB`
}

export function percent(part: number): string {
  return `${(100 * part).toFixed(0)} %`
}

export function millisecondsText(value: number): string {
  return value < 10 ? `${value.toFixed(1)} ms` : `${Math.round(value).toLocaleString('en')} ms`
}

export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error)
}
