// What goes into a DeviceClient, and what comes out of it.

import CTfpflDevice

/// What cannot be used, and why. `status` is one of `tfpfl_status` in tfpfl_device.h, or 0 if the core was not asked:
/// the client is closed, a text has the character NUL, or a hash has another length.
public struct TfpflError: Error, Equatable, CustomStringConvertible {
    public let status: Int32
    public let message: String
    public var description: String { message }
}

/// Preprocessed examples: their numbers, row after row, and a label in 0..<K for each; or, where the client's `kind` is
/// not classification, K targets for each, row after row. Where the client takes `wholeNumbers`, they are `tokens`.
public struct Examples: Equatable, Sendable {
    public let x: [Float]?
    public let tokens: [Int32]?
    public let labels: [Int32]?
    public let targets: [Float]?

    public init(_ x: [Float], labels: [Int32]) { self.init(x: x, labels: labels) }

    public init(_ x: [Float], targets: [Float]) { self.init(x: x, targets: targets) }

    public init(tokens: [Int32], labels: [Int32]) { self.init(x: nil, tokens: tokens, labels: labels) }

    public init(tokens: [Int32], targets: [Float]) { self.init(x: nil, tokens: tokens, targets: targets) }

    init(x: [Float]?, tokens: [Int32]? = nil, labels: [Int32]? = nil, targets: [Float]? = nil) {
        (self.x, self.tokens, self.labels, self.targets) = (x, tokens, labels, targets)
    }

    var numbers: Int { x?.count ?? tokens?.count ?? 0 }

    /// The number of examples is that of the labels, or of the rows of targets, or else `count`. Targets that are no
    /// whole rows are left out, and the core says that there are none.
    func withC<Result>(_ numClasses: Int, count: Int = 0, _ body: (inout tfpfl_examples) -> Result) -> Result {
        let whole = targets.flatMap { $0.count % numClasses == 0 ? $0 : nil }
        return address(x) { x in
            address(tokens) { tokens in
                address(labels) { labels in
                    address(whole) { targets in
                        var given = tfpfl_examples()
                        (given.x, given.tokens, given.numbers) = (x, tokens, numbers)
                        (given.labels, given.targets) = (labels, targets)
                        given.count = self.labels?.count ?? self.targets.map { $0.count / numClasses } ?? count
                        return body(&given)
                    }
                }
            }
        }
    }
}

/// The mean loss, for classes cross-entropy in nats; the accuracy in 0...1, NaN for other kinds; and the score by which
/// heads are compared, see `tfpfl_scores`.
public struct Scores: Equatable, Sendable {
    public let loss, accuracy, value: Double

    init(_ found: tfpfl_scores) { (loss, accuracy, value) = (found.loss, found.accuracy, found.value) }
}

/// The result of fitting the head: on held-out examples, and the training losses.
public struct Personalized: Equatable, Sendable {
    public let kept: Bool
    public let before, after: Scores
    public let lossBefore, loss: Double
}

/// A head: kernel [M, K], row after row, bias [K], the 32 bytes of the sha256 of the theta that it was fitted with, and
/// the names of its classes, a list in JSON, if they are not the bundle's.
public struct Head: Equatable, Sendable {
    public let kernel, bias: [Float]
    public let thetaSha256: [UInt8]
    public let names: String?

    public init(kernel: [Float], bias: [Float], thetaSha256: [UInt8], names: String? = nil) throws {
        if thetaSha256.count != 32 {
            throw TfpflError(status: 0, message: "a sha256 has 32 bytes, found \(thetaSha256.count)")
        }
        (self.kernel, self.bias, self.thetaSha256, self.names) = (kernel, bias, thetaSha256, names)
    }

    init(_ head: tfpfl_head) {
        kernel = Array(UnsafeBufferPointer(start: head.kernel, count: head.num_features * head.num_classes))
        bias = Array(UnsafeBufferPointer(start: head.bias, count: head.num_classes))
        thetaSha256 = withUnsafeBytes(of: head.theta_sha256) { Array($0) }
        let text = UnsafeRawBufferPointer(start: head.names, count: head.names == nil ? 0 : head.names_bytes)
        names = head.names == nil ? nil : String(decoding: text, as: UTF8.self)
    }

    /// Nothing of what the pointers lead to is changed, or kept by the core.
    func withC<Result>(_ body: (inout tfpfl_head) -> Result) -> Result {
        let rows = bias.isEmpty || kernel.count % bias.count != 0 ? 0 : kernel.count / bias.count
        return address(kernel) { kernel in
            address(bias) { bias in
                address(names?.utf8.map { CChar(bitPattern: $0) }) { text in
                    var given = tfpfl_head()
                    (given.num_features, given.num_classes) = (rows, self.bias.count)
                    given.kernel = UnsafeMutablePointer(mutating: kernel)
                    given.bias = UnsafeMutablePointer(mutating: bias)
                    withUnsafeMutableBytes(of: &given.theta_sha256) { $0.copyBytes(from: thetaSha256) }
                    given.names = UnsafeMutablePointer(mutating: text)
                    given.names_bytes = names?.utf8.count ?? 0
                    return body(&given)
                }
            }
        }
    }
}

/// The result of a round. Send the payload and the number of examples, and nothing else; the head stays here.
public struct Update: Equatable, Sendable {
    public let payload: [UInt8]
    public let numExamples: Int
    public let loss: Float
    public let head: Head
}

/// The address of the numbers. It is nil where they are: of an empty array the core is to know that it was given.
private func address<Number: ExpressibleByIntegerLiteral, Result>(
    _ numbers: [Number]?, _ body: (UnsafePointer<Number>?) -> Result
) -> Result {
    guard let numbers else { return body(nil) }
    return (numbers.isEmpty ? [0] : numbers).withUnsafeBufferPointer { body($0.baseAddress) }
}
