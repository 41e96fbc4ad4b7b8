import Foundation
import GRPCCore
import GRPCProtobuf
import PionWire
import SwiftProtobuf
import Synchronization

/// Where an attend entry stands.
public enum AttendState: Sendable, Hashable {
    case missing, cold, resident
}

/// Where the entry of one layer stands, and its shape unless it is missing.
public struct AttendEntry: Sendable, Hashable {
    public let layer: Int
    public let state: AttendState
    public let heads: Int
    public let rows: Int
    public let headDim: Int
}

/// What making entries resident came to.
public struct Warmed: Sendable, Hashable {
    public let layers: Int
    /// Layers of the prefix that do not have the shape asked for.
    public let skipped: Int
    public let residentBytes: UInt64
}

/// Which attention a query asks for.
public enum AttendKind: Sendable, Hashable {
    /// Over all rows.
    case dense(queries: Int)
    /// Over all rows and a causal suffix: [kv heads][suffix rows][head dim].
    case fused(queries: Int, suffixRows: Int, k: [Float], v: [Float])
    /// Over rows that the caller chooses, [heads][indices per head]; one query per head.
    case sparse(indices: [Int32], counts: [UInt32], indicesPerHead: Int)
    /// Over the blocks that rank highest; one query per head. `quest` ranks by the bounds of the keys.
    case sparseAuto(blockRows: Int, blocks: Int, quest: Bool)
    /// The same, with the whole suffix visible.
    case sparseAutoFused(blockRows: Int, blocks: Int, quest: Bool, suffixRows: Int, k: [Float], v: [Float])
}

/// One query: `q` is [heads][queries][head dim].
public struct AttendQuery: Sendable, Hashable {
    public var session: String
    public var layer: Int
    public var heads: Int
    public var headDim: Int
    public var kind: AttendKind
    public var q: [Float]
    /// The K/V head of each query head; empty: h / (heads / kv heads).
    public var headMap: [UInt8] = []
    /// Only the last so many rows are visible; nil: the server's default.
    public var windowRows: UInt64?
    /// nil: 1/sqrt(head dim).
    public var scale: Float?
    /// Makes a cold entry resident first.
    public var warm = false
    public var logSumExp = false

    public init(session: String, layer: Int, heads: Int, headDim: Int, kind: AttendKind, q: [Float]) {
        self.session = session
        self.layer = layer
        self.heads = heads
        self.headDim = headDim
        self.kind = kind
        self.q = q
    }
}

/// What a query returns.
public struct AttendAnswer: Sendable, Hashable {
    /// [heads][queries][head dim].
    public let out: [Float]
    /// [heads][queries] of the scaled scores; empty unless asked for.
    public let logSumExp: [Float]
}

extension PionClient {
    /// Makes rows resident: K and V of one layer, head-major [heads][rows][head dim].
    public func attendStore(
        session: String, layer: Int, heads: Int, rows: Int, headDim: Int, k: [Float], v: [Float],
        timeout: Duration? = nil
    ) async throws -> Warmed {
        try PionError.check32("rows", layer, heads, rows, headDim)
        let size = Double(heads) * Double(rows) * Double(headDim)  // may be more than an Int holds
        guard Double(k.count) == size, v.count == k.count else {
            throw PionError(
                .invalid, "\(k.count) and \(v.count) values are not \(heads) heads of \(rows) rows of \(headDim)",
                metadata: ["field": "k"])
        }
        let header = Pion_V1_AttendStoreHeader.with {
            $0.session = session
            $0.rows = .with {
                $0.layer = UInt32(layer)
                $0.heads = UInt32(heads)
                $0.rows = UInt64(rows)
                $0.headDim = UInt32(headDim)
            }
        }
        return try await attendStore(header, [packed(k), packed(v)], timeout: timeout)
    }

