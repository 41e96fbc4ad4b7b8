import Foundation
import GRPCCore
import GRPCProtobuf
import PionWire
import SwiftProtobuf
import Synchronization

/// The forms that calls take: one answer, asked once or again; a stream in; a stream out.

/// How often a read that brings nothing is tried in all, unless its caller gave a timeout.
let triesMax = 3

enum Service: String {
    case prefixStore = "pion.v1.PrefixStore"
    case attend = "pion.v1.Attend"
    case ssmState = "pion.v1.SSMState"
    case stats = "pion.v1.Stats"

    func method(_ name: String) -> MethodDescriptor {
        MethodDescriptor(fullyQualifiedService: rawValue, method: name)
    }
}

/// Messages of chunk streams, as they are.
struct RawSerializer: MessageSerializer {
    func serialize<Bytes: GRPCContiguousBytes>(_ message: [UInt8]) throws -> Bytes { Bytes(message) }
}

/// Messages of chunk streams, as they are.
struct RawDeserializer: MessageDeserializer {
    func deserialize<Bytes: GRPCContiguousBytes>(_ bytes: Bytes) throws -> [UInt8] {
        bytes.withUnsafeBytes { Array($0) }
    }
}

/// A moment by which something must be done. A caller that gave one is patient: a server that cannot be
/// reached is waited for until then. So is everybody, for `patience` each time that the server goes: it is being
/// restarted, or its proxy.
struct Deadline: Sendable {
    let end: ContinuousClock.Instant?
    private let isPatient: Bool
    private let patience: Duration
    private let gone = Progress()

    init(_ timeout: Duration?, otherwise: Duration?, patience: Duration) {
        isPatient = timeout != nil
        end = (timeout ?? otherwise).map { ContinuousClock.now + $0 }
        self.patience = patience
    }

    var remaining: Duration? { end.map { max($0 - ContinuousClock.now, .zero) } }

    /// Waits before a read is asked again; false if it should not be, or not in time.
    ///
    /// - Parameter attempt: How many in a row have brought nothing; 0 if this one broke off on the way.
    func pause(after error: any Error, attempt: Int) async throws -> Bool {
        if attempt <= 1 { gone.touch() }
        guard let error = error as? PionError, var wait = error.pauseBeforeAskingAgain else { return false }
        let isWaitedFor = error.reason == .unavailable && ContinuousClock.now < gone.last + patience
        guard isPatient || isWaitedFor || attempt < triesMax else { return false }
        if wait == .zero {  // spread, so that clients do not come back in step
            wait = .milliseconds(Double(min(max(attempt, 1), 10)) * .random(in: 100..<150))
        }
        if let remaining, wait >= remaining { return false }
        try await Task.sleep(for: wait)
        return true
    }
}

extension PionClient {
    /// Returns by when a call must be done whose caller gave this timeout. A server that stays away costs the client's
    /// own timeout once, however many calls are made meanwhile, and three tries from then on, until it has answered.
    func until(_ timeout: Duration?, otherwise: Duration? = nil) -> Deadline {
        Deadline(timeout, otherwise: otherwise, patience: max(options.timeout - away, .zero))
    }

    /// Makes a call with one answer, once.
    func once<Request: Message & Sendable, Answer: Message & Sendable>(
        _ method: MethodDescriptor, _ request: Request, route: String, node: String? = nil, timeout: Duration?,
        answer: Answer.Type = Answer.self
    ) async throws -> Answer {
        try await call(
            method, request, route: route, node: node, deadline: until(timeout, otherwise: options.timeout))
    }

    /// Makes a call with one answer that changes nothing, so that it may be tried again.
    func ask<Request: Message & Sendable, Answer: Message & Sendable>(
        _ method: MethodDescriptor, _ request: Request, route: String, node: String? = nil, timeout: Duration?,
        answer: Answer.Type = Answer.self
    ) async throws -> Answer {
        let deadline = until(timeout, otherwise: options.timeout)
        var attempt = 1
        while true {
            do {
                return try await call(method, request, route: route, node: node, deadline: deadline)
            } catch {
                guard try await deadline.pause(after: error, attempt: attempt) else { throw error }
                attempt += 1
            }
        }
    }

    private func call<Request: Message & Sendable, Answer: Message & Sendable>(
        _ method: MethodDescriptor, _ request: Request, route: String, node: String?, deadline: Deadline
    ) async throws -> Answer {
        try await reaching(route, node: node) { connection, metadata in
            try await connection.unary(
                request: ClientRequest(message: request, metadata: metadata),
                descriptor: method,
                serializer: ProtobufSerializer<Request>(),
                deserializer: ProtobufDeserializer<Answer>(),
                options: callOptions(deadline)
            ) { response in
                try response.message
            }
        }
    }

