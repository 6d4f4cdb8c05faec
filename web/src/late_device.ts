/** The device before its program has come: what is asked of it waits. */
import type { Device, Fitted } from './device'
import type { Head } from './head'

/** What learning needs of a device. */
export type Computer = Pick<Device, 'features' | 'room' | 'phi' | 'fitHead'>

export class LateDevice implements Computer {
  /** Whether the program runs. */
  ready = false

  constructor(
    readonly features: number,
    readonly room: number,
    private readonly opened: Promise<Device>,
  ) {
    void opened.then(
      () => (this.ready = true),
      () => undefined, // whoever asks hears of it
    )
  }

  async phi(x: Float32Array): Promise<Float32Array> {
    return (await this.opened).phi(x)
  }

  async fitHead(phi: Float32Array, labels: Int32Array, head: Head, steps: number, beta: number, safeguard?: boolean): Promise<Fitted> {
    return (await this.opened).fitHead(phi, labels, head, steps, beta, safeguard)
  }
}