    /// Makes a stored prefix resident. Heads and head dim of nil take the stored layout's.
    ///
    /// - Parameters:
    ///   - layers: Only these; none: all.
    ///   - generation: That the rows must be of; nil takes any.
    ///   - rows: How many from the first one; layers with fewer are skipped. nil takes all there are.
    public func attendWarm(
        session: String, namespace: String, heads: Int? = nil, headDim: Int? = nil, layers: [Int] = [],
        generation: UInt64? = nil, rows: UInt64? = nil, timeout: Duration? = nil
    ) async throws -> Warmed {
        try PionError.check32("heads", heads ?? 0, headDim ?? 0)
        try PionError.check32("layers", layers)
        rememberWarmed(session, from: namespace)  // to the node that holds it
        let header = Pion_V1_AttendStoreHeader.with {
            $0.session = session
            $0.fromPrefix = .with {
                $0.namespace = namespace
                $0.heads = UInt32(heads ?? 0)
                $0.headDim = UInt32(headDim ?? 0)
                $0.layers = layers.map(UInt32.init)
                $0.generation = generation ?? 0
                $0.rows = rows ?? 0
            }
        }
        return try await attendStore(header, [], timeout: timeout)
    }

    private func attendStore(
        _ header: Pion_V1_AttendStoreHeader, _ sides: [[UInt8]], timeout: Duration?
    ) async throws -> Warmed {
        let first = Framing.header(try header.serializedBytes())
        let route = route(ofAttend: header.session)
        let deadline = until(timeout)
        let answer = try await sendWhole(deadline) {
            try await send(Service.attend.method("Store"), route: route, deadline: deadline) { send in
                try await send(first)
                for (index, side) in sides.enumerated() {
                    for start in stride(from: 0, to: side.count, by: Limits.chunkBytesMax) {
                        let data = Array(side[start..<min(start + Limits.chunkBytesMax, side.count)])
                        try await send(
                            Framing.bytes(partIndex: UInt64(index), offsetBytes: UInt64(start), data: data))
                    }
                }
            }
        }
        let warmed = try decoded(answer, as: Pion_V1_AttendStoreResponse.self)
        return Warmed(
            layers: Int(warmed.layerCount), skipped: Int(warmed.skippedCount), residentBytes: warmed.residentBytes)
    }

    /// Says where entries stand, in the order of the layers.
    public func attendLookup(
        session: String, layers: [Int], timeout: Duration? = nil
    ) async throws -> [AttendEntry] {
        try PionError.check32("layers", layers)
        let request = Pion_V1_AttendLookupRequest.with {
            $0.session = session
            $0.layers = layers.map(UInt32.init)
        }
        let answer = try await ask(
            Service.attend.method("Lookup"), request, route: route(ofAttend: session), timeout: timeout,
            answer: Pion_V1_AttendLookupResponse.self)
        guard answer.entries.map({ Int($0.layer) }) == layers else {
            throw PionError(.badAnswer, "\(answer.entries.count) answers about \(layers.count) layers")
        }
        return answer.entries.map { entry in
            let state: AttendState =
                switch entry.state {
                case .resident: .resident
                case .cold: .cold
                default: .missing
                }
            return AttendEntry(
                layer: Int(entry.layer), state: state, heads: Int(entry.heads), rows: Int(entry.rows),
                headDim: Int(entry.headDim))
        }
    }

    /// Forgets one layer of a session, or all; returns how many there were.
    public func attendDrop(session: String, layer: Int? = nil, timeout: Duration? = nil) async throws -> Int {
        try PionError.check32("layer", layer ?? 0)
        let request = Pion_V1_AttendDropRequest.with {
            $0.session = session
            if let layer { $0.layer = UInt32(layer) }
        }
        let answer = try await once(
            Service.attend.method("Drop"), request, route: route(ofAttend: session), timeout: timeout,
            answer: Pion_V1_AttendDropResponse.self)
        return Int(answer.droppedCount)
    }

    /// Answers one query, as a call of its own. Whoever asks many uses `withAttendStream`.
    public func attendQuery(_ query: AttendQuery, timeout: Duration? = nil) async throws -> AttendAnswer {
        try query.check()
        let answer = try await ask(
            Service.attend.method("Query"), query.message, route: route(ofAttend: query.session), timeout: timeout,
            answer: Pion_V1_AttendQueryResponse.self)
        return try query.answer(answer)
    }