    /// Hands every message of one stream to `take`; whatever that throws ends the stream.
    func receive(
        _ method: MethodDescriptor, _ request: [UInt8], route: String, deadline: Deadline,
        take: @Sendable @escaping ([UInt8]) async throws -> Void
    ) async throws {
        try await watched { [self] progress in
            try await reaching(route) { connection, metadata in
                try await connection.serverStreaming(
                    request: ClientRequest(message: request, metadata: metadata),
                    descriptor: method,
                    serializer: RawSerializer(),
                    deserializer: RawDeserializer(),
                    options: callOptions(deadline)
                ) { response in
                    for try await message in response.messages {
                        self.noteAnswer()
                        progress.pause()  // the caller's own time does not count
                        defer { progress.touch() }
                        try await take(message)
                    }
                }
            }
        }
    }

    /// Sends one stream, once; returns the serialised answer.
    func send(
        _ method: MethodDescriptor, route: String, deadline: Deadline,
        produce: @Sendable @escaping (_ send: ([UInt8]) async throws -> Void) async throws -> Void
    ) async throws -> [UInt8] {
        let failure = Mutex<(any Error)?>(nil)
        return try await watched { [self] progress in
            do {
                return try await reaching(route) { connection, metadata in
                    try await connection.clientStreaming(
                        request: StreamingClientRequest(metadata: metadata) { writer in
                            do {
                                try await produce { message in
                                    do { try await writer.write(message) } catch { throw StreamEnded() }
                                    progress.touch()
                                }
                            } catch is StreamEnded {
                                return  // the server has answered already, or is gone: the response says which
                            } catch {
                                failure.withLock { $0 = error }
                                throw error
                            }
                        },
                        descriptor: method,
                        serializer: RawSerializer(),
                        deserializer: RawDeserializer(),
                        options: callOptions(deadline)
                    ) { response in
                        try response.message
                    }
                }
            } catch {
                // What went wrong while messages were made is the caller's own error.
                throw failure.withLock { $0 } ?? error
            }
        }
    }

    /// Repeats a stream that is idempotent as a whole, where only the transport failed.
    func sendWhole(_ deadline: Deadline, _ send: () async throws -> [UInt8]) async throws -> [UInt8] {
        var attempt = 1
        while true {
            do {
                return try await send()
            } catch let error as PionError where error.fromTransport {
                guard try await deadline.pause(after: error, attempt: attempt) else { throw error }
                attempt += 1
            }
        }
    }

    func callOptions(_ deadline: Deadline) -> CallOptions {
        var options = CallOptions.defaults
        options.timeout = deadline.remaining
        options.maxResponseMessageBytes = 66 << 20  // answers of Attend are as large as its queries
        options.maxRequestMessageBytes = 66 << 20
        return options
    }

    /// Ends work that makes no progress for `stallTimeout`.
    private func watched<Result: Sendable>(
        _ work: @Sendable @escaping (Progress) async throws -> Result
    ) async throws -> Result {
        let progress = Progress()
        let limit = options.stallTimeout
        return try await withThrowingTaskGroup(of: Result.self) { group in
            group.addTask { try await work(progress) }
            group.addTask {
                while true {
                    let left = progress.last + limit - ContinuousClock.now
                    guard left > .zero else {
                        throw PionError(.deadlineExceeded, "the stream made no progress for \(limit)")
                    }
                    try await Task.sleep(for: left)
                }
            }
            defer { group.cancelAll() }
            guard let result = try await group.next() else { throw CancellationError() }
            return result
        }
    }
}

/// No more messages are taken.
private struct StreamEnded: Error {}

/// When something last moved; now, while nothing is waited for.
final class Progress: Sendable {
    private let instant = Mutex<ContinuousClock.Instant?>(ContinuousClock.now)

    var last: ContinuousClock.Instant { instant.withLock { $0 } ?? ContinuousClock.now }

    func touch() { instant.withLock { $0 = ContinuousClock.now } }

    func pause() { instant.withLock { $0 = nil } }
}

/// What the end of a call says about the node that it was made to. A name that cannot be resolved is an internal error
/// of the transport.
func outcome(_ code: RPCError.Code, _ meaning: PionError) -> Nodes.Outcome {
    switch code {
    case .cancelled, .deadlineExceeded: .unknown
    case .unavailable: .unreachable
    default: meaning.fromTransport && meaning.reason == .unavailable ? .unreachable : .reached
    }
}

/// Returns what a status says, as one of our errors.
func pionError(_ error: RPCError) -> PionError {
    for details in error.metadata[binaryValues: "grpc-status-details-bin"] {
        if let known = PionError(details: details, message: error.message) { return known }
    }
    return PionError(reason(error.code), "\(error.code): \(error.message)", fromTransport: true)
}

/// Of statuses that nobody put an ErrorInfo to. A proxy whose backend died says internalError.
private func reason(_ code: RPCError.Code) -> Reason {
    switch code {
    case .unavailable, .internalError, .cancelled, .unknown: .unavailable
    case .deadlineExceeded: .deadlineExceeded
    case .unimplemented: .unsupported
    case .unauthenticated: .notAuthenticated
    case .permissionDenied: .notAllowed
    default: Reason(rawValue: "\(code)")
    }
}
