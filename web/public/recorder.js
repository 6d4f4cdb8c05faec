/** Hands the samples of the microphone to the page: the mean of its channels, 128 at a time. It plays nothing. */
registerProcessor(
  'recorder',
  class extends AudioWorkletProcessor {
    process([channels]) {
      if (channels.length > 0) {
        this.port.postMessage(Float32Array.from(channels[0], (_, i) => channels.reduce((sum, channel) => sum + channel[i], 0) / channels.length))
      }
      return true
    }
  },
)
