/** Complaints of axe-core about the page as it is now, by the rules of WCAG 2.2 AA. The context needs `bypassCSP`. */
import { readFileSync } from 'node:fs'
import type { Page } from 'playwright-core'

const AXE = readFileSync(new URL('../node_modules/axe-core/axe.min.js', import.meta.url), 'utf8')
const RULES = ['wcag2a', 'wcag2aa', 'wcag21aa', 'wcag22aa']
interface Axe {
  run(options: object): Promise<{ violations: { id: string; nodes: { html: string; failureSummary: string }[] }[] }>
}

/** All that is folded up is opened first, because axe-core does not look at what is hidden. */
export async function complaints(page: Page): Promise<string[]> {
  await page.locator('details').evaluateAll((all) => (all as HTMLDetailsElement[]).forEach((one) => (one.open = true)))
  await page.evaluate(AXE)
  const found = await page.evaluate((values) => (globalThis as unknown as { axe: Axe }).axe.run({ runOnly: { type: 'tag', values } }), RULES)
  return found.violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => `${node.html} ${node.failureSummary}`).join(' | ')}`)
}
