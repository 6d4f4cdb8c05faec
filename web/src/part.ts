/** Parts of the page whose code comes later. */
import { byId, messageOf } from './elements'

/** Loads the code of a part. Where it does not come, the part says so, and the rest of the page goes on without it. */
export async function part<T>(status: string, load: () => Promise<T>): Promise<T | null> {
  try {
    return await load()
  } catch (error) {
    const found = byId(status, HTMLElement)
    found.textContent = `This part of the page could not be loaded (${messageOf(error)}). Open the page again.`
    found.classList.add('error')
    return null
  }
}
