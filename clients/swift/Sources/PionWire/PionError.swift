/// What can go wrong, as the caller sees it.

/// One word about why a call failed.
public struct Reason: RawRepresentable, Sendable, Hashable, ExpressibleByStringLiteral, CustomStringConvertible {
    public let rawValue: String

    public init(rawValue: String) { self.rawValue = rawValue }
    public init(stringLiteral value: String) { rawValue = value }
    public var description: String { rawValue }

    // Those that cross the wire; pion.v1.ErrorReason says more about each.
    public static let invalid: Reason = "INVALID"
    public static let checksum: Reason = "CHECKSUM"
    public static let rows: Reason = "ROWS"
    public static let layout: Reason = "LAYOUT"
    public static let generation: Reason = "GENERATION"
    public static let otherContent: Reason = "OTHER_CONTENT"
    public static let notStored: Reason = "NOT_STORED"
    public static let evicted: Reason = "EVICTED"
    public static let cold: Reason = "COLD"
    public static let missing: Reason = "MISSING"
    public static let budget: Reason = "BUDGET"
    public static let quota: Reason = "QUOTA"
    public static let diskFull: Reason = "DISK_FULL"
    public static let tooManyStreams: Reason = "TOO_MANY_STREAMS"
    public static let noBackend: Reason = "NO_BACKEND"
    public static let starting: Reason = "STARTING"
    public static let draining: Reason = "DRAINING"
    public static let corrupt: Reason = "CORRUPT"
    public static let stalled: Reason = "STALLED"
    public static let notAuthenticated: Reason = "NOT_AUTHENTICATED"
    public static let notAllowed: Reason = "NOT_ALLOWED"
    public static let `internal`: Reason = "INTERNAL"
    public static let conflict: Reason = "CONFLICT"

    // Those that the client gives itself.
    /// The server cannot be reached, or the connection broke.
    public static let unavailable: Reason = "UNAVAILABLE"
    /// No answer in time, or a stream that brought nothing for too long.
    public static let deadlineExceeded: Reason = "DEADLINE_EXCEEDED"
    /// The answer contradicts itself or the request; nothing of it was used.
    public static let badAnswer: Reason = "BAD_ANSWER"
    /// This client cannot take rows in such a codec, or the server knows no such call.
    public static let unsupported: Reason = "UNSUPPORTED"
}

/// What a call failed with.
public struct PionError: Error, Sendable, Hashable, CustomStringConvertible {
    public let reason: Reason
    /// For people.
    public let message: String
    /// What the server says about it, such as `namespace` or `needed_bytes`.
    public let metadata: [String: String]
    /// How long the server asks to wait; nil where waiting does not help.
    public let retryAfter: Duration?
    /// Whether the transport or a proxy failed, not the server.
    public let fromTransport: Bool

    public init(
        _ reason: Reason, _ message: String, metadata: [String: String] = [:], retryAfter: Duration? = nil,
        fromTransport: Bool = false
    ) {
        self.reason = reason
        self.message = message
        self.metadata = metadata
        self.retryAfter = retryAfter
        self.fromTransport = fromTransport
    }

    public var description: String { "\(reason): \(message)" }

    /// How long to wait before the same read is asked once more; nil: do not. Zero leaves the pause to the
    /// caller. For calls that change nothing.
    public var pauseBeforeAskingAgain: Duration? {
        if fromTransport { return reason == .unavailable ? .zero : nil }
        switch reason {
        case .starting, .draining, .tooManyStreams, .stalled: return retryAfter ?? .zero
        default: return nil
        }
    }

    /// Refuses numbers that 32 bits do not hold, as they travel, instead of trapping.
    public static func check32(_ field: String, _ numbers: Int...) throws {
        try check32(field, numbers)
    }

    /// Refuses numbers that 32 bits do not hold, as they travel, instead of trapping.
    public static func check32(_ field: String, _ numbers: [Int]) throws {
        for number in numbers where UInt32(exactly: number) == nil {
            throw PionError(
                .invalid, "\(field): \(number) is not between 0 and \(UInt32.max)", metadata: ["field": field])
        }
    }

    static func badAnswer(_ message: String) -> PionError { PionError(.badAnswer, message) }
}
