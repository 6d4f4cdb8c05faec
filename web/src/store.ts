/** What the browser stores: a head file and examples for each backbone, found by the hash of its theta. */
import { openDB, type DBSchema, type IDBPDatabase } from 'idb'
import type { Raw } from './source'

export interface Kept {
  names: string[]
  examples: { raw: Raw; label: number; heldOut: boolean }[]
  /** A head file (head.ts). */
  head: Uint8Array | null
  /** The head before it, which is used if `head` is damaged. */
  previous: Uint8Array | null
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

  load(thetaSha256: string): Promise<Kept | undefined> {
    return this.database.get('learners', thetaSha256)
  }

  async save(thetaSha256: string, kept: Kept): Promise<void> {
    await this.database.put('learners', kept, thetaSha256)
  }

  async forget(thetaSha256: string): Promise<void> {
    await this.database.delete('learners', thetaSha256)
  }

  /** The backbones that something is stored for. */
  backbones(): Promise<string[]> {
    return this.database.getAllKeys('learners')
  }
}
