// Client @@CLIENT@@: prediction, personalization of the head and a PFLEGO round, with TensorFlowLiteSwift on iOS.
// NOT COMPILED and not run on a phone: it was written against the source of TensorFlowLiteSwift's SignatureRunner. It
// does what tflite_export/device/client.py does, which is tested on @@RUNTIMES@@.
//
// Podfile: pod 'TensorFlowLiteSwift' // 2.14 or newer
// Resources: program_static.tflite, theta.bin, head.bin, labels.txt

import Foundation
import TensorFlowLite

let n = @@N@@  // examples of a call; fill up with zeros whose weight is 0
let p = @@P@@  // numbers in theta
let m = @@M@@  // features
let k = @@K@@  // classes
let pixels = @@PIXELS@@  // numbers in an example, shape @@SHAPE@@
let tau = @@TAU@@
let beta: Float32 = @@BETA@@
let headRate: Float32 = @@HEAD_RATE@@

struct Head {
  var kernel: Data  // float32 [m, k]
  var bias: Data  // float32 [k]
}

enum ClientError: Error { case badExamples(String) }

func data<T>(_ values: [T]) -> Data { values.withUnsafeBufferPointer { Data(buffer: $0) } }

/// At most n examples. `x` is float32, preprocessed as manifest.json says; `labels` are in 0..<k.
struct Examples {
  let count: Int
  let x: Data
  let labels: Data
  let weights: Data

  init(x: [[Float32]], labels: [Int32]) throws {
    guard (1...n).contains(x.count), labels.count == x.count else {
      throw ClientError.badExamples("take them in chunks of \(n), with weights 1 / their total number")
    }
    guard labels.allSatisfy({ (0..<Int32(k)).contains($0) }) else {
      throw ClientError.badExamples("a label is out of range")
    }
    guard x.allSatisfy({ $0.count == pixels && $0.allSatisfy { $0.isFinite } }) else {
      throw ClientError.badExamples("an example has another size, or is not finite")
    }
    count = x.count
    let padding = n - x.count
    self.x = data(x.flatMap { $0 } + [Float32](repeating: 0, count: padding * pixels))
    self.labels = data(labels + [Int32](repeating: 0, count: padding))
    weights = data(
      [Float32](repeating: 1 / Float32(x.count), count: x.count) + [Float32](repeating: 0, count: padding))
  }
}

final class Client {
  private let interpreter: Interpreter
  private let theta: Data
  private(set) var head: Head

  init(programPath: String, theta: Data, head: Head) throws {
    interpreter = try Interpreter(modelPath: programPath)
    self.theta = theta
    self.head = head
  }

  private func run(_ signature: String, _ inputs: [String: Data]) throws -> SignatureRunner {
    let runner = try interpreter.signatureRunner(with: signature)
    try runner.invoke(with: inputs)
    return runner
  }

  func predict(_ x: Data) throws -> Data {
    let inputs = ["theta": theta, "x": x, "kernel": head.kernel, "bias": head.bias]
    return try run("predict", inputs).output(named: "probabilities").data
  }

  /// The new head; keep it only if it beats the old one on examples that it was not fitted to.
  func personalize(_ e: Examples, steps: Int = tau - 1) throws -> Head {
    let phi = try run("features", ["theta": theta, "x": e.x]).output(named: "phi").data
    let out = try run(
      "personalize",
      [
        "phi": phi, "labels": e.labels, "weights": e.weights, "kernel": head.kernel, "bias": head.bias,
        "steps": data([Int32(steps)]), "beta": data([beta]),
      ])
    return Head(kernel: try out.output(named: "kernel").data, bias: try out.output(named: "bias").data)
  }
  // begin round

  /// A round: send `dtheta` and the number of examples, nothing else; the new head stays here.
  func round(newTheta: Data, _ e: Examples) throws -> (dtheta: Data, head: Head) {
    let out = try run(
      "round",
      [
        "theta": newTheta, "x": e.x, "labels": e.labels, "weights": e.weights, "kernel": head.kernel,
        "bias": head.bias, "steps": data([Int32(tau - 1)]), "beta": data([beta]), "rate": data([headRate]),
      ])
    let newHead = Head(kernel: try out.output(named: "kernel").data, bias: try out.output(named: "bias").data)
    return (try out.output(named: "dtheta").data, newHead)
  }
  // end round
}

/// The old file or the new one, never half of one. `content` is laid out as head.bin: see docs/on_device.md.
func saveHead(_ content: Data, to url: URL) throws {
  try content.write(to: url, options: .atomic)
}
