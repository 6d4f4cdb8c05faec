// swift-tools-version:5.9
// The client in C, and the class DeviceClient on top of it: see docs/native.md. Depend on it by its path,
// `.package(path: ".../device_core")`; SwiftPM takes no unsafe flags from a package that it fetches by version.
import PackageDescription

let package = Package(
    name: "TfpflDevice",
    platforms: [.iOS(.v13), .macOS(.v11)],
    products: [
        .library(name: "TfpflDevice", targets: ["TfpflDevice"]),
        .executable(name: "personalize", targets: ["Personalize"]),
    ],
    targets: [
        .target(
            name: "CTfpflDevice",
            path: ".",
            sources: ["src"],
            publicHeadersPath: "include",
            cSettings: [
                .define("_POSIX_C_SOURCE", to: "200809L"),
                .define("_DARWIN_C_SOURCE"),  // O_NOFOLLOW, which Apple's headers leave out of POSIX
                // Products and sums are rounded one by one, as NumPy does it: the same bytes on every machine.
                .unsafeFlags(["-ffp-contract=off"]),
            ],
            linkerSettings: [.linkedLibrary("m", .when(platforms: [.linux, .android]))]
        ),
        .target(name: "TfpflDevice", dependencies: ["CTfpflDevice"], path: "swift/TfpflDevice"),
        .executableTarget(name: "Personalize", dependencies: ["TfpflDevice"], path: "swift/Personalize"),
    ],
    cLanguageStandard: .c99
)
