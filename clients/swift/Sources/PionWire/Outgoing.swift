/// The messages of a Store, made while they are sent.
public struct Outgoing: Sendable {
    private let header: [UInt8]
    private let tensors: [Tensor]
    private let parts: [Part]
    private let firstRow: UInt64

    /// - Parameters:
    ///   - header: Serialised.
    ///   - tensors: The rows from `firstRow` on.
    public init(header: [UInt8], tensors: [Tensor], parts: [Part], firstRow: UInt64) {
        self.header = header
        self.tensors = tensors
        self.parts = parts
        self.firstRow = firstRow
    }

    /// Bytes of all rows and parts.
    public var totalBytes: Int {
        tensors.reduce(0) { $0 + $1.data.count } + parts.reduce(0) { $0 + $1.data.count }
    }

    /// Hands each message to `send`, with the bytes of rows or parts in it.
    public func forEach(_ send: (_ message: [UInt8], _ dataBytes: Int) async throws -> Void) async throws {
        try await send(Framing.header(header), 0)
        for (index, tensor) in tensors.enumerated() where !tensor.data.isEmpty {
            let unit = tensor.layout.rowBytes
            let step = Limits.chunkBytesMax / unit * unit
            for start in stride(from: 0, to: tensor.data.count, by: step) {
                let data = Array(tensor.data[start..<min(start + step, tensor.data.count)])
                let message = Framing.rows(
                    tensorIndex: UInt64(index), firstRow: firstRow + UInt64(start / unit),
                    rowCount: UInt64(data.count / unit), data: data)
                try await send(message, data.count)
            }
        }
        for (index, part) in parts.enumerated() {
            for start in stride(from: 0, to: part.data.count, by: Limits.chunkBytesMax) {
                let data = Array(part.data[start..<min(start + Limits.chunkBytesMax, part.data.count)])
                let message = Framing.part(partIndex: UInt64(index), offsetBytes: UInt64(start), data: data)
                try await send(message, data.count)
            }
        }
    }
}
