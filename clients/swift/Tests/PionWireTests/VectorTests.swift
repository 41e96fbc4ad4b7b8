import Foundation
@testable import PionWire
import Testing

/// The vectors that the clients of all languages are held against.
private func vectors<Value: Decodable>(_ name: String, as type: Value.Type) throws -> Value {
    let file = URL(fileURLWithPath: #filePath)
    let top = (0..<5).reduce(file) { path, _ in path.deletingLastPathComponent() }
    let data = try Data(contentsOf: top.appendingPathComponent("tests/vectors/\(name).json"))
    let decoder = JSONDecoder()
    decoder.keyDecodingStrategy = .convertFromSnakeCase
    return try decoder.decode(type, from: data)
}

private func bytes(_ hex: String) throws -> [UInt8] {
    let digits = Array(hex)
    return try stride(from: 0, to: digits.count, by: 2).map { at in
        try #require(UInt8(String(digits[at...at + 1]), radix: 16))
    }
}

private struct BlockVectors: Decodable {
    struct Root: Decodable {
        let tenant, modelId, fidelity, root: String
    }
    struct Tokens: Decodable {
        let first, step, count: UInt32
        var ids: [UInt32] { (0..<count).map { first &+ step &* $0 } }
    }
    struct Sequence: Decodable {
        let tenant, modelId: String
        let tokens: Tokens
        let blockHashes: [String]
        let derivedNamespace, routeKey: String
    }
    struct Namespace: Decodable {
        let parts: [String]
        let namespace: String
    }
    struct Route: Decodable {
        let route, metadata: String
    }
    let roots: [Root]
    let sequences: [Sequence]
    let namespaces: [Namespace]
    let routes: [Route]
}

@Test func theSharedHashesAndNamesHold() throws {
    let known = try vectors("blocks", as: BlockVectors.self)
    #expect(!known.roots.isEmpty && !known.sequences.isEmpty && !known.namespaces.isEmpty && !known.routes.isEmpty)
    for vector in known.roots {
        let root = Blocks.root(tenant: vector.tenant, model: vector.modelId, fidelity: vector.fidelity)
        #expect(hex(root) == vector.root)
    }
    for vector in known.sequences {
        let ids = vector.tokens.ids
        let root = Blocks.root(tenant: vector.tenant, model: vector.modelId)
        #expect(Blocks.hashes(root: root, tokenIDs: ids).map { hex($0) } == vector.blockHashes)
        #expect(Blocks.derivedNamespace(root: root, tokenIDs: ids) == vector.derivedNamespace)
        #expect(
            Blocks.routeKey(tenant: vector.tenant, model: vector.modelId, tokenIDs: ids) == vector.routeKey)
        #expect(Blocks.unpack(Blocks.pack(ids)) == ids)
    }
    for vector in known.namespaces {
        #expect(Blocks.makeNamespace(vector.parts) == vector.namespace)
    }
    #expect(Blocks.makeNamespace("m", "t", "fp16") == "61a226ee7dc6bcf4203f91316777d237")
    for vector in known.routes {
        #expect(Blocks.routeMetadata(vector.route) == vector.metadata)
    }
    #expect(Blocks.unpack([1, 2, 3]) == nil)
}

private struct LayoutVectors: Decodable {
    struct Known: Decodable {
        let text, fidelity: String
        let names: [String]
        let rowBytes: [Int]
    }
    struct Refused: Decodable {
        let text, why: String
    }
    let layouts: [Known]
    let refused: [Refused]
}

/// Reads a canonical text, as the vectors have it; the module itself only writes them.
private func layout(_ text: String) throws -> Layout {
    let json = try JSONSerialization.jsonObject(with: Data(text.utf8))
    let rows = try #require(json as? [[Any]])
    return try Layout(
        rows.map { row in
            guard row.count == 6, let slot = row[0] as? Int, let side = Side(rawValue: row[1] as? String ?? ""),
                let heads = row[2] as? Int, let headDim = row[3] as? Int,
                let dtype = DType(rawValue: row[4] as? String ?? ""), let codec = row[5] as? String
            else { throw LayoutError("text", "is no layout") }
            return try TensorLayout(
                slot: slot, side: side, heads: heads, headDim: headDim, dtype: dtype, codec: codec)
        })
}

