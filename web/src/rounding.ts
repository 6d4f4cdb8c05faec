/** Rounds as NumPy and IEEE 754 do. */
export function halfToEven(value: number): number {
  const low = Math.floor(value)
  const rest = value - low
  return rest > 0.5 || (rest === 0.5 && low % 2 !== 0) ? low + 1 : low
}
