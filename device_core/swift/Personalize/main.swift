// Fits the head of a bundle to examples in two files: float32 rows, and one int32 label for each.
//
//     personalize BUNDLE LIBLITERT x.bin y.bin head.bin

import Foundation
import TfpflDevice

func read<Number>(_ path: String, as type: Number.Type) throws -> [Number] {
    try Data(contentsOf: URL(fileURLWithPath: path)).withUnsafeBytes { Array($0.bindMemory(to: type)) }
}

func complain(_ text: String, status: Int32) -> Never {
    FileHandle.standardError.write(Data("\(text)\n".utf8))
    exit(status)
}

func personalize(_ arguments: [String]) throws {
    let client = try DeviceClient(bundle: arguments[1], state: arguments[5], litert: arguments[2])
    let x = try read(arguments[3], as: Float.self)
    let labels = try read(arguments[4], as: Int32.self)
    let found = try client.personalize(Examples(x, labels: labels))
    let accuracy = [found.before, found.after].map { String(format: "%.3f", $0.accuracy) }
    print("accuracy \(accuracy[0]) -> \(accuracy[1]): the \(found.kept ? "new" : "old") head is kept")
}

if CommandLine.arguments.count != 6 { complain("personalize BUNDLE LIBLITERT x.bin y.bin head.bin", status: 2) }
do {
    try personalize(CommandLine.arguments)
} catch {
    complain("\(error)", status: 1)
}
