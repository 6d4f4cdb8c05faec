/** A person draws, names, learns, comes back: all of it with the mouse, in the built site. */
import { execFileSync } from 'node:child_process'
import { readFileSync } from 'node:fs'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import type { BrowserContext, Page } from 'playwright-core'
import { zipped } from '../src/zip'
import { fixture, noBrowser } from './browser'
import { draw, editKept, exported, hosted, learn, openPage, predicted, press, result, shown, teach, type Stroke } from './page'

const STROKES: Stroke[] = ['line', 'bar', 'ring']

describe.skipIf(noBrowser)('Learn me', () => {
  const site = hosted('site-cnn')
  let context: BrowserContext
  let page: Page

  beforeEach(async () => {
    context = await site.browser.newContext({ bypassCSP: true }) // so that tests may evaluate a function in the page
    page = await openPage(context, site.host.url)
  })
  afterEach(() => context?.close())

  async function teachAll(examples: number, from = 0, strokes = STROKES): Promise<void> {
    for (let i = from; i < from + examples; i++) {
      for (const [label, stroke] of strokes.entries()) await teach(page, label, stroke, i)
    }
  }

  const upload = (path: string) => page.locator('#import-file').setInputFiles(path)
  const uploadBytes = (bytes: Uint8Array) =>
    page.locator('#import-file').setInputFiles({ name: 'head.bin', mimeType: 'application/octet-stream', buffer: Buffer.from(bytes) })
  const exportedHead = async () => (await exported(page)).head
  const kept = async () => {
    // The page writes after it says what changed.
    await page.waitForTimeout(300)
  }

  it('learns three classes, keeps the head over a reload, adds a fourth, undoes and resets', async () => {
    expect(await predicted(page, 'line')).toEqual(['Keep it as “star”.', 0])
    await page.locator('#clear').click()
    await page.locator('#name-0').fill('upright')
    await page.locator('#name-1').fill('flat')
    await page.locator('#name-2').fill('ring')
    await page.locator('#pick-0').check()
    expect(await learn(page)).toMatch(/needs 3 examples.*“upright”, “flat”, “ring”/)

    await teachAll(3)
    const held = page.locator('#class-list canvas.held')
    expect(await held.count()).toBe(3)
    expect(await held.first().getAttribute('aria-label')).toBe('Example 3 of “upright”, set aside as a test')
    const said = await learn(page)
    expect(said).toMatch(/Learned: 3 of 3 drawings that were set aside are right, before 1\. \(300 steps/)
    expect(await page.locator('#before-right').textContent()).toBe('1 of 3 (33 %)')
    expect(await page.locator('#after-right').textContent()).toBe('3 of 3 (100 %)')

    const seen: Record<string, [string, number]> = {}
    for (const stroke of STROKES) seen[stroke] = await predicted(page, stroke, 3)
    expect(Object.fromEntries(Object.entries(seen).map(([stroke, [name]]) => [stroke, name]))).toEqual({ line: 'upright', bar: 'flat', ring: 'ring' })
    for (const [, percent] of Object.values(seen)) expect(percent).toBeGreaterThan(60)
    const exactly = await shown(page, 'line')
    const ring = await shown(page, 'ring')
    expect(JSON.parse(exactly)).toHaveLength(3)
    expect(ring).not.toBe(exactly)

    await kept()
    await page.reload()
    await page.waitForFunction(() => document.documentElement.dataset.ready)
    expect(await result(page)).toBe('Your head of 3 classes is back.')
    expect(await page.locator('#guess').textContent()).toBe('Draw something.')
    expect(await page.locator('#class-list canvas').count()).toBe(9)
    expect(await shown(page, 'line')).toBe(exactly)
    for (const stroke of STROKES) expect((await predicted(page, stroke, 3))[0]).toBe(seen[stroke]![0])

    // A fourth class: until it is learned, nothing changes; the old columns are where learning starts.
    await page.locator('#add-class').click()
    await page.locator('#name-3').fill('cross')
    await page.locator('#pick-3').check()
    expect(await shown(page, 'line')).toBe(exactly)
    for (let i = 0; i < 3; i++) await teach(page, 3, 'cross', i)
    expect(await page.locator('#class-list .count').nth(3).textContent()).toBe('3 drawn, 1 set aside, not learned yet')
    expect(await learn(page)).toMatch(/Learned: 4 of 4 drawings .* right, before 3/)
    expect(await page.locator('#before-loss').textContent()).toBe('knows not all classes')
    expect(await page.locator('#bars li').count()).toBe(0)
    expect((await predicted(page, 'ring', 4))[0]).toBe('ring')
    expect(await page.locator('#bars li').count()).toBe(4)

    await page.locator('#clear').click()
    await page.locator('#undo').click() // the second learning
    expect(await page.locator('#class-list .count').nth(3).textContent()).toMatch(/not learned yet/)
    expect(await shown(page, 'line')).toBe(exactly)

    page.on('dialog', (dialog) => void dialog.accept())
    await press(page, '#reset')
    await expect.poll(() => result(page)).toBe('All is forgotten.')
    await kept()
    await page.reload()
    await page.waitForFunction(() => document.documentElement.dataset.ready)
    expect(await page.locator('#class-list canvas').count()).toBe(0)
    expect(await predicted(page, 'line')).toEqual(['Keep it as “star”.', 0])
  })

  it('keeps what two tabs have drawn', async () => {
    const other = await openPage(context, site.host.url)
    await teach(page, 0, 'line', 0)
    await teach(other, 1, 'bar', 0)
    await expect.poll(() => result(other)).toMatch(/Another tab of this page has changed the drawings/)
    expect(await other.locator('#class-list canvas').count()).toBe(2)
    await kept()
    await other.close()
    await page.evaluate(() => dispatchEvent(new Event('focus'))) // all pages of a headless browser have the focus
    await expect.poll(() => page.locator('#class-list canvas').count()).toBe(2)
    await teach(page, 2, 'ring', 0)
    await kept()
    await page.reload()
    await page.waitForFunction(() => document.documentElement.dataset.ready)
    expect(await page.locator('#class-list .count').allTextContents()).toEqual(Array(3).fill('1 drawn, 0 set aside'))
  })

  it('refuses a kept head whose checksum is wrong: the one before it is in use', async () => {
    await teachAll(3)
    expect(await learn(page)).toMatch(/^Learned/)
    const first = await exportedHead()
    const before = await shown(page, 'ring')
    await teachAll(1, 3)
    expect(await learn(page)).toMatch(/^Learned/)
    expect(await exportedHead()).not.toEqual(first)
    expect(await shown(page, 'ring')).not.toBe(before)
    await kept()

    await editKept(page, (record) => (record.head![200]! ^= 1))
    await page.reload()
    await page.waitForFunction(() => document.documentElement.dataset.ready)
    expect(await result(page)).toMatch(/refused\. The head is damaged.*checksum.*The one before it is in use/)
    expect(await page.locator('#result').getAttribute('class')).toBe('error')
    expect(await exportedHead()).toEqual(first)
    expect(await shown(page, 'ring')).toBe(before)

    await editKept(page, (record) => {
      record.head![200]! ^= 2
      record.previous![300]! ^= 1
    })
    await page.reload()
    await page.waitForFunction(() => document.documentElement.dataset.ready)
    expect(await result(page)).toMatch(/refused.*The one before it is damaged, too/)
    expect(await predicted(page, 'ring')).toEqual(['Keep it as “star”.', 0])
    expect(await page.locator('#class-list canvas').count()).toBe(12) // the drawings are there, to learn from
    expect(await learn(page)).toMatch(/Learned/)
  })

  it('keeps the old head where the new one is not better on held-out drawings', async () => {
    await teachAll(3)
    expect(await learn(page)).toMatch(/^Learned/)
    const head = await exportedHead()
    // From now on, rings are kept as lines and lines as rings, except for those that are held out.
    for (const i of [3, 4]) {
      await teach(page, 0, 'ring', i)
      await teach(page, 2, 'line', i)
    }
    await teach(page, 0, 'line', 5)
    await teach(page, 2, 'ring', 5)
    for (const i of [6, 7]) {
      await teach(page, 0, 'ring', i)
      await teach(page, 2, 'line', i)
    }
    const [, after, before] = /Not better: (\d) of 5 drawings .* right, before (\d)\. It keeps what it knew/.exec(await learn(page)) ?? []
    expect(Number(after)).toBeLessThan(Number(before))
    expect(await exportedHead()).toEqual(head)
  })

  it('exports the head as a file of the bundle, and takes it back; of another backbone, never', async () => {
    expect(await page.locator('#export').isDisabled()).toBe(true)
    await upload(fixture('other.head'))
    await expect.poll(() => result(page)).toMatch(/belongs to another backbone/)
    expect(await predicted(page, 'line')).toEqual(['Keep it as “star”.', 0])
    await page.locator('#clear').click()

    await upload(fixture('same.head')) // four classes
    await expect.poll(() => result(page)).toBe('A head of 4 classes is in use.')
    expect(Buffer.from(await exportedHead())).toEqual(readFileSync(fixture('same.head')))
    const before = await shown(page, 'line')

    const damaged = await exportedHead()
    damaged[99]! ^= 1
    await uploadBytes(damaged)
    await expect.poll(() => result(page)).toMatch(/damaged or cut off/)
    await upload(fixture('other.head'))
    await expect.poll(() => result(page)).toMatch(/belongs to another backbone/)
    await upload(fixture('cnn', 'theta.bin'))
    await expect.poll(() => result(page)).toMatch(/not a head/)
    expect(await shown(page, 'line')).toBe(before)

    await teach(page, 0, 'line', 0)
    await uploadBytes(new Uint8Array(readFileSync(fixture('cnn', 'head.bin')))) // five classes, but four are drawn for
    await expect.poll(() => result(page)).toMatch(/has 5 classes and you have drawn 4/)
    await page.locator('#undo').click()
    await press(page, '#import-bundle')
    await expect.poll(() => result(page)).toMatch(/The head of client/)
    expect(await page.locator('#name-4').inputValue()).toBe('ring')
    expect(Buffer.from(await exportedHead())).toEqual(readFileSync(fixture('cnn', 'head.bin')))
  })

  it('exports the names of the classes with the head, and another browser takes both', async () => {
    for (const [label, name] of ['upright', 'flat “–”', '輪'].entries()) await page.locator(`#name-${label}`).fill(name)
    await teachAll(3)
    expect(await learn(page)).toMatch(/^Learned/)
    const before = await shown(page, 'ring')
    const { head, names } = await exported(page)
    expect(names).toEqual(['upright', 'flat “–”', '輪'])
    const [file] = await Promise.all([page.waitForEvent('download'), press(page, '#export')])
    expect(file.suggestedFilename()).toBe('head.zip')
    // Python's zipfile reads it, and checks the sums.
    const script = 'import sys, zipfile; z = zipfile.ZipFile(sys.argv[1]); assert z.testzip() is None; sys.stdout.buffer.write(z.read("head.bin"))'
    expect(new Uint8Array(execFileSync(process.env.TFPFL_WEB_PYTHON!, ['-c', script, await file.path()]))).toEqual(head)

    const other = await openPage(await site.browser.newContext({ bypassCSP: true }), site.host.url)
    await other.locator('#import-file').setInputFiles({ name: 'head.zip', mimeType: 'application/zip', buffer: readFileSync(await file.path()) })
    await expect.poll(() => result(other)).toBe('A head of 3 classes is in use.')
    for (const [label, name] of names.entries()) expect(await other.locator(`#name-${label}`).inputValue()).toBe(name)
    expect(await shown(other, 'ring')).toBe(before)
    const bad = zipped(new Map([['head.bin', head], ['names.json', new TextEncoder().encode('{}')]])) // prettier-ignore
    for (const [bytes, why] of [[bad, /names.json is damaged/], [zipped(new Map([['other', head]])), /holds no head.bin/]] as const) {
      await other.locator('#import-file').setInputFiles({ name: 'head.zip', mimeType: 'application/zip', buffer: Buffer.from(bytes) })
      await expect.poll(() => result(other)).toMatch(why)
    }
    expect(await shown(other, 'ring')).toBe(before)
    await other.context().close()
  })

  it('draws with one finger: a second one on the pad does nothing', async () => {
    const touch = await site.browser.newContext({ hasTouch: true, viewport: { width: 390, height: 844 } })
    const page = await openPage(touch, site.host.url)
    await page.locator('#pad').scrollIntoViewIfNeeded()
    const box = (await page.locator('#pad').boundingBox())!
    const at = (id: number, x: number, y: number) => ({ id, x: box.x + x * box.width, y: box.y + y * box.height })
    const session = await touch.newCDPSession(page)
    const send = (type: 'touchStart' | 'touchMove' | 'touchEnd', ...touchPoints: ReturnType<typeof at>[]) => session.send('Input.dispatchTouchEvent', { type, touchPoints }) // prettier-ignore
    await send('touchStart', at(1, 0.2, 0.2))
    await send('touchStart', at(1, 0.2, 0.2), at(2, 0.8, 0.8))
    for (let i = 1; i <= 5; i++) await send('touchMove', at(1, 0.2 + 0.1 * i, 0.2), at(2, 0.8 - 0.1 * i, 0.8))
    await send('touchEnd')
    const ink = await page.locator('#pad').evaluate((pad: HTMLCanvasElement) => {
      const { data } = pad.getContext('2d')!.getImageData(0, 0, pad.width, pad.height)
      const [columns, rows] = [new Set<number>(), new Set<number>()]
      for (let i = 0; i < pad.width * pad.height; i++) {
        if (data[4 * i]! > 128) continue
        columns.add((i % pad.width) / pad.width)
        rows.add(Math.floor(i / pad.width) / pad.height)
      }
      return [Math.min(...columns), Math.max(...columns), Math.min(...rows), Math.max(...rows)]
    })
    const half = 3 / 105 / 2 // of the pen's width
    for (const [i, edge] of [0.2 - half, 0.7 + half, 0.2 - half, 0.2 + half].entries()) expect(Math.abs(ink[i]! - edge)).toBeLessThan(0.01)
    await page.locator('#undo').click() // the one stroke that there is
    expect(await page.locator('#undo').isDisabled()).toBe(true)
    await touch.close()
  })

  it('shows and keeps a dot: a tap without a move, as on an i', async () => {
    await page.locator('#pad').click({ position: { x: 60, y: 60 } })
    const side = (await page.locator('#pad').boundingBox())!.width
    const ink = await page.locator('#pad').evaluate((pad: HTMLCanvasElement, at) => {
      const context = pad.getContext('2d')!
      const grey = (part: number) => context.getImageData(part * pad.width, part * pad.width, 1, 1).data[0]!
      return [grey(at), grey(at + 0.05)]
    }, 60 / side)
    expect(ink).toEqual([0, 255])
    await page.locator('#keep').click()
    const kept = page.locator('#class-list canvas')
    await expect.poll(() => kept.count()).toBe(1)
    const darkest = await kept.evaluate((c: HTMLCanvasElement) => Math.min(...c.getContext('2d')!.getImageData(0, 0, c.width, c.height).data.filter((_, i) => i % 4 === 0)))
    expect(darkest).toBeLessThan(150)
  })

  it('takes 2 to 16 classes, and no more than the program has room for', async () => {
    for (let i = 3; i < 16; i++) await page.locator('#add-class').click()
    expect(await page.locator('#class-list > li').count()).toBe(16)
    await page.locator('#add-class').click()
    await expect.poll(() => result(page)).toMatch(/room for 16 classes/)
    for (let i = 16; i > 2; i--) await page.locator('#remove-0').click()
    expect(await page.locator('#name-0').inputValue()).toBe('L')
    await page.locator('#remove-0').click()
    await expect.poll(() => result(page)).toMatch(/at least two classes/)
    expect(await page.locator('#class-list > li').count()).toBe(2)
    for (const [label, stroke] of (['line', 'ring'] as const).entries()) {
      for (let i = 0; i < 3; i++) await teach(page, label, stroke, i)
    }
    expect(await learn(page)).toMatch(/Learned: 2 of 2/)
  })

  it('undoes strokes, and the picture on the pad is what becomes the example', async () => {
    await draw(page, 'line')
    await draw(page, 'bar')
    await page.locator('#undo').click()
    await page.locator('#keep').click()
    await expect.poll(() => page.locator('#class-list canvas').count()).toBe(1)
    await draw(page, 'line')
    await page.locator('#keep').click()
    await expect.poll(() => page.locator('#class-list canvas').count()).toBe(2)
    const [cross, line] = await page.locator('#class-list canvas').evaluateAll((all) =>
      (all as HTMLCanvasElement[]).map((c) => [...c.getContext('2d')!.getImageData(0, 0, c.width, c.height).data]),
    )
    expect(cross).toEqual(line)
    expect(cross!.length).toBe(4 * 28 * 28)
    expect(cross!.filter((value) => value < 100).length).toBeGreaterThan(30)
  })

  it('works with the keyboard alone, on examples from the file', async () => {
    const enter = async (id: string) => {
      await page.locator(id).focus()
      await page.keyboard.press('Enter')
    }
    await page.locator('#pick-0').focus()
    await page.keyboard.press('ArrowRight')
    expect(await page.locator('#keep').textContent()).toBe('Keep as “house”')
    await page.keyboard.press('ArrowLeft')
    for (let i = 0; i < 3; i++) {
      for (let label = 0; label < 3; label++) {
        // The next class comes up by itself.
        await enter('#example')
        await expect.poll(() => result(page)).toMatch(/is on the pad/)
        await enter('#keep')
        await expect.poll(() => page.locator('#class-list > li').nth(label).locator('.strip canvas').count()).toBe(i + 1)
      }
    }
    await enter('#learn-button')
    await expect.poll(() => result(page)).toMatch(/^Learned: 3 of 3/)
    await enter('#example')
    await expect.poll(() => page.locator('#guess').textContent()).toMatch(/^“star”/) // its turn again
    await enter('#right')
    await expect.poll(() => result(page)).toMatch(/^(Learned|Not better): /)
    expect(await page.locator('#class-list > li').first().locator('.strip canvas').count()).toBe(4)
    expect(await page.locator('#guess').getAttribute('aria-live')).toBe('polite')
  })
})
