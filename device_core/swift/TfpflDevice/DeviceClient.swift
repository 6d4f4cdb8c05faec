// What an app does with a bundle of tfpfl, on iOS, macOS or Linux: the core in C behind a Swift class.
//
//     let client = try DeviceClient(bundle: folder.path, state: head.path, litert: library.path)
//     try client.personalize(examples)
//     let update = try client.round(theta: theta, examples: examples)
//     send(update.payload, update.numExamples)
//     try client.commit(update)                        // when the server has taken them
//
// It needs the standard library only, not Foundation.

import CTfpflDevice

/// One client. All functions throw `TfpflError`; the head has not changed then, but for an error which says that its
/// file is the new one.
///
/// A client is used by one thread at a time, such as in an actor, and not by the main thread, since a round may take
/// seconds. Its memory is freed by `close`, or with the object.
public final class DeviceClient {
    private var handle: OpaquePointer?
    private let model: tfpfl_model

    /// - Parameters:
    ///   - bundle: the folder that the export wrote.
    ///   - state: the file that keeps the head between starts; nil: it is kept in memory only. Its folder should be in
    ///     no backup (`isExcludedFromBackup`): the head must not leave the device.
    ///   - litert: the path of LiteRT's library; nil: libLiteRt.dylib (.so), wherever the system finds it.
    ///   - trunk: the file of the frozen trunk, such as trunk_int8.tflite; nil: an exact one.
    public init(bundle: String, state: String? = nil, litert: String? = nil, trunk: String? = nil) throws {
        var opened: OpaquePointer?
        let status = try withText(bundle) { folder in
            try withText(state) { file in
                try withText(litert) { library in
                    try withText(trunk) { below in
                        var options = tfpfl_options()
                        (options.state, options.litert, options.trunk) = (file, library, below)
                        return tfpfl_open(folder, &options, &opened)
                    }
                }
            }
        }
        guard status == 0, let opened else {
            defer { tfpfl_close(opened) }
            throw TfpflError(status: status, message: String(cString: tfpfl_error(opened)))
        }
        handle = opened
        model = tfpfl_describe(opened).pointee
    }

    deinit { close() }

    /// Frees the client. What is called later throws.
    public func close() {
        tfpfl_close(handle)
        handle = nil
    }

    public var numFeatures: Int { model.num_features }
    public var numClasses: Int { model.num_classes }
    public var numWeights: Int { model.num_backbone_weights }
    public var takesPartInRounds: Bool { model.rounds != 0 }
    /// Of one example, as all functions but `examplesOf` take it.
    public var exampleShape: [Int] { shape(model.example_shape, model.dimensions) }
    /// Of one preprocessed example, before the frozen trunk; without one the same as `exampleShape`.
    public var rawShape: [Int] { shape(model.raw_shape, model.raw_dimensions) }
    /// Whether examples are whole numbers, such as tokens; they are below `numTokens`, if that is not 0.
    public var wholeNumbers: Bool { model.whole_numbers != 0 }
    public var numTokens: Int { Int(model.num_tokens) }
    /// What the head is for: classification, multilabel, regression, poisson, quantile:Q or huber:DELTA.
    public var kind: String {
        withUnsafeBytes(of: model.kind) { String(decoding: $0.prefix { $0 != 0 }, as: UTF8.self) }
    }

    /// The weights of the backbone.
    public var theta: [Float] {
        get throws { Array(UnsafeBufferPointer(start: tfpfl_theta(try open()), count: numWeights)) }
    }

    /// The client's head.
    public var head: Head {
        get throws { Head(tfpfl_current_head(try open()).pointee) }
    }

    /// Whether theta has changed since the head was fitted. The head still works; `personalize` fits it again.
    public var headIsStale: Bool {
        get throws { tfpfl_head_is_stale(try open()) != 0 }
    }

    /// Replaces theta; the head stays as it is.
    public func receive(theta: [Float]) throws {
        let client = try open()
        try done(theta.withUnsafeBufferPointer { tfpfl_receive(client, $0.baseAddress, $0.count) })
    }

    /// Replaces the head, and saves it.
    public func startFrom(_ head: Head) throws {
        let client = try open()
        try done(head.withC { given in tfpfl_start_from(client, &given) })
    }

    /// The examples that all other functions take, from `count` preprocessed ones. In a bundle with a frozen trunk they
    /// are its output: compute it once for each example, and keep it. In any other bundle they are `raw` itself; tokens
    /// are given as they are.
    public func examplesOf(_ raw: [Float], count: Int) throws -> [Float] {
        let given = Examples(x: raw)
        return try rows(given, count, each: model.raw_numbers, columns: model.example_numbers) { client, given, out in
            tfpfl_examples_of(client, given.pointee.x, given.pointee.numbers, given.pointee.count, out)
        }
    }

    /// The features of `count` examples: [count, M], row after row.
    public func features(_ x: [Float], count: Int) throws -> [Float] { try features(Examples(x: x), count) }

