/** What a browser keeps of a live run: its key, its number, the program, examples, the head, and an update on its way. */
import { openDB, type DBSchema, type IDBPDatabase } from 'idb'
import type { Phase } from './live_wire'
import type { Examples } from './npz'
import type { CodecNumbers } from './secure_codec'
import type { Held, Peer, Secrets } from './secure_exchange'
import { folder } from './site'

export interface Identity {
  key: CryptoKeyPair
  /** The enrolment token, until the server has taken the device in. */
  token: string | null
  member: Member | null
}

export interface Member {
  client: number
  classes: number
  rounds: number
  /** It has joined a run with secure rounds, and sends no update that is not masked. */
  secure?: boolean
}

/** The files of the server's bundle that a browser needs. */
export interface LiveBundle {
  manifest: Uint8Array
  program: Uint8Array
}

/** An update whose answer has not come yet. */
export interface Pending {
  round: number
  /** What is sent; if it is sent again, it is the same bytes. */
  body: Uint8Array
  /** The file of the head that becomes current if the server has counted the update. */
  head: Uint8Array
}

/** What a visit of a secure round has computed; never sent as it is. */
export interface SecureVisit {
  round: number
  theta: string
  gradient: Float32Array
  examples: number
  loss: number
  /** The file of the head that becomes current if the client is in the sum. */
  head: Uint8Array
}

/** What is kept of an attempt of a secure round, before anything of it is sent. */
export interface SecureAttempt {
  /** The round and the attempt. */
  key: [number, number]
  run: string
  codec: CodecNumbers
  weight: number
  secrets: Secrets
  threshold?: number
  peers?: Peer[]
  held?: [number, Held][]
  survivors?: number[]
  /** Why the client takes no part any more. */
  refused?: string
  /** One that is there is sent again as it is, and never made anew. */
  messages: Partial<Record<Phase, Uint8Array>>
}

export interface Counts {
  counted: number
  refused: number
  /** Bytes of updates that the server has answered. */
  sent: number
}

/** Whatever is written is on disk, whole, when the promise is fulfilled. */
export interface LiveStore {
  identity(): Promise<Identity | undefined>
  keepIdentity(identity: Identity): Promise<void>
  bundle(): Promise<LiveBundle | undefined>
  keepBundle(bundle: LiveBundle): Promise<void>
  examples(): Promise<Examples | undefined>
  keepExamples(examples: Examples): Promise<void>
  /** The file of the head. */
  head(): Promise<Uint8Array | undefined>
  keepHead(file: Uint8Array): Promise<void>
  pending(): Promise<Pending | undefined>
  keepPending(pending: Pending): Promise<void>
  counts(): Promise<Counts>
  /** The server has answered: forgets the update, and if it counts, makes its head current. All of it or nothing. */
  settle(pending: Pending, counted: boolean): Promise<void>
  visit(): Promise<SecureVisit | undefined>
  keepVisit(visit: SecureVisit): Promise<void>
  attempt(): Promise<SecureAttempt | undefined>
  keepAttempt(attempt: SecureAttempt): Promise<void>
  /** A secure round is over: forgets the visit and the secrets, and if it counts, makes its head current. */
  settleVisit(visit: SecureVisit, counted: boolean): Promise<void>
  forget(): Promise<void>
}

export const NO_COUNTS: Counts = { counted: 0, refused: 0, sent: 0 }

/** The counts after an answer. */
export function counted(counts: Counts, bytes: number, taken: boolean): Counts {
  return {
    counted: counts.counted + Number(taken),
    refused: counts.refused + Number(!taken),
    sent: counts.sent + bytes,
  }
}

/** The bytes of an attempt's messages. */
export function bytesOf(attempt: SecureAttempt | undefined): number {
  return Object.values(attempt?.messages ?? {}).reduce((sum, body) => sum + body.length, 0)
}

interface Kept {
  identity: Identity
  bundle: LiveBundle
  examples: Examples
  head: Uint8Array
  pending: Pending
  counts: Counts
  visit: SecureVisit
  attempt: SecureAttempt
}
type Name = keyof Kept

interface Schema extends DBSchema {
  device: { key: Name; value: Kept[Name] }
}

/** The name of what this browser keeps, and of the lock on it. Live servers of one origin have folders of their own. */
export function keptAs(): string {
  return folder() === '/' ? 'tfpfl-live' : `tfpfl-live ${folder()}`
}

export class BrowserStore implements LiveStore {
  private constructor(private readonly database: IDBPDatabase<Schema>) {}

  static async open(): Promise<BrowserStore> {
    const upgrade = (database: IDBPDatabase<Schema>) => void database.createObjectStore('device')
    return new BrowserStore(await openDB<Schema>(keptAs(), 1, { upgrade }))
  }

  identity = () => this.get('identity')
  keepIdentity = (identity: Identity) => this.write({ identity })
  bundle = () => this.get('bundle')
  keepBundle = (bundle: LiveBundle) => this.write({ bundle })
  examples = () => this.get('examples')
  keepExamples = (examples: Examples) => this.write({ examples })
  head = () => this.get('head')
  keepHead = (head: Uint8Array) => this.write({ head })
  pending = () => this.get('pending')
  keepPending = (pending: Pending) => this.write({ pending })

  async counts(): Promise<Counts> {
    return (await this.get('counts')) ?? NO_COUNTS
  }

  async settle(pending: Pending, taken: boolean): Promise<void> {
    const counts = counted(await this.counts(), pending.body.length, taken)
    await this.write(taken ? { head: pending.head, counts } : { counts }, 'pending')
  }

  visit = () => this.get('visit')
  keepVisit = (visit: SecureVisit) => this.write({ visit })
  attempt = () => this.get('attempt')
  keepAttempt = (attempt: SecureAttempt) => this.write({ attempt })

  async settleVisit(visit: SecureVisit, taken: boolean): Promise<void> {
    const counts = counted(await this.counts(), bytesOf(await this.attempt()), taken)
    await this.write(taken ? { head: visit.head, counts } : { counts }, 'visit', 'attempt')
  }

  async forget(): Promise<void> {
    await this.database.clear('device')
  }

  private get<N extends Name>(name: N): Promise<Kept[N] | undefined> {
    return this.database.get('device', name) as Promise<Kept[N] | undefined>
  }

  /** One transaction, which is over when the disk has it. */
  private async write(values: Partial<Kept>, ...without: Name[]): Promise<void> {
    const transaction = this.database.transaction('device', 'readwrite', { durability: 'strict' })
    const changes: Promise<unknown>[] = Object.entries(values).map(([name, value]) => transaction.store.put(value, name as Name))
    changes.push(...without.map((name) => transaction.store.delete(name)))
    await Promise.all([...changes, transaction.done])
  }
}