    /// Lends an open stream of queries of one session. Any number of tasks may ask on it at once.
    public func withAttendStream<Result: Sendable>(
        session: String, _ body: @Sendable @escaping (AttendStream) async throws -> Result
    ) async throws -> Result {
        let (requests, sink) = AsyncStream.makeStream(of: Pion_V1_AttendStreamRequest.self)
        let stream = AttendStream(sink, timeout: options.timeout)
        let route = route(ofAttend: session)
        return try await withThrowingTaskGroup(of: Void.self) { group in
            group.addTask { [self] in
                do {
                    try await reaching(route) { connection, metadata in
                        try await connection.bidirectionalStreaming(
                            request: StreamingClientRequest(metadata: metadata) { writer in
                                for await request in requests { try await writer.write(request) }
                            },
                            descriptor: Service.attend.method("Stream"),
                            serializer: ProtobufSerializer<Pion_V1_AttendStreamRequest>(),
                            deserializer: ProtobufDeserializer<Pion_V1_AttendStreamResponse>(),
                            options: callOptions(self.until(nil))
                        ) { response in
                            for try await answer in response.messages { stream.take(answer) }
                        }
                    }
                    stream.end(PionError(.unavailable, "the server ended the stream", fromTransport: true))
                } catch {
                    stream.end(error)
                }
            }
            defer {
                sink.finish()
                group.cancelAll()
            }
            return try await body(stream)
        }
    }
}

/// An open stream of queries.
public final class AttendStream: Sendable {
    private typealias Answer = CheckedContinuation<Pion_V1_AttendQueryResponse, any Error>

    private struct State {
        var lastID: UInt64 = 0
        var waiting: [UInt64: Answer] = [:]
        var ended: (any Error)?
    }

    private let state = Mutex(State())
    private let sink: AsyncStream<Pion_V1_AttendStreamRequest>.Continuation
    private let timeout: Duration

    init(_ sink: AsyncStream<Pion_V1_AttendStreamRequest>.Continuation, timeout: Duration) {
        self.sink = sink
        self.timeout = timeout
    }

    /// Asks a query and waits for its answer.
    ///
    /// - Throws: `PionError`: what the server says about this query, then the stream goes on; or what ended the
    ///   stream, then every further query throws the same.
    public func query(_ query: AttendQuery) async throws -> AttendAnswer {
        try query.check()
        let id = state.withLock { state in
            state.lastID += 1
            return state.lastID
        }
        let late = Task { [timeout] in
            try await Task.sleep(for: timeout)
            self.resume(id, .failure(PionError(.deadlineExceeded, "no answer within \(timeout)")))
        }
        defer { late.cancel() }
        let message = query.message
        let answer = try await withTaskCancellationHandler {
            try await withCheckedThrowingContinuation { (answer: Answer) in
                let ended = state.withLock { state in
                    if state.ended == nil { state.waiting[id] = answer }
                    return state.ended
                }
                if let ended {
                    answer.resume(throwing: ended)
                    return
                }
                if Task.isCancelled {  // before there was anything for `onCancel` to find
                    resume(id, .failure(CancellationError()))
                    return
                }
                sink.yield(
                    .with {
                        $0.id = id
                        $0.query = message
                    })
            }
        } onCancel: {
            resume(id, .failure(CancellationError()))
        }
        return try query.answer(answer)
    }

    func take(_ response: Pion_V1_AttendStreamResponse) {
        switch response.outcome {
        case .answer(let answer):
            resume(response.id, .success(answer))
        case .error(let error):
            resume(response.id, .failure(PionError(Reason(rawValue: error.reason), error.message)))
        case nil:
            resume(response.id, .failure(PionError(.badAnswer, "an answer holds nothing")))
        }
    }

    func end(_ error: any Error) {
        let waiting = state.withLock { state in
            defer { state.waiting = [:] }
            state.ended = error
            return state.waiting.values
        }
        for answer in waiting { answer.resume(throwing: error) }
    }

