/** Signs as polylines, and a hand that draws them on the page's pad. */

export type Point = [number, number] // in [-1, 1]; y goes down
export type Sign = Point[][]

export const arc = (from: number, to: number, radius: number, x = 0, y = 0): Point[] =>
  Array.from({ length: 25 }, (_, i) => {
    const angle = Math.PI * (from + ((to - from) * i) / 24)
    return [x + radius * Math.cos(angle), y + radius * Math.sin(angle)]
  })
/** Numbers in [0, 1) from a seed (mulberry32). */
export function numbers(seed: number): () => number {
  let state = seed
  return () => {
    state = (state + 0x6d2b79f5) | 0
    let t = Math.imul(state ^ (state >>> 15), 1 | state)
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296
  }
}

/** A sign as a hand draws it: turned by up to 10 degrees, slanted, stretched, moved, and not quite steady. */
export function byHand(sign: Sign, random: () => number): Sign {
  const within = (low: number, high: number) => low + (high - low) * random()
  const [angle, slant, wide, high] = [within(-0.17, 0.17), within(-0.12, 0.12), within(0.8, 1.1), within(0.8, 1.1)]
  const [right, down] = [within(-0.12, 0.12), within(-0.12, 0.12)]
  return sign.map((stroke) => {
    const [bend, phase] = [within(0, 0.04), within(0, 2 * Math.PI)]
    return stroke.map(([u, v], i): Point => {
      const [x, y] = [wide * u + slant * v + bend * Math.sin(0.5 * i + phase), high * v + bend * Math.cos(0.4 * i + phase)]
      return [Math.cos(angle) * x - Math.sin(angle) * y + right, Math.sin(angle) * x + Math.cos(angle) * y + down]
    })
  })
}

export interface Drawing {
  label: number
  sign: Sign
}

/** In the browser: draws with a pointer, reads the guess if there is one to come, and keeps the drawing. Returns the guessed classes. */
export async function drawAll({ drawings, guesses }: { drawings: Drawing[]; guesses: boolean }): Promise<number[]> {
  const get = (id: string) => document.getElementById(id)!
  const until = async (done: () => boolean) => {
    for (let i = 0; !done(); i++) {
      if (i > 3000) throw new Error(`the page says: ${get('guess').textContent} ${get('result').textContent}`)
      await new Promise((next) => setTimeout(next, 5))
    }
  }
  const pad = get('pad')
  const found: number[] = []
  for (const { label, sign } of drawings) {
    const box = pad.getBoundingClientRect()
    const send = (type: string, [x, y]: Point) =>
      pad.dispatchEvent(
        new PointerEvent(type, { pointerId: 1, button: 0, bubbles: true, cancelable: true, clientX: box.left + (box.width * (1 + x)) / 2, clientY: box.top + (box.height * (1 + y)) / 2 }),
      )
    for (const stroke of sign) {
      send('pointerdown', stroke[0]!)
      for (const point of stroke.slice(1)) send('pointermove', point)
      send('pointerup', stroke.at(-1)!)
    }
    if (guesses) {
      await until(() => get('guess').dataset.label !== '' && get('guess').dataset.label !== undefined)
      await new Promise((next) => setTimeout(next, 30)) // the guess of the whole drawing
      found.push(Number(get('guess').dataset.label))
    }
    const count = document.querySelectorAll('#class-list canvas').length
    get(`pick-${label}`).click()
    get('keep').click()
    await until(() => document.querySelectorAll('#class-list canvas').length === count + 1 && !get('guess').dataset.label)
  }
  return found
}
