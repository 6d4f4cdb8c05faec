/** In the browser, for `page.evaluate`: the lowest contrast of a text with what is behind it (WCAG's ratio); letters in pictures too. */
export function lowestContrast(): number {
  const channels = (color: string) => (color.match(/[\d.]+/g) ?? []).map(Number)
  const luminance = (color: string) => {
    const [r, g, b] = channels(color).slice(0, 3).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4)) // prettier-ignore
    return 0.2126 * r! + 0.7152 * g! + 0.0722 * b!
  }
  const behind = (element: Element | null): string => {
    if (!element) return 'rgb(255, 255, 255)'
    const color = getComputedStyle(element).backgroundColor
    return (channels(color)[3] ?? 1) === 0 ? behind(element.parentElement) : color
  }
  let lowest = 21
  const compare = (color: string, element: Element) => {
    const [a, b] = [luminance(color), luminance(behind(element))]
    lowest = Math.min(lowest, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05))
  }
  for (const element of document.querySelectorAll<HTMLElement>('body *:not(svg *)')) {
    const own = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent!.trim())
    if (own && element.checkVisibility()) compare(getComputedStyle(element).color, element)
  }
  for (const letter of document.querySelectorAll('svg [id*="text_"] use')) compare(getComputedStyle(letter).fill, letter)
  return lowest
}
