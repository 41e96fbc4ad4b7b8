// swift-tools-version: 6.1

import PackageDescription

let package = Package(
    name: "pion",
    platforms: [.macOS(.v15), .iOS(.v18)],
    products: [
        .library(name: "PionWire", targets: ["PionWire"]),
        .library(name: "Pion", targets: ["Pion"]),
    ],
    dependencies: [
        .package(url: "https://github.com/grpc/grpc-swift-2.git", from: "2.2.0"),
        .package(url: "https://github.com/grpc/grpc-swift-nio-transport.git", from: "2.2.0"),
        .package(url: "https://github.com/grpc/grpc-swift-protobuf.git", from: "2.1.0"),
        .package(url: "https://github.com/apple/swift-protobuf.git", from: "1.31.0"),
    ],
    targets: [
        // Hashes, layouts, frames, checksums: what every client computes alike. Without dependencies.
        .target(name: "PionWire"),
        .testTarget(name: "PionWireTests", dependencies: ["PionWire"]),
        .target(
            name: "Pion",
            dependencies: [
                "PionWire",
                .product(name: "GRPCCore", package: "grpc-swift-2"),
                .product(name: "GRPCNIOTransportHTTP2", package: "grpc-swift-nio-transport"),
                .product(name: "GRPCProtobuf", package: "grpc-swift-protobuf"),
                .product(name: "SwiftProtobuf", package: "swift-protobuf"),
            ],
            // Generates the stubs from Protos, links to the repository's protos/, at build time: needs protoc.
            plugins: [.plugin(name: "GRPCProtobufGenerator", package: "grpc-swift-protobuf")]
        ),
        .testTarget(name: "PionTests", dependencies: ["Pion", "PionWire"]),
    ]
)
