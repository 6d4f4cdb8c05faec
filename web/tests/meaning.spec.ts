/** After learning: what the page says of it, and teaching with one tap; axe-core on the page as it is then. */
import { describe, expect, it } from 'vitest'
import { complaints } from './axe'
import { noBrowser } from './browser'
import { draw, hosted, learn, openPage, teach } from './page'

describe.skipIf(noBrowser)('after learning', () => {
  const site = hosted('site-cnn')

  for (const width of [390, 1280]) {
    for (const colorScheme of ['light', 'dark'] as const) {
      it(`the page says what it means, teaches with one tap, and passes WCAG 2.2 AA: ${width} pixels, ${colorScheme}`, async () => {
        const context = await site.browser.newContext({ viewport: { width, height: 844 }, colorScheme, hasTouch: width < 500, bypassCSP: true })
        const page = await openPage(context, site.host.url)
        expect(await complaints(page)).toEqual([])
        if (width < 500) {
          // Everything that the thumb needs is on the first screen.
          for (const id of ['#pad', '#class-chips label >> nth=2', '#keep', '#learn-button']) {
            const box = (await page.locator(id).boundingBox())!
            expect(box.y + box.height, id).toBeLessThanOrEqual(844)
          }
        }
        for (let i = 0; i < 3; i++) {
          for (const [label, stroke] of (['line', 'bar', 'ring'] as const).entries()) {
            expect(await page.locator(`#pick-${label}`).isChecked()).toBe(true) // the next class comes up by itself
            await teach(page, label, stroke, i)
          }
        }
        expect(await page.locator('#guess').textContent()).toBe('Press Learn.')
        expect(await page.locator('#meaning').isVisible()).toBe(false)
        expect(await learn(page)).toMatch(/^Learned: 3 of 3/)

        const sentence = (await page.locator('#verdict').textContent())!
        const [, pixels, all, taught] = /From your pixels alone: (\d) of (\d) right\. With what the others taught: (\d) of 3\./.exec(sentence)!.map(Number)
        expect([all, taught]).toEqual([3, 3])
        // The bars and the gallery say the same as the sentence.
        expect(await page.locator('#pixels-right').evaluate((meter: HTMLMeterElement) => [meter.value, meter.max])).toEqual([pixels, 3])
        expect(await page.locator('#tests li').count()).toBe(3)
        const marks = await page.locator('#tests dl > div:first-child dd').allTextContents()
        expect(marks.filter((mark) => mark.endsWith(', right'))).toHaveLength(pixels!)
        expect(await page.locator('#tests dl > div:last-child dd').allTextContents()).toEqual(['✓ star, right', '✓ house, right', '✓ wave, right'])

        const drawn = (label: number) => page.locator('#class-list > li').nth(label).locator('.strip canvas').count()
        await draw(page, 'ring', 3)
        await expect.poll(() => page.locator('#guess').textContent()).toMatch(/^“wave”/)
        expect(await complaints(page)).toEqual([])
        await page.locator('#right').click()
        await expect.poll(() => page.locator('#result').textContent()).toMatch(/^(Learned|Not better): .* of 3 /)
        expect(await drawn(2)).toBe(4)
        await draw(page, 'line', 4)
        await expect.poll(() => page.locator('#guess').textContent()).toMatch(/^“star”/)
        await page.locator('#is-1').click() // no, it is a house
        await expect.poll(() => drawn(1)).toBe(4)
        expect(await drawn(0)).toBe(3)
        expect(await page.locator('#answer').isVisible()).toBe(false)
        expect(await complaints(page)).toEqual([])
        await context.close()
      })
    }
  }

  it('the page says what the head that is in use means, not one before it', async () => {
    const page = await openPage(await site.browser.newContext({ bypassCSP: true }), site.host.url)
    for (let i = 0; i < 3; i++) for (const [label, stroke] of (['line', 'bar', 'ring'] as const).entries()) await teach(page, label, stroke, i)
    expect(await learn(page)).toMatch(/^Learned: 3 of 3/)
    const of = async () => [await page.locator('#tests li').count(), /With what the others taught: \d of (\d)/.exec((await page.locator('#verdict').textContent())!)?.[1]]
    expect(await of()).toEqual([3, '3'])
    await page.locator('#remove-0').click()
    await expect.poll(of).toEqual([2, '2'])
    await page.locator('#undo').click()
    await expect.poll(of).toEqual([3, '3'])
    await page.locator('#undo').click() // the learning
    await expect.poll(() => page.locator('#meaning').isVisible()).toBe(false)
    await page.context().close()
  })

  it('refuses a file that is no picture, and shows a photo as it will be kept', async () => {
    const page = await openPage(await site.browser.newContext({ bypassCSP: true }), site.host.url)
    await page.locator('#picture-file').setInputFiles({ name: 'notes.txt', mimeType: 'text/plain', buffer: Buffer.from('no') })
    await expect.poll(() => page.locator('#result').textContent()).toBe('notes.txt is no picture that this browser can read.')
    expect(await page.locator('#clear').isEnabled()).toBe(true)
    // White chalk on a board in a shadow, twice as wide as high; only the middle square counts.
    const photo = await page.evaluate(async () => {
      const canvas = new OffscreenCanvas(800, 400)
      const context = canvas.getContext('2d')!
      const shade = context.createLinearGradient(200, 0, 600, 0)
      shade.addColorStop(0, '#203830')
      shade.addColorStop(1, '#506860')
      context.fillStyle = shade
      context.fillRect(0, 0, 800, 400)
      context.strokeStyle = '#d8d8c8'
      context.lineWidth = 12
      context.strokeRect(300, 100, 200, 200)
      context.strokeRect(20, 100, 100, 200) // outside of the square
      return [...new Uint8Array(await (await canvas.convertToBlob({ type: 'image/jpeg', quality: 0.9 })).arrayBuffer())]
    })
    await page.locator('#picture-file').setInputFiles({ name: 'photo.jpg', mimeType: 'image/jpeg', buffer: Buffer.from(photo) })
    await expect.poll(() => page.locator('#result').textContent()).toMatch(/as it will be kept/)
    const grey = await page.locator('#pad').evaluate((pad: HTMLCanvasElement) => {
      const { data } = pad.getContext('2d')!.getImageData(0, 0, pad.width, pad.height)
      const at = (x: number, y: number) => data[4 * (Math.floor(y * pad.height) * pad.width + Math.floor(x * pad.width))]!
      return [at(0.25, 0.5), at(0.75, 0.5), at(0.5, 0.25), at(0.5, 0.75), at(0.5, 0.5), at(0.1, 0.1), at(0.9, 0.9), at(0.05, 0.5)]
    })
    for (const [i, value] of grey.entries()) expect(Math.abs(value - (i < 4 ? 0 : 255)), `${i}: ${value}`).toBeLessThan(40)
    await page.locator('#keep').click()
    await expect.poll(() => page.locator('#class-list canvas').count()).toBe(1)
    await page.context().close()
  })
})
