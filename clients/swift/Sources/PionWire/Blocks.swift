/// Block hashes and names: how a prefix is found by its token ids, by servers, clients and proxies alike.
///
/// A block is 64 consecutive tokens, the last one may be shorter. Its hash covers every token up to its end
/// and what the rows depend on:
///
///     root = SHA-256("pion-prefix/1" || field(tenant) || field(model) || field(fidelity))
///     h[k] = SHA-256(h[k-1] || token ids of block k, u32 little-endian each),  h[-1] = root
///     field(x) = length of x in bytes as u32 little-endian || x in UTF-8
///
/// A hash finds, token ids decide: nothing is served on the word of a hash.
public enum Blocks {
    /// Tokens of a block.
    public static let tokenCount = 64
    /// The fidelity of a prefix that is stored without loss.
    public static let rawFidelity = "raw"

    /// Returns the 32 bytes that the chains of one tenant, model and fidelity start from.
    public static func root(tenant: String, model: String, fidelity: String = rawFidelity) -> [UInt8] {
        var text = Array("pion-prefix/1".utf8)
        for field in [tenant, model, fidelity] {
            text.append(contentsOf: littleEndian(UInt32(field.utf8.count)))
            text.append(contentsOf: field.utf8)
        }
        return SHA256.hash(text)
    }

    /// Returns the hash of every block.
    public static func hashes(root: [UInt8], tokenIDs: [UInt32]) -> [[UInt8]] {
        var hashes: [[UInt8]] = []
        var previous = root
        for start in stride(from: 0, to: tokenIDs.count, by: tokenCount) {
            let block = tokenIDs[start..<min(start + tokenCount, tokenIDs.count)]
            previous = SHA256.hash(previous + block.flatMap(littleEndian))
            hashes.append(previous)
        }
        return hashes
    }

    /// Returns the name of a prefix stored without one: 32 hex digits of its last block's hash.
    ///
    /// - Precondition: There is a token.
    public static func derivedNamespace(root: [UInt8], tokenIDs: [UInt32]) -> String {
        precondition(!tokenIDs.isEmpty, "a prefix has a token")
        return String(hex(hashes(root: root, tokenIDs: tokenIDs).last!).prefix(32))
    }

    /// Returns what a proxy hashes on: the hex of the first block's hash.
    ///
    /// The fidelity is always `raw` here, so that a Match and the lossy prefix that it may be answered with
    /// meet on one node.
    ///
    /// - Precondition: There is a token.
    public static func routeKey(tenant: String, model: String, tokenIDs: [UInt32]) -> String {
        precondition(!tokenIDs.isEmpty, "a prompt has a token")
        let first = Array(tokenIDs.prefix(tokenCount))
        return hex(hashes(root: root(tenant: tenant, model: model), tokenIDs: first)[0])
    }

    /// Returns a route as the value of the metadata `pion-route`.
    ///
    /// Metadata is ASCII: blanks, percent signs and what is not ASCII are percent-encoded, so that equal
    /// names have equal routes.
    public static func routeMetadata(_ route: String) -> String {
        var text = ""
        for byte in route.utf8 {
            if byte > 0x20 && byte < 0x7f && byte != UInt8(ascii: "%") {
                text.unicodeScalars.append(Unicode.Scalar(byte))
            } else {
                text += "%" + hex([byte]).uppercased()
            }
        }
        return text
    }

    /// Returns a namespace for `parts`: 32 hex digits of SHA-256 of their texts joined with `|`.
    public static func makeNamespace(_ parts: String...) -> String {
        makeNamespace(parts)
    }

    /// Returns a namespace for `parts`.
    public static func makeNamespace(_ parts: [String]) -> String {
        String(hex(SHA256.hash(parts.joined(separator: "|").utf8)).prefix(32))
    }

    /// Returns token ids as they travel: u32, little-endian.
    public static func pack(_ tokenIDs: [UInt32]) -> [UInt8] {
        tokenIDs.map { $0.littleEndian }.withUnsafeBytes { Array($0) }
    }

    /// Returns what `pack` packed; nil if the bytes are no whole number of ids.
    public static func unpack(_ packed: some Collection<UInt8>) -> [UInt32]? {
        let bytes = Array(packed)
        guard bytes.count % 4 == 0 else { return nil }
        return bytes.withUnsafeBytes { bytes in
            stride(from: 0, to: bytes.count, by: 4).map { at in
                UInt32(littleEndian: bytes.loadUnaligned(fromByteOffset: at, as: UInt32.self))
            }
        }
    }
}

/// Returns bytes as hex digits.
public func hex(_ bytes: some Sequence<UInt8>) -> String {
    let digits = Array("0123456789abcdef".unicodeScalars)
    var text = String.UnicodeScalarView()
    for byte in bytes {
        text.append(digits[Int(byte >> 4)])
        text.append(digits[Int(byte & 15)])
    }
    return String(text)
}

func littleEndian(_ value: UInt32) -> [UInt8] {
    [
        UInt8(truncatingIfNeeded: value), UInt8(truncatingIfNeeded: value >> 8),
        UInt8(truncatingIfNeeded: value >> 16), UInt8(truncatingIfNeeded: value >> 24),
    ]
}
