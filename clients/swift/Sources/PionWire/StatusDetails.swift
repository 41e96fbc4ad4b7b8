/// The details of a status: `google.rpc.Status`, as the trailer `grpc-status-details-bin` carries it.

extension PionError {
    /// Returns what the server said; nil if it did not say anything: then the transport or a proxy made the
    /// status, or the details are not what they should be.
    ///
    /// - Parameters:
    ///   - details: The value of `grpc-status-details-bin`.
    ///   - message: The status' own.
    public init?(details: [UInt8], message: String) {
        guard let status = try? Details(details[...]), let reason = status.reason else { return nil }
        self.init(Reason(rawValue: reason), message, metadata: status.metadata, retryAfter: status.retryAfter)
    }
}

private struct Details {
    var reason: String?
    var metadata: [String: String] = [:]
    var retryAfter: Duration?

    init(_ status: ArraySlice<UInt8>) throws {
        for any in try submessages(status, 3) {
            let value = try submessages(any, 2).last ?? []
            switch try text(any, 1) {
            case "type.googleapis.com/google.rpc.ErrorInfo": try takeErrorInfo(value)
            case "type.googleapis.com/google.rpc.RetryInfo": try takeRetryInfo(value)
            default: break
            }
        }
    }

    private mutating func takeErrorInfo(_ info: ArraySlice<UInt8>) throws {
        guard try text(info, 2) == "pion.v1" else { return }
        reason = try text(info, 1)
        for entry in try submessages(info, 3) {
            metadata[try text(entry, 1)] = try text(entry, 2)
        }
    }

    private mutating func takeRetryInfo(_ info: ArraySlice<UInt8>) throws {
        var (seconds, nanoseconds): (Int64, Int64) = (0, 0)
        for delay in try submessages(info, 1) {
            var fields = Fields(delay)
            while let field = try fields.next() {
                guard case .number(let number) = field.value else { continue }
                if field.number == 1 { seconds = Int64(bitPattern: number) }
                if field.number == 2 { nanoseconds = Int64(bitPattern: number) }
            }
        }
        guard (0..<86_400).contains(seconds), (0..<1_000_000_000).contains(nanoseconds) else { return }
        retryAfter = .seconds(seconds) + .nanoseconds(nanoseconds)
    }
}

/// Returns the values of every field of this number that holds bytes.
private func submessages(_ message: ArraySlice<UInt8>, _ number: UInt64) throws -> [ArraySlice<UInt8>] {
    var found: [ArraySlice<UInt8>] = []
    var fields = Fields(message)
    while let field = try fields.next() {
        if field.number == number, case .bytes(let bytes) = field.value { found.append(bytes) }
    }
    return found
}

private func text(_ message: ArraySlice<UInt8>, _ number: UInt64) throws -> String {
    String(decoding: try submessages(message, number).last ?? [], as: UTF8.self)
}
