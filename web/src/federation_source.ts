/** The federation's part of the page: the live rounds of the site's host, a federation that the page plays, or both. */
import type { Bundle } from './bundle'
import { byId } from './elements'
import type { FederationLive } from './federation_live'
import { hasMembers } from './members'
import { part } from './part'
import type { Runtime } from './runtime'
import type { Site } from './site'

/** Shows the part, and the link to it, if the site has a federation. */
export function showFederation(site: Site): void {
  for (const id of ['federation', 'federation-link']) byId(id, HTMLElement).hidden = !site.live && !hasMembers(site)
}

/**
 * Fills the part.
 *
 * @param join shows the form with which this browser joins.
 * @returns the view of the live rounds, if there are some and its code has come.
 */
export async function openFederation(
  site: Site,
  bundle: Bundle,
  start: (program: Uint8Array) => Promise<Runtime>,
  join: () => void,
): Promise<FederationLive | null> {
  const played = hasMembers(site)
  byId('federation-source', HTMLFieldSetElement).hidden = !(site.live && played)
  const show = (which: string) => {
    byId('federation-live', HTMLElement).hidden = which !== 'live'
    byId('federation-played', HTMLElement).hidden = which !== 'played'
  }
  for (const radio of document.querySelectorAll<HTMLInputElement>('input[name="federation-source"]')) radio.onchange = () => show(radio.value)
  if (site.live || played) show(site.live ? 'live' : 'played')
  if (played) (await part('federation-status', () => import('./federation_page')))?.FederationPage.open(site, bundle, start)
  const live = site.live && (await part('crowd-status', () => import('./federation_live')))
  return live ? new live.FederationLive(join) : null
}