    public func features(tokens: [Int32], count: Int) throws -> [Float] {
        try features(Examples(x: nil, tokens: tokens), count)
    }

    /// The predictions for `count` examples, [count, K], row after row: for classes their probabilities.
    public func predict(_ x: [Float], count: Int) throws -> [Float] { try predict(Examples(x: x), count) }

    public func predict(tokens: [Int32], count: Int) throws -> [Float] {
        try predict(Examples(x: nil, tokens: tokens), count)
    }

    public func score(_ examples: Examples) throws -> Scores {
        let client = try open()
        var found = tfpfl_scores()
        try done(examples.withC(numClasses) { given in tfpfl_score(client, &given, &found) })
        return Scores(found)
    }

    /// Fits the head by gradient steps, and keeps it if it is better on held-out examples: on `other`, on the training
    /// examples themselves (`onTraining`), or on the part `heldOut` of the examples. nil: the run's steps and rate.
    @discardableResult
    public func personalize(
        _ examples: Examples, steps: Int? = nil, beta: Double? = nil, heldOut: Double = 0.25, onTraining: Bool = false,
        other: Examples? = nil
    ) throws -> Personalized {
        let client = try open()
        var (fit, found) = (tfpfl_fit(), tfpfl_personalized())
        tfpfl_default_fit(client, &fit)
        if let steps { fit.steps = Int32(clamping: steps) }
        if let beta { fit.beta = beta }
        fit.held_out = heldOut
        fit.on_training = onTraining ? 1 : 0
        try done(
            examples.withC(numClasses) { given in
                guard let other else { return tfpfl_personalize(client, &given, &fit, &found) }
                return other.withC(numClasses) { held in
                    withUnsafePointer(to: held) { pointer in
                        fit.other = pointer
                        return tfpfl_personalize(client, &given, &fit, &found)
                    }
                }
            })
        return Personalized(
            kept: found.kept != 0, before: Scores(found.before), after: Scores(found.after),
            lossBefore: found.loss_before, loss: found.loss)
    }

    /// Takes part in a round. The client's head does not change until `commit`. `payload`: "float32" or "int8".
    public func round(theta: [Float], examples: Examples, payload: String = "float32") throws -> Update {
        let client = try open()
        var update = tfpfl_update()
        defer { tfpfl_update_free(&update) }
        let status = try withText(payload) { kind in
            theta.withUnsafeBufferPointer { weights in
                examples.withC(numClasses) { given in
                    tfpfl_round(client, weights.baseAddress, weights.count, &given, kind, &update)
                }
            }
        }
        try done(status)
        return Update(
            payload: Array(UnsafeBufferPointer(start: update.payload, count: update.payload_bytes)),
            numExamples: Int(update.num_examples), loss: update.loss, head: Head(update.head))
    }

    /// Makes the head of a round current when the server has taken the update, and saves it.
    public func commit(_ update: Update) throws {
        let client = try open()
        try done(
            update.head.withC { head in
                var given = tfpfl_update()
                given.head = head
                return tfpfl_commit(client, &given)
            })
    }

    // MARK: - What all of them need

    private func open() throws -> OpaquePointer {
        guard let handle else { throw TfpflError(status: 0, message: "this client is closed") }
        return handle
    }

    private func done(_ status: Int32) throws {
        if status != 0 { throw TfpflError(status: status, message: String(cString: tfpfl_error(handle))) }
    }

    private func features(_ given: Examples, _ count: Int) throws -> [Float] {
        try rows(given, count, each: model.example_numbers, columns: numFeatures) { tfpfl_features($0, $1, $2) }
    }

    private func predict(_ given: Examples, _ count: Int) throws -> [Float] {
        try rows(given, count, each: model.example_numbers, columns: numClasses) { tfpfl_predict($0, $1, $2) }
    }

    private func rows(
        _ examples: Examples, _ count: Int, each: Int, columns: Int,
        _ compute: (OpaquePointer, UnsafePointer<tfpfl_examples>, UnsafeMutablePointer<Float>?) -> Int32
    ) throws -> [Float] {
        let client = try open()
        // Where the numbers are not those of `count` examples the core refuses them, and writes nothing.
        let fits = count >= 0 && examples.numbers % each == 0 && examples.numbers / each == count
        var out = [Float](repeating: 0, count: fits ? count * columns : 0)
        let status = out.withUnsafeMutableBufferPointer { found in
            examples.withC(numClasses, count: max(count, 0)) { compute(client, &$0, found.baseAddress) }
        }
        try done(status)
        return out
    }
}

private func shape<Numbers>(_ numbers: Numbers, _ dimensions: Int) -> [Int] {
    withUnsafeBytes(of: numbers) { $0.bindMemory(to: UInt32.self).prefix(dimensions).map(Int.init) }
}

private func withText<Result>(_ text: String?, _ body: (UnsafePointer<CChar>?) throws -> Result) throws -> Result {
    guard let text else { return try body(nil) }
    if text.utf8.contains(0) { throw TfpflError(status: 0, message: "a path without the character NUL is needed") }
    return try text.withCString { try body($0) }
}
