/** The modules of the page by name, for tests that compute in a browser. */
import * as litert from '@litertjs/core'
import * as bundle from '../../src/bundle'
import { Device } from '../../src/device'
import { Federation } from '../../src/federation'
import * as head from '../../src/head'
import { openMembers } from '../../src/members'
import { openSite } from '../../src/site'
import { BrowserStore } from '../../src/live_store'
import { newKey, publicText, stamp } from '../../src/live_wire'
import { Runtime } from '../../src/runtime'
import { readSafetensors } from '../../src/safetensors'
import { relativeDifference } from '../../src/client_page'
import { decodedSound, spoken } from '../../src/sound'
import { safeRate } from '../../src/learner'
import { probabilities } from '../../src/scores'
import { secureVectors } from './secure_vectors'

const harness = { litert, ...bundle, ...head, Device, Runtime, readSafetensors, relativeDifference, BrowserStore, Federation, openMembers, openSite, newKey, publicText, stamp, secureVectors, decodedSound, spoken, safeRate, probabilities }
export type Harness = typeof harness
declare global {
  var harness: Harness
}
globalThis.harness = harness
