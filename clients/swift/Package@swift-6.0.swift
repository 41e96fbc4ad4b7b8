// swift-tools-version: 6.0
// For toolchains before 6.1, which grpc-swift 2 needs: the module without dependencies alone.

import PackageDescription

let package = Package(
    name: "pion",
    platforms: [.macOS(.v15), .iOS(.v18)],
    products: [.library(name: "PionWire", targets: ["PionWire"])],
    targets: [
        .target(name: "PionWire"),
        .testTarget(name: "PionWireTests", dependencies: ["PionWire"]),
    ]
)
