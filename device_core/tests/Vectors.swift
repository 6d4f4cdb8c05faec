// Computes what vectors.c computes, through DeviceClient: Vectors BUNDLE LIBLITERT FOLDER
import Foundation
import TfpflDevice

let (bundle, litert, folder) = (CommandLine.arguments[1], CommandLine.arguments[2], CommandLine.arguments[3])

func read<Number>(_ name: String, as type: Number.Type) throws -> [Number] {
    try Data(contentsOf: URL(fileURLWithPath: "\(folder)/\(name)")).withUnsafeBytes { Array($0.bindMemory(to: type)) }
}

func write<Number>(_ name: String, _ numbers: [Number]) throws {
    try numbers.withUnsafeBytes { Data($0) }.write(to: URL(fileURLWithPath: "\(folder)/\(name)"))
}

func keep(_ name: String, _ state: String) throws {
    try Data(contentsOf: URL(fileURLWithPath: state)).write(to: URL(fileURLWithPath: "\(folder)/\(name)"))
}

func refused(_ what: () throws -> Void) -> String {
    do {
        try what()
    } catch let error as TfpflError {
        return "\(error.status) \(error)"
    } catch {
        return "another error: \(error)"
    }
    return "not refused"
}

func compute() throws {
    let state = "\(folder)/state.bin"
    let client = try DeviceClient(bundle: bundle, state: state, litert: litert)
    let raw = try read("x.bin", as: Float.self)
    let theta = try read("theta.bin", as: Float.self)
    let n = raw.count / client.rawShape.reduce(1, *)
    let tokens = client.wholeNumbers ? try read("x.bin", as: Int32.self) : nil
    let x = tokens == nil ? try client.examplesOf(raw, count: n) : []
    let classes = client.kind == "classification"
    let examples: Examples
    if classes {
        let labels = try read("y.bin", as: Int32.self)
        examples = tokens.map { Examples(tokens: $0, labels: labels) } ?? Examples(x, labels: labels)
    } else {
        examples = Examples(x, targets: try read("y.bin", as: Float.self))
    }
    let predict = { n in try tokens.map { try client.predict(tokens: $0, count: n) } ?? client.predict(x, count: n) }
    if tokens == nil { try write("examples.bin", x) } else { try write("examples.bin", raw) }
    try write("features.bin", tokens.map { try client.features(tokens: $0, count: n) } ?? client.features(x, count: n))
    try write("probabilities.bin", predict(n))
    let found = try client.personalize(examples, onTraining: true)
    guard try client.score(examples) == found.after || found.after.accuracy.isNaN, found.kept, try !client.headIsStale
    else { fatalError("the scores") }
    try keep("personalized.bin", state)
    try write("float32.payload", client.round(theta: theta, examples: examples).payload)
    let before = try client.head
    let update = try client.round(theta: theta, examples: examples, payload: "int8")
    try write("int8.payload", update.payload)
    guard try client.head == before, update.numExamples == n, update.head != before else { fatalError("the round") }
    try client.commit(update)
    try keep("committed.bin", state)
    guard try client.head == update.head, try client.theta == theta, client.takesPartInRounds,
        client.exampleShape.reduce(n, *) == tokens?.count ?? x.count, client.numWeights == theta.count,
        update.head.kernel.count == client.numFeatures * client.numClasses
    else { fatalError("the client") }
    let (one, k) = (Array(x.prefix(x.count / n)), client.numClasses)
    let wrong = tokens.map { Examples(tokens: Array($0.prefix($0.count / n)), labels: [99]) }
        ?? (classes ? Examples(one, labels: [99]) : Examples(one, targets: [Float](repeating: 0, count: k + 1)))
    let other = try Head(kernel: Array(before.kernel.dropLast()), bias: before.bias, thetaSha256: before.thetaSha256)
    let lines = [
        refused { _ = try DeviceClient(bundle: "/nowhere/\u{1F600}", litert: litert) },
        refused { _ = try DeviceClient(bundle: bundle, litert: "/nowhere/lib.so") },
        refused { _ = try DeviceClient(bundle: "a\0b") },
        refused { _ = try predict(n + 1) },
        refused { _ = try predict(-1) },
        refused { _ = try tokens == nil ? client.features([], count: 0) : client.features(tokens: [], count: 0) },
        refused { _ = try tokens == nil ? client.features(tokens: [], count: 9) : client.features(x, count: 9) },
        refused { try client.personalize(wrong) },
        refused { try client.personalize(examples, heldOut: 2) },
        refused { try client.personalize(examples, steps: Int.min) },
        refused { try client.personalize(examples, beta: .nan) },
        refused { try client.personalize(examples, other: wrong) },
        refused { _ = try client.round(theta: Array(theta.prefix(3)), examples: examples) },
        refused { _ = try client.round(theta: theta, examples: examples, payload: "int4") },
        refused { try client.receive(theta: [Float](repeating: .nan, count: theta.count)) },
        refused { try client.startFrom(other) },
        refused { _ = try Head(kernel: [], bias: [], thetaSha256: [1]) },
    ]
    guard try client.head == update.head else { fatalError("a refusal changed the head") }
    try client.startFrom(before)
    guard try client.head == before, try client.headIsStale else { fatalError("the old head") }
    client.close()
    client.close()
    try write("refused.txt", Array((lines + [refused { _ = try client.head }]).joined(separator: "\n").utf8))
}

try compute()