@Test func theSharedLayoutsHold() throws {
    let known = try vectors("layouts", as: LayoutVectors.self)
    #expect(!known.layouts.isEmpty && !known.refused.isEmpty)
    for vector in known.layouts {
        let layout = try layout(vector.text)
        #expect(layout.text == vector.text)
        #expect(layout.fidelity == vector.fidelity)
        #expect(layout.tensors.map(\.name) == vector.names)
        #expect(layout.tensors.map(\.rowBytes) == vector.rowBytes)
        #expect(layout.rowBytes == vector.rowBytes.reduce(0, +))
    }
    for vector in known.refused {
        #expect(throws: (any Error).self, "\(vector.why): \(vector.text)") { try layout(vector.text) }
    }
}

private struct FramingVectors: Decodable {
    struct Message: Decodable {
        let kind, data, message: String
        let tensorIndex, arrayIndex, firstRow, rowCount, partIndex, offsetBytes: UInt64?
        let crc32c: UInt32?
    }
    struct Refused: Decodable {
        let message, why: String
    }
    let messages: [Message]
    let refused: [Refused]
}

@Test func theSharedFramesHold() throws {
    let known = try vectors("framing", as: FramingVectors.self)
    #expect(!known.messages.isEmpty && !known.refused.isEmpty)
    for vector in known.messages {
        let data = try bytes(vector.data)
        let message = try bytes(vector.message)
        let parsed = try Framing.parse(message)
        switch vector.kind {
        case "rows":
            let chunk = RowChunk(
                tensorIndex: try #require(vector.tensorIndex), arrayIndex: try #require(vector.arrayIndex),
                firstRow: try #require(vector.firstRow), rowCount: try #require(vector.rowCount),
                crc32c: try #require(vector.crc32c), data: data[...])
            #expect(parsed == .rows(chunk))
            #expect(
                Framing.rows(
                    tensorIndex: chunk.tensorIndex, arrayIndex: chunk.arrayIndex, firstRow: chunk.firstRow,
                    rowCount: chunk.rowCount, data: data) == message)
            #expect(CRC32C.checksum(data) == chunk.crc32c)
        case "part":
            let chunk = PartChunk(
                partIndex: try #require(vector.partIndex), offsetBytes: try #require(vector.offsetBytes),
                crc32c: try #require(vector.crc32c), data: data[...])
            #expect(parsed == .part(chunk))
            #expect(
                Framing.part(partIndex: chunk.partIndex, offsetBytes: chunk.offsetBytes, data: data) == message)
            #expect(CRC32C.checksum(data) == chunk.crc32c)
        default:
            #expect(parsed == .header(data[...]))
            #expect(Framing.header(data) == message)
        }
    }
    for vector in known.refused {
        #expect(throws: FrameError.self, "\(vector.why)") { try Framing.parse(bytes(vector.message)) }
    }
}

@Test func hashesAreThoseOfTheStandard() {
    #expect(hex(SHA256.hash([])) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
    #expect(hex(SHA256.hash("abc".utf8)) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    let million = [UInt8](repeating: UInt8(ascii: "a"), count: 1_000_000)
    #expect(hex(SHA256.hash(million)) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0")
    for length in [0, 1, 54, 55, 56, 57, 63, 64, 65, 119, 120, 128, 200] {
        var pieces = SHA256()
        let data = (0..<length).map { UInt8(truncatingIfNeeded: $0) }
        for byte in data { pieces.update([byte]) }
        #expect(pieces.finish() == SHA256.hash(data))
    }
}

