import Foundation
import PionWire
import SwiftProtobuf
import Synchronization

/// What to fetch: a name, or the lease that `match` or `lookup` gave.
public enum FetchSource: Sendable, Hashable {
    case namespace(String)
    case lease([UInt8])
}

extension PionClient {
    /// Brings a prefix back, whole and with the bits that were stored; nil is a miss.
    ///
    /// A stream that breaks goes on where it broke. What was evicted or found damaged a moment ago is a miss.
    ///
    /// - Parameters:
    ///   - rows: Only these; nil: all, or with `partKinds` those up to the longest boundary that has every kind.
    ///   - slots: Only these; none: all.
    ///   - partKinds: Kinds of parts that are needed. Rows never come without them: where there is no boundary that has
    ///     every kind, or not at the end of the `rows` asked for, it is a miss. `match` with the same kinds finds a
    ///     boundary that has them, and says in `shortenedBy` which kind made it shorter.
    ///   - timeout: For everything; nil: as long as it makes progress.
    public func fetch(
        _ source: FetchSource, rows: Range<UInt64>? = nil, slots: [Int] = [], partKinds: [String] = [],
        timeout: Duration? = nil
    ) async throws -> Prefix? {
        let request = try fetchRequest(source, rows: rows, slots: slots, partKinds: partKinds)
        let fetching = try await fetch(request, source, keeps: true, deadline: until(timeout)) { _, _ in }
        return fetching.reception.withLock { reception in
            guard let announced = reception.announced else { return nil }
            let (tensors, parts) = reception.result()
            return Prefix(announced: announced, tensors: tensors, parts: parts)
        }
    }

    /// Hands the bytes of a prefix on as they arrive, in order; nil is a miss.
    ///
    /// Needs memory for a few chunks, whatever the size. If the prefix changes on the way this throws
    /// `generation`, as what was handed on cannot be taken back. What `take` throws ends the fetch, and is thrown
    /// as it is. `rows`, `slots`, `partKinds` and `timeout` are as above.
    public func fetch(
        _ source: FetchSource, rows: Range<UInt64>? = nil, slots: [Int] = [], partKinds: [String] = [],
        timeout: Duration? = nil, to take: @Sendable @escaping (Announced, Arrived) async throws -> Void
    ) async throws -> Announced? {
        let request = try fetchRequest(source, rows: rows, slots: slots, partKinds: partKinds)
        let fetching = try await fetch(request, source, keeps: false, deadline: until(timeout)) { fetching, arrived in
            guard let announced = fetching.reception.withLock({ $0.announced }) else { return }
            do { try await take(announced, arrived) } catch { throw fetching.failed(error) }
        }
        return fetching.reception.withLock { $0.announced }
    }

    private func fetchRequest(
        _ source: FetchSource, rows: Range<UInt64>?, slots: [Int], partKinds: [String]
    ) throws -> Pion_V1_PrefixStoreFetchRequest {
        try PionError.check32("slots", slots)
        guard rows?.upperBound != 0 else {  // on its way it would mean all of them
            throw PionError(.invalid, "rows: none are asked for", metadata: ["field": "rows"])
        }
        return .with {
            switch source {
            case .namespace(let name): $0.namespace = name
            case .lease(let id): $0.leaseID = Data(id)
            }
            if let rows {
                $0.rows = .with {
                    $0.begin = rows.lowerBound
                    $0.end = rows.upperBound
                }
            }
            $0.slots = slots.map(UInt32.init)
            $0.partKinds = partKinds
        }
    }

    /// Asks where the prefix is, or may be; returns the first fetch that found it, or the last one.
    private func fetch(
        _ asked: Pion_V1_PrefixStoreFetchRequest, _ source: FetchSource, keeps: Bool, deadline: Deadline,
        take: @Sendable @escaping (Fetching, Arrived) async throws -> Void
    ) async throws -> Fetching {
        var routes =
            switch source {
            case .namespace(let name): routes(to: name)[...]
            case .lease(let id): [route(of: id)][...]
            }
        while true {
            let route = routes.removeFirst()
            let fetching = Fetching(Reception(bytesMax: options.fetchBytesMax, keeps: keeps))
            try await fetch(asked, fetching, route: route, deadline: deadline) { try await take(fetching, $0) }
            guard fetching.reception.withLock({ $0.announced }) != nil else {
                if routes.isEmpty { return fetching }
                continue
            }
            if case .namespace(let name) = source { remember(name, route: route) }
            return fetching
        }
    }

