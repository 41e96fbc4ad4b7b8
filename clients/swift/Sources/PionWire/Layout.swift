/// Layouts: what the rows of a prefix look like, per (slot, side).
///
/// A row is the K or V vector of one token in one slot, token-major: heads times head dim values, so the rows
/// of a tensor lie behind each other as [token][head][dim].

/// The type of the values of a tensor. All are little-endian; bf16 is never cast to f16.
public enum DType: String, Sendable, Hashable, CaseIterable {
    case f32 = "F32"
    case f16 = "F16"
    case bf16 = "BF16"

    /// Bytes of one value.
    public var itemBytes: Int { self == .f32 ? 4 : 2 }
}

/// Half of an attention cache.
public enum Side: String, Sendable, Hashable, CaseIterable {
    case k
    case v
}

/// What cannot be stored, and why.
public struct LayoutError: Error, Hashable, CustomStringConvertible {
    /// Which part of a layout.
    public let field: String
    public let message: String

    public init(_ field: String, _ message: String) {
        self.field = field
        self.message = message
    }

    public var description: String { "\(field): \(message)" }
}

/// The rows of one (slot, side).
public struct TensorLayout: Sendable, Hashable {
    public let slot: Int
    public let side: Side
    public let heads: Int
    /// Values per head; 0 where a cache keeps nothing on this side.
    public let headDim: Int
    public let dtype: DType
    /// Canonical name of the codec; "raw" is the only one without loss.
    public let codec: String

    /// - Throws: `LayoutError`
    public init(
        slot: Int, side: Side, heads: Int, headDim: Int, dtype: DType, codec: String = "raw"
    ) throws {
        guard (0..<Limits.slotsMax).contains(slot) else {
            throw LayoutError("slot", "\(slot) is outside 0..\(Limits.slotsMax - 1)")
        }
        guard heads >= 1 else { throw LayoutError("heads", "\(heads) is below 1") }
        guard headDim >= 0 else { throw LayoutError("head_dim", "\(headDim) is below 0") }
        let (values, overflow) = heads.multipliedReportingOverflow(by: headDim)
        guard !overflow, values <= Limits.rowBytesMax / dtype.itemBytes else {
            throw LayoutError("head_dim", "a row of \(heads) heads of \(headDim) \(dtype.rawValue) values exceeds "
                    + "\(Limits.rowBytesMax) bytes"
            )
        }
        guard !codec.isEmpty else { throw LayoutError("codec", "is empty") }
        self.slot = slot
        self.side = side
        self.heads = heads
        self.headDim = headDim
        self.dtype = dtype
        self.codec = codec
    }

    /// Its name in a file, such as "k.0".
    public var name: String { "\(side.rawValue).\(slot)" }

    /// Bytes of one row of values, which is what a raw tensor stores.
    public var rowBytes: Int { heads * headDim * dtype.itemBytes }

    var order: Int { 2 * slot + (side == .v ? 1 : 0) }
}

/// All tensors of a prefix: ordered by slot, K before V, none twice.
public struct Layout: Sendable, Hashable {
    public let tensors: [TensorLayout]

    /// - Throws: `LayoutError`
    public init(_ tensors: [TensorLayout]) throws {
        guard tensors.count <= Limits.tensorsMax else {
            throw LayoutError("tensors", "more than \(Limits.tensorsMax) tensors")
        }
        for (earlier, later) in zip(tensors, tensors.dropFirst()) where earlier.order >= later.order {
            throw LayoutError("tensors", "they must be ordered by slot, K before V, none twice")
        }
        self.tensors = tensors
    }

    /// Bytes of one token over all tensors.
    public var rowBytes: Int { tensors.reduce(0) { $0 + $1.rowBytes } }

    /// "raw", or the codecs of a lossy prefix in the order of its tensors.
    public var fidelity: String {
        if tensors.allSatisfy({ $0.codec == "raw" }) { return Blocks.rawFidelity }
        return tensors.map { "\($0.name)=\($0.codec)" }.joined(separator: ";")
    }

    /// The canonical text: equal layouts have equal texts. Codecs have names in ASCII.
    public var text: String {
        let rows = tensors.map { tensor in
            "[\(tensor.slot),\"\(tensor.side.rawValue)\",\(tensor.heads),\(tensor.headDim),"
                + "\"\(tensor.dtype.rawValue)\",\"\(tensor.codec)\"]"
        }
        return "[" + rows.joined(separator: ",") + "]"
    }
}
