/// Chunk messages of streams, framed and taken apart by hand.
///
/// `StoreRequest` and `FetchResponse` have the same shape (`header` 1, `rows` 2, `part` 3) and every chunk has
/// its `data` last, so a message is a few bytes of numbers followed by the data. The bytes are exactly those
/// that generated code of any language writes and reads.

/// The bytes are not a message of a chunk stream.
public struct FrameError: Error, Hashable, CustomStringConvertible {
    public let description: String
}

/// Rows of one array of one tensor, as stored.
public struct RowChunk: Sendable, Hashable {
    public var tensorIndex: UInt64
    public var arrayIndex: UInt64
    public var firstRow: UInt64
    public var rowCount: UInt64
    public var crc32c: UInt32
    public var data: ArraySlice<UInt8>
}

/// Consecutive bytes of one part.
public struct PartChunk: Sendable, Hashable {
    public var partIndex: UInt64
    public var offsetBytes: UInt64
    public var crc32c: UInt32
    public var data: ArraySlice<UInt8>
}

/// One message of a chunk stream.
public enum StreamMessage: Sendable, Hashable {
    /// Still serialised.
    case header(ArraySlice<UInt8>)
    case rows(RowChunk)
    case part(PartChunk)
}

public enum Framing {
    /// Returns the message that holds a serialised header.
    public static func header(_ header: [UInt8]) -> [UInt8] {
        [0x0a] + varint(UInt64(header.count)) + header
    }

    /// Returns the message that holds rows, with the CRC-32C of their data.
    public static func rows(
        tensorIndex: UInt64, arrayIndex: UInt64 = 0, firstRow: UInt64, rowCount: UInt64, data: [UInt8]
    ) -> [UInt8] {
        let numbers =
            number(0x08, tensorIndex) + number(0x10, arrayIndex) + number(0x18, firstRow)
            + number(0x20, rowCount)
        return frame(0x12, numbers + checksum(0x2d, data), data)
    }

    /// Returns the message that holds bytes of a part, with their CRC-32C.
    public static func part(partIndex: UInt64, offsetBytes: UInt64, data: [UInt8]) -> [UInt8] {
        frame(0x1a, number(0x08, partIndex) + number(0x10, offsetBytes) + checksum(0x1d, data), data)
    }

    /// Returns a message of a stream that has bytes only (SSMState, Attend), with their CRC-32C.
    public static func bytes(partIndex: UInt64 = 0, offsetBytes: UInt64, data: [UInt8]) -> [UInt8] {
        frame(0x12, number(0x08, partIndex) + number(0x10, offsetBytes) + checksum(0x1d, data), data)
    }

    /// Takes a message of a stream that has bytes only apart: its header, or a part.
    ///
    /// - Throws: `FrameError`
    public static func parseBytes(_ message: [UInt8]) throws -> StreamMessage {
        try parse(message, bytesOnly: true)
    }

    /// Takes a message apart; checksums are not checked yet.
    ///
    /// - Throws: `FrameError`: these bytes are not such a message, or hold nothing.
    public static func parse(_ message: [UInt8]) throws -> StreamMessage {
        try parse(message, bytesOnly: false)
    }

    private static func parse(_ message: [UInt8], bytesOnly: Bool) throws -> StreamMessage {
        var found: StreamMessage?
        var fields = Fields(message[...])
        while let field = try fields.next() {
            guard field.number <= (bytesOnly ? 2 : 3) else { continue }
            guard found == nil else { throw FrameError(description: "a stream message holds two things") }
            guard case .bytes(let value) = field.value else {
                throw FrameError(description: "field \(field.number) of a stream message holds no bytes")
            }
            switch field.number {
            case 1:
                found = .header(value)
            case 2 where !bytesOnly:
                let (numbers, crc, data) = try chunk(value, checksum: 5)
                found = .rows(
                    RowChunk(
                        tensorIndex: numbers[1], arrayIndex: numbers[2], firstRow: numbers[3],
                        rowCount: numbers[4], crc32c: crc, data: data))
            default:
                let (numbers, crc, data) = try chunk(value, checksum: 3)
                found = .part(
                    PartChunk(partIndex: numbers[1], offsetBytes: numbers[2], crc32c: crc, data: data))
            }
        }
        guard let found else { throw FrameError(description: "a stream message holds nothing") }
        return found
    }

