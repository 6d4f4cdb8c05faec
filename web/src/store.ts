/** What is kept in the browser: heads as checked files, and drawings, for every backbone by the hash of its theta. */
import { openDB, type DBSchema, type IDBPDatabase } from 'idb'

export interface Kept {
  names: string[]
  examples: { raw: Uint8Array; label: number; heldOut: boolean }[]
  /** A head file (head.ts). */
  head: Uint8Array | null
  /** The one before it, which is taken where `head` is damaged. */
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

  /** Backbones that something is kept for. */
  backbones(): Promise<string[]> {
    return this.database.getAllKeys('learners')
  }
}
