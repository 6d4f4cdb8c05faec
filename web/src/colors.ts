/** Colours of classes (style.css); more classes than colours begin again. */
const COLORS = 16

export function classColor(label: number): string {
  return `var(--class-${label % COLORS})`
}
