import Foundation
import PionWire
import SwiftProtobuf

/// Generated messages to values, and back.

extension Layout {
    init(_ message: Pion_V1_Layout) throws {
        do {
            self = try Layout(message.tensors.map(TensorLayout.init))
        } catch let error as LayoutError {
            throw PionError(.badAnswer, "its layout cannot be: \(error)")
        }
    }

    var message: Pion_V1_Layout {
        .with { $0.tensors = tensors.map(\.message) }
    }
}

extension TensorLayout {
    init(_ message: Pion_V1_TensorLayout) throws {
        let side: Side =
            switch message.side {
            case .k: .k
            case .v: .v
            default: throw LayoutError("side", "\(message.side) is neither k nor v")
            }
        let dtype: DType =
            switch message.dataType {
            case .f32: .f32
            case .f16: .f16
            case .bf16: .bf16
            default: throw LayoutError("data_type", "\(message.dataType) is not stored")
            }
        try self.init(
            slot: Int(message.slot), side: side, heads: Int(message.heads), headDim: Int(message.headDim),
            dtype: dtype, codec: message.codec.isEmpty ? "raw" : message.codec)
    }

    var message: Pion_V1_TensorLayout {
        .with {
            $0.slot = UInt32(slot)
            $0.side = side == .k ? .k : .v
            $0.heads = UInt32(heads)
            $0.headDim = UInt32(headDim)
            switch dtype {
            case .f32: $0.dataType = .f32
            case .f16: $0.dataType = .f16
            case .bf16: $0.dataType = .bf16
            }
            $0.codec = codec
        }
    }
}

extension PartInfo {
    init(_ message: Pion_V1_PartInfo) {
        self.init(
            kind: message.kind, slot: Int(message.slot), boundaryTokens: message.boundaryTokens,
            sizeBytes: message.sizeBytes, description: message.description_p)
    }

    var message: Pion_V1_PartInfo {
        .with {
            $0.kind = kind
            $0.slot = UInt32(slot)
            $0.boundaryTokens = boundaryTokens
            $0.sizeBytes = sizeBytes
            $0.description_p = description
        }
    }
}

/// How much an acknowledgement promises.
public enum Durability: Sendable, Hashable {
    /// Survives the death of the server process.
    case process
    /// Survives a power cut.
    case disk

    init(_ message: Pion_V1_Durability) { self = message == .disk ? .disk : .process }

    var message: Pion_V1_Durability { self == .disk ? .disk : .process }
}

/// Why less was served than was asked, or nothing.
public enum MissReason: Sendable, Hashable {
    /// Everything asked for is there.
    case none
    case notStored, noRows, tokensDiffer, modelDiffers, layoutDiffers, tooShort, partMissing
    /// Only the first tokens are stored.
    case partial
    /// One that this client does not know yet.
    case other(Int)

    init(_ message: Pion_V1_MissReason) {
        self =
            switch message {
            case .unspecified: .none
            case .notStored: .notStored
            case .noRows: .noRows
            case .tokensDiffer: .tokensDiffer
            case .modelDiffers: .modelDiffers
            case .layoutDiffers: .layoutDiffers
            case .tooShort: .tooShort
            case .partMissing: .partMissing
            case .partial: .partial
            case .UNRECOGNIZED(let number): .other(number)
            }
    }
}

/// What is known of a visible prefix.
public struct PrefixInfo: Sendable, Hashable {
    public let namespace: String
    public let model: String
    public let layout: Layout
    /// Rows of the whole chain.
    public let tokenCount: UInt64
    /// Rows that it takes from its parent.
    public let base: UInt64
    /// Empty if it has none.
    public let parent: String
    public let generation: UInt64
    /// On disk, without its parents'.
    public let storedBytes: UInt64
    /// Bytes that a fetch of all its rows streams.
    public let rowBytes: UInt64
    /// "raw", or the codecs of a lossy prefix.
    public let fidelity: String
    public let createdUnixMS: UInt64
    public let durability: Durability
    public let parts: [PartInfo]
    /// 0 if none is known.
    public let prefillMS: Double
    public let depth: Int

    init(_ message: Pion_V1_PrefixInfo) throws {
        namespace = message.namespace
        model = message.modelID
        layout = try Layout(message.layout)
        tokenCount = message.tokenCount
        base = message.base
        parent = message.parentNamespace
        generation = message.generation
        storedBytes = message.storedBytes
        rowBytes = message.rowBytes
        fidelity = message.fidelity
        createdUnixMS = message.createdUnixMs
        durability = Durability(message.durability)
        parts = message.parts.map(PartInfo.init)
        prefillMS = message.prefillMs
        depth = Int(message.depth)
    }
}

extension Announced {
    init(_ header: Pion_V1_PrefixStoreFetchHeader) throws {
        guard let tokenIDs = Blocks.unpack(header.tokenIds) else {
            throw PionError(.badAnswer, "\(header.tokenIds.count) bytes are no token ids")
        }
        self.init(
            namespace: header.prefix.namespace, model: header.prefix.modelID, fidelity: header.prefix.fidelity,
            generation: header.prefix.generation, layout: try Layout(header.layout), begin: header.rows.begin,
            end: header.rows.end, totalBytes: header.totalBytes, tokenIDs: tokenIDs,
            parts: header.parts.map(PartInfo.init))
    }
}

/// Decodes a message of our own streams.
func decoded<Decoded: Message>(
    _ bytes: some Collection<UInt8>, as type: Decoded.Type = Decoded.self
) throws -> Decoded {
    do {
        return try Decoded(serializedBytes: Array(bytes))
    } catch {
        throw PionError(.badAnswer, "not a \(Decoded.self): \(error)")
    }
}
