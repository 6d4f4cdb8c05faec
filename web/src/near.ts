/** Does something once, when a part of the page comes near the screen. */
export function whenNear(element: HTMLElement, work: () => unknown): void {
  if (!('IntersectionObserver' in globalThis)) return void work()
  const observer = new IntersectionObserver(
    (entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return
      observer.disconnect()
      work()
    },
    { rootMargin: '300px' },
  )
  observer.observe(element)
}