    /// Returns the numbers of a chunk by field, its checksum, which is the last number, and its data.
    private static func chunk(
        _ value: ArraySlice<UInt8>, checksum: UInt64
    ) throws -> (numbers: [UInt64], crc: UInt32, data: ArraySlice<UInt8>) {
        var numbers = [UInt64](repeating: 0, count: 6)
        var crc: UInt32 = 0
        var data = value.prefix(0)
        var fields = Fields(value)
        while let field = try fields.next() {
            switch field.value {
            case .bytes(let bytes) where field.number == 15: data = bytes
            case .fixed32(let fixed) where field.number == checksum: crc = fixed
            case .number(let number) where field.number < checksum: numbers[Int(field.number)] = number
            default: break
            }
        }
        return (numbers, crc, data)
    }

    private static func frame(_ tag: UInt8, _ numbers: [UInt8], _ data: [UInt8]) -> [UInt8] {
        let prefix = data.isEmpty ? numbers : numbers + [0x7a] + varint(UInt64(data.count))
        var message: [UInt8] = []
        message.reserveCapacity(prefix.count + data.count + 6)
        message.append(tag)
        message += varint(UInt64(prefix.count + data.count))
        message += prefix
        message += data
        return message
    }

    /// Returns a field; zeros are left out, as generated code leaves them out.
    private static func number(_ tag: UInt8, _ value: UInt64) -> [UInt8] {
        value == 0 ? [] : [tag] + varint(value)
    }

    private static func checksum(_ tag: UInt8, _ data: [UInt8]) -> [UInt8] {
        let crc = CRC32C.checksum(data)
        return crc == 0 ? [] : [tag] + littleEndian(crc)
    }

    private static func varint(_ value: UInt64) -> [UInt8] {
        var encoded: [UInt8] = []
        var rest = value
        while rest >= 0x80 {
            encoded.append(UInt8(truncatingIfNeeded: rest) | 0x80)
            rest >>= 7
        }
        encoded.append(UInt8(rest))
        return encoded
    }
}

/// The fields of a protobuf message, one after the other.
struct Fields {
    enum Value {
        case number(UInt64)
        case fixed32(UInt32)
        case fixed64
        case bytes(ArraySlice<UInt8>)
    }

    private var rest: ArraySlice<UInt8>

    init(_ message: ArraySlice<UInt8>) {
        rest = message
    }

    mutating func next() throws -> (number: UInt64, value: Value)? {
        guard !rest.isEmpty else { return nil }
        let tag = try varint()
        guard (8..<(1 << 32)).contains(tag) else {
            throw FrameError(description: "field \(tag >> 3) does not exist")
        }
        switch tag & 7 {
        case 0:
            return (tag >> 3, .number(try varint()))
        case 1:
            _ = try take(8)
            return (tag >> 3, .fixed64)
        case 2:
            return (tag >> 3, .bytes(try take(varint())))
        case 5:
            let fixed = try take(4).reversed().reduce(UInt32(0)) { $0 << 8 | UInt32($1) }
            return (tag >> 3, .fixed32(fixed))
        default:
            throw FrameError(description: "wire type \(tag & 7) does not exist")
        }
    }

    private mutating func take(_ count: UInt64) throws -> ArraySlice<UInt8> {
        guard count <= UInt64(rest.count) else {
            throw FrameError(description: "a stream message ends inside a field")
        }
        let taken = rest.prefix(Int(count))
        rest = rest.dropFirst(Int(count))
        return taken
    }

    private mutating func varint() throws -> UInt64 {
        var value: UInt64 = 0
        for shift in stride(from: UInt64(0), through: 63, by: 7) {
            guard let byte = rest.popFirst() else { break }
            if shift == 63 && byte > 1 { break }
            value |= UInt64(byte & 0x7f) << shift
            if byte < 0x80 { return value }
        }
        throw FrameError(description: "a stream message has a broken number")
    }
}