    private func fetch(
        _ asked: Pion_V1_PrefixStoreFetchRequest, _ fetching: Fetching, route: String, deadline: Deadline,
        take: @Sendable @escaping (Arrived) async throws -> Void
    ) async throws {
        var fruitless = 0
        while !fetching.ended {
            let before = fetching.doneBytes
            do {
                var request = asked
                if let resume = fetching.reception.withLock({ $0.beginStream() }) { request.resume(resume) }
                let bytes: [UInt8] = try request.serializedBytes()
                try await receive(
                    Service.prefixStore.method("Fetch"), bytes, route: route, deadline: deadline
                ) { message in
                    if let arrived = try fetching.take(message) { try await take(arrived) }
                }
                guard fetching.ended else {
                    throw PionError(.badAnswer, "the stream ended before everything that was announced came")
                }
            } catch let error as PionError where fetching.failure == nil {
                if fetching.ended { return }  // only the end of the stream was lost
                fruitless = fetching.doneBytes > before ? 0 : fruitless + 1
                if [.notStored, .evicted, .corrupt].contains(error.reason) {
                    guard fetching.missed() else { throw error }
                    return
                }
                guard try await resumes(fetching, after: error, fruitless: fruitless, deadline) else { throw error }
            } catch {
                throw fetching.failure ?? error
            }
        }
    }

    /// Gets ready to ask for the rest, if there is a point in it.
    private func resumes(
        _ fetching: Fetching, after error: PionError, fruitless: Int, _ deadline: Deadline
    ) async throws -> Bool {
        if error.reason == .generation, fetching.restarted() {
            return fruitless < triesMax  // another prefix has taken the name meanwhile: that one, then
        }
        if error.reason == .checksum { return fruitless < triesMax }
        return try await deadline.pause(after: error, attempt: fruitless)
    }
}

/// A fetch in progress, shared with the task that takes the stream.
private final class Fetching: Sendable {
    let reception: Mutex<Reception>
    private let ownFailure = Mutex<(any Error)?>(nil)

    init(_ reception: consuming Reception) {
        self.reception = Mutex(reception)
    }

    var ended: Bool { reception.withLock { $0.ended } }
    var doneBytes: UInt64 { reception.withLock { $0.doneBytes } }

    /// What the caller's own code threw. It may come from another client of this package, and must not be taken
    /// for what became of the stream.
    var failure: (any Error)? { ownFailure.withLock { $0 } }

    func failed(_ error: any Error) -> any Error {
        ownFailure.withLock { $0 = error }
        return error
    }

    /// Takes the next message; returns what arrived, if it was a chunk.
    func take(_ message: [UInt8]) throws -> Arrived? {
        let parsed: StreamMessage
        do {
            parsed = try Framing.parse(message)
        } catch {
            throw PionError(.badAnswer, "\(error)")
        }
        guard case .header(let bytes) = parsed else {
            return try reception.withLock { try $0.take(parsed) }
        }
        let header = try decoded(bytes, as: Pion_V1_PrefixStoreFetchHeader.self)
        let announced = header.found ? try Announced(header) : nil
        try reception.withLock { try $0.take(header: announced) }
        return nil
    }

    /// Forgets what came, if that is still possible and something was announced.
    func restarted() -> Bool {
        reception.withLock { reception in
            guard reception.announced != nil, reception.restarts else { return false }
            reception.restart()
            return true
        }
    }

    /// Makes it a miss, unless bytes are with the caller already.
    func missed() -> Bool {
        reception.withLock { reception in
            guard reception.restarts else { return false }
            reception.restart()
            return (try? reception.take(header: nil)) != nil
        }
    }
}

extension Pion_V1_PrefixStoreFetchRequest {
    fileprivate mutating func resume(_ resume: Resume) {
        generation = resume.generation
        rows = .with {
            $0.begin = resume.begin
            $0.end = resume.end
        }
        resumeTensorIndex = resume.tensorIndex
        resumeRow = resume.row
        resumePart = resume.part
        resumePartOffsetBytes = resume.partOffsetBytes
    }
}
