/// What is stored and fetched: rows and parts, as bytes.

/// What an opaque piece of a prefix is, and at which token boundary it is exact.
public struct PartInfo: Sendable, Hashable {
    public var kind: String
    public var slot: Int
    public var boundaryTokens: UInt64
    public var sizeBytes: UInt64
    public var description: String

    public init(kind: String, slot: Int, boundaryTokens: UInt64, sizeBytes: UInt64, description: String = "") {
        self.kind = kind
        self.slot = slot
        self.boundaryTokens = boundaryTokens
        self.sizeBytes = sizeBytes
        self.description = description
    }
}

/// An opaque piece of a prefix: recurrent state, a sliding-window ring, a drafter's context, last logits.
public struct Part: Sendable, Hashable {
    public var info: PartInfo
    public var data: [UInt8]

    public init(kind: String, slot: Int, boundaryTokens: UInt64, data: [UInt8], description: String = "") {
        info = PartInfo(
            kind: kind, slot: slot, boundaryTokens: boundaryTokens, sizeBytes: UInt64(data.count),
            description: description)
        self.data = data
    }

    init(info: PartInfo, data: [UInt8]) {
        self.info = info
        self.data = data
    }
}

/// All rows of one (slot, side): token-major, little-endian, the bits as they were stored.
public struct Tensor: Sendable, Hashable {
    public var layout: TensorLayout
    public var data: [UInt8]

    public init(layout: TensorLayout, data: [UInt8]) {
        self.layout = layout
        self.data = data
    }

    /// Returns the values as numbers; every one of the three types has its own in Float.
    public func floats() -> [Float] {
        switch layout.dtype {
        case .f32: patterns(UInt32.self).map(Float.init(bitPattern:))
        case .f16: patterns(UInt16.self).map(float(half:))
        case .bf16: patterns(UInt16.self).map { Float(bitPattern: UInt32($0) << 16) }
        }
    }

    /// Returns the bits of each value: UInt32 for f32, UInt16 for f16 and bf16.
    ///
    /// - Precondition: The type has the size of the values.
    public func patterns<Pattern: FixedWidthInteger & UnsignedInteger>(_ type: Pattern.Type) -> [Pattern] {
        let size = MemoryLayout<Pattern>.size
        precondition(size == layout.dtype.itemBytes, "\(layout.dtype.rawValue) has \(layout.dtype.itemBytes) bytes")
        return data.withUnsafeBytes { bytes in
            stride(from: 0, to: bytes.count, by: size).map { at in
                Pattern(littleEndian: bytes.loadUnaligned(fromByteOffset: at, as: Pattern.self))
            }
        }
    }
}

/// Returns the number that a binary16 pattern stands for. (`Float16` is not on every Mac.)
func float(half bits: UInt16) -> Float {
    let sign = UInt32(bits >> 15) << 31
    let exponent = UInt32(bits >> 10 & 0x1f)
    let fraction = UInt32(bits & 0x3ff)
    switch exponent {
    case 0:  // zero, or subnormal: the fraction counts units of 2^-24
        let magnitude = Float(fraction) * Float(sign: .plus, exponent: -24, significand: 1)
        return Float(bitPattern: magnitude.bitPattern | sign)
    case 0x1f:
        return Float(bitPattern: sign | 0xff << 23 | fraction << 13)
    default:
        return Float(bitPattern: sign | (exponent + 127 - 15) << 23 | fraction << 13)
    }
}
