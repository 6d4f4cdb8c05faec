/** What the browser stores: a head file and examples for each backbone, found by the hash of its theta. */
import { openDB, type DBSchema, type IDBPDatabase } from 'idb'
import { messageOf } from './elements'
import type { Raw } from './source'

export interface Kept {
  names: string[]
  examples: { raw: Raw; label: number; heldOut: boolean }[]
  /** A head file (head.ts). */
  head: Uint8Array | null
  /** The head before it, which is used if `head` is damaged. */
  previous: Uint8Array | null
  /** Another number after every change. */
  version?: number
}

interface Schema extends DBSchema {
  learners: { key: string; value: Kept }
}

export class Store {
  private constructor(private readonly database: IDBPDatabase<Schema>) {}

  static async open(): Promise<Store> {
    const upgrade = (database: IDBPDatabase<Schema>) => void database.createObjectStore('learners')
    return new Store(await openDB<Schema>('tfpfl', 1, { upgrade }))
  }

  close(): void {
    this.database.close()
  }

  load(thetaSha256: string): Promise<Kept | undefined> {
    return this.database.get('learners', thetaSha256)
  }

  /**
   * Replaces what is stored (null: deletes it), unless a tab has changed it since it had this version.
   *
   * @returns null, or what is there: then nothing was changed.
   */
  async replace(thetaSha256: string, kept: Kept | null, version: number | undefined): Promise<{ there: Kept | undefined } | null> {
    const transaction = this.database.transaction('learners', 'readwrite')
    const there = await transaction.store.get(thetaSha256)
    const changed = there?.version !== version
    if (!changed) await (kept ? transaction.store.put(kept, thetaSha256) : transaction.store.delete(thetaSha256))
    await transaction.done
    return changed ? { there } : null
  }

  /** The backbones that something is stored for. */
  backbones(): Promise<string[]> {
    return this.database.getAllKeys('learners')
  }
}

/** What a page finds when it is opened. */
export interface Found {
  /** Null: this browser keeps nothing. */
  store: Store | null
  kept: Kept | undefined
  /** Other backbones for which something is kept. */
  others: string[]
  /** A sentence for the visitor; empty if all is well. */
  problem: string
}

/** Reads what is kept for a backbone. What cannot be read stays as it is, and the page works without it. */
export async function openStore(thetaSha256: string): Promise<Found> {
  try {
    const store = await Store.open()
    const [kept, all] = await Promise.all([store.load(thetaSha256), store.backbones()])
    return { store, kept, others: all.filter((name) => name !== thetaSha256), problem: '' }
  } catch (error) {
    const problem = `This browser keeps nothing (${messageOf(error)}): what is learned lasts until the page is closed.`
    return { store: null, kept: undefined, others: [], problem }
  }
}