    /// Answers a query; false if nobody waits for it any more.
    @discardableResult
    private func resume(_ id: UInt64, _ result: Result<Pion_V1_AttendQueryResponse, any Error>) -> Bool {
        guard let answer = state.withLock({ $0.waiting.removeValue(forKey: id) }) else { return false }
        answer.resume(with: result)
        return true
    }
}

extension AttendQuery {
    /// Refuses numbers that `message` could not hold.
    func check() throws {
        try PionError.check32("query", layer, heads, headDim)
        switch kind {
        case .dense(let queries):
            try PionError.check32("queries", queries)
        case .fused(let queries, let suffixRows, _, _):
            try PionError.check32("queries", queries, suffixRows)
        case .sparse(_, _, let indicesPerHead):
            try PionError.check32("indices_per_head", indicesPerHead)
        case .sparseAuto(let blockRows, let blocks, _):
            try PionError.check32("blocks", blockRows, blocks)
        case .sparseAutoFused(let blockRows, let blocks, _, let suffixRows, _, _):
            try PionError.check32("blocks", blockRows, blocks, suffixRows)
        }
    }

    var message: Pion_V1_AttendQueryRequest {
        .with {
            $0.session = session
            $0.layer = UInt32(layer)
            $0.heads = UInt32(heads)
            $0.headDim = UInt32(headDim)
            $0.headMap = Data(headMap)
            if let windowRows { $0.windowRows = windowRows }
            if let scale { $0.scale = scale }
            $0.warm = warm
            $0.logSumExp = logSumExp
            $0.data = Data(packed(q))
            $0.kind = kind.message
        }
    }

    /// Returns what an answer says, held against the question.
    func answer(_ message: Pion_V1_AttendQueryResponse) throws -> AttendAnswer {
        let out = floats(message.data)
        let lse = floats(message.logSumExp)
        guard message.data.count == 4 * q.count,
            message.logSumExp.count == (logSumExp ? 4 * q.count / max(headDim, 1) : 0)
        else {
            throw PionError(
                .badAnswer, "\(message.data.count) and \(message.logSumExp.count) bytes answer \(4 * q.count)")
        }
        return AttendAnswer(out: out, logSumExp: lse)
    }
}

extension AttendKind {
    fileprivate var message: Pion_V1_AttendQueryRequest.OneOf_Kind {
        switch self {
        case .dense(let queries):
            .dense(.with { $0.queries = UInt32(queries) })
        case .fused(let queries, let suffixRows, let k, let v):
            .fused(
                .with {
                    $0.queries = UInt32(queries)
                    $0.suffixRows = UInt32(suffixRows)
                    $0.suffixK = Data(packed(k))
                    $0.suffixV = Data(packed(v))
                })
        case .sparse(let indices, let counts, let indicesPerHead):
            .sparse(
                .with {
                    $0.indices = Data(Blocks.pack(indices.map(UInt32.init(bitPattern:))))
                    $0.counts = Data(Blocks.pack(counts))
                    $0.indicesPerHead = UInt32(indicesPerHead)
                })
        case .sparseAuto(let blockRows, let blocks, let quest):
            .sparseAuto(choice(blockRows, blocks, quest))
        case .sparseAutoFused(let blockRows, let blocks, let quest, let suffixRows, let k, let v):
            .sparseAutoFused(
                .with {
                    $0.choice = choice(blockRows, blocks, quest)
                    $0.suffixRows = UInt32(suffixRows)
                    $0.suffixK = Data(packed(k))
                    $0.suffixV = Data(packed(v))
                })
        }
    }
}

private func choice(_ blockRows: Int, _ blocks: Int, _ quest: Bool) -> Pion_V1_AttendSparseAuto {
    .with {
        $0.blockRows = UInt32(blockRows)
        $0.blocks = UInt32(blocks)
        $0.selector = quest ? .quest : .mean
    }
}

/// Returns values as they travel: f32, little-endian.
func packed(_ values: [Float]) -> [UInt8] {
    Blocks.pack(values.map { $0.bitPattern })
}

private func floats(_ data: Data) -> [Float] {
    (Blocks.unpack(data) ?? []).map(Float.init(bitPattern:))
}