@Test func checksumsAreThoseOfTheStandard() {
    #expect(CRC32C.checksum([]) == 0)
    #expect(CRC32C.checksum(Array("123456789".utf8)) == 0xe306_9283)
    #expect(CRC32C.checksum([UInt8](repeating: 0, count: 32)) == 0x8a91_36aa)
    #expect(CRC32C.checksum([UInt8](repeating: 0xff, count: 32)) == 0x62a8_ab43)
    let data = (0..<1_000).map { UInt8(truncatingIfNeeded: $0 &* 7) }
    for split in [0, 1, 7, 8, 9, 500, 1_000] {
        let first = CRC32C.checksum(Array(data[..<split]))
        #expect(CRC32C.checksum(Array(data[split...]), previous: first) == CRC32C.checksum(data))
    }
}

private struct ErrorVectors: Decodable {
    struct Status: Decodable {
        let name, status: String
        let reason: String?
        let metadata: [String: String]
        let retryMs: Int?
    }
    let statuses: [Status]
}

@Test func aReasonIsNotLostOnItsWay() throws {
    // Keys of metadata stay as they are, so this one is read without the decoder's strategy.
    let file = URL(fileURLWithPath: #filePath)
    let top = (0..<5).reduce(file) { path, _ in path.deletingLastPathComponent() }
    let text = try String(contentsOf: top.appendingPathComponent("tests/vectors/errors.json"), encoding: .utf8)
    let known = try JSONDecoder().decode(
        ErrorVectors.self, from: Data(text.replacingOccurrences(of: "retry_ms", with: "retryMs").utf8))
    #expect(!known.statuses.isEmpty)
    for vector in known.statuses {
        let error = PionError(details: try bytes(vector.status), message: "said")
        #expect(error?.reason.rawValue == vector.reason, "\(vector.name)")
        guard let error else { continue }
        #expect(error.metadata == vector.metadata && error.message == "said" && !error.fromTransport)
        #expect(error.retryAfter == vector.retryMs.map { .milliseconds($0) })
    }
}

@Test func bytesOfAStreamAreFramedAsTheSharedPartsAre() throws {
    let known = try vectors("framing", as: FramingVectors.self)
    for vector in known.messages where vector.kind == "part" {
        let data = try bytes(vector.data)
        var message = try bytes(vector.message)
        message[0] = 0x12  // the same fields, under the number of `bytes`
        let (index, offset) = (try #require(vector.partIndex), try #require(vector.offsetBytes))
        #expect(Framing.bytes(partIndex: index, offsetBytes: offset, data: data) == message)
        let chunk = PartChunk(
            partIndex: index, offsetBytes: offset, crc32c: try #require(vector.crc32c), data: data[...])
        #expect(try Framing.parseBytes(message) == .part(chunk))
    }
    #expect(try Framing.parseBytes([0x0a, 1, 7]) == .header([7]))
    #expect(throws: FrameError.self) { try Framing.parseBytes([]) }
}

private struct RingVectors: Decodable {
    struct Hash: Decodable {
        let text, xxh64: String
    }
    struct Known: Decodable {
        let nodes: [String]
        let down: Set<String>
        let routes: [String: String]
    }
    let pointsPerNode: Int
    let hashes: [Hash]
    let rings: [Known]
}

@Test func theSharedRingsHold() throws {
    let known = try vectors("ring", as: RingVectors.self)
    #expect(known.pointsPerNode == Ring.pointsPerNode && !known.hashes.isEmpty && !known.rings.isEmpty)
    for vector in known.hashes {
        #expect(XXH64.hash(vector.text) == UInt64(vector.xxh64, radix: 16), "\(vector.text)")
    }
    for vector in known.rings {
        let ring = try Ring(vector.nodes, down: vector.down)
        for (route, node) in vector.routes { #expect(ring.node(of: route) == node, "\(route)") }
        let up = vector.nodes.filter { !vector.down.contains($0) }
        #expect(Set(ring.routes().map(ring.node(of:))) == Set(up.isEmpty ? vector.nodes : up))
    }
}
