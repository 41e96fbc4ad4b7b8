import Foundation
import PionWire
import SwiftProtobuf
import Synchronization

/// A recurrent state: one opaque value per session and layer, exact at one token boundary.
public struct SSMState: Sendable, Hashable {
    /// The state after this many tokens; 0 if nobody said.
    public var boundaryTokens: UInt64
    /// The cache class, data types and shapes, in the client's words.
    public var description: String
    public var model: String
    public var data: [UInt8]

    public init(data: [UInt8], boundaryTokens: UInt64 = 0, description: String = "", model: String = "") {
        self.data = data
        self.boundaryTokens = boundaryTokens
        self.description = description
        self.model = model
    }
}

extension PionClient {
    /// Stores a recurrent state, replacing what was there; returns its generation.
    public func storeState(
        session: String, layer: Int, _ state: SSMState, durability: Durability = .process, timeout: Duration? = nil
    ) async throws -> UInt64 {
        try PionError.check32("layer", layer)
        let header = Pion_V1_SSMStateStoreHeader.with {
            $0.session = session
            $0.layer = UInt32(layer)
            $0.durability = durability.message
            $0.info = .with {
                $0.sizeBytes = UInt64(state.data.count)
                $0.boundaryTokens = state.boundaryTokens
                $0.description_p = state.description
                $0.modelID = state.model
            }
        }
        let first = Framing.header(try header.serializedBytes())
        let route = route(ofState: session)
        let deadline = until(timeout)
        let answer = try await sendWhole(deadline) {
            try await send(Service.ssmState.method("Store"), route: route, deadline: deadline) { send in
                try await send(first)
                for start in stride(from: 0, to: state.data.count, by: Limits.chunkBytesMax) {
                    let end = min(start + Limits.chunkBytesMax, state.data.count)
                    try await send(Framing.bytes(offsetBytes: UInt64(start), data: Array(state.data[start..<end])))
                }
            }
        }
        return try decoded(answer, as: Pion_V1_SSMStateStoreResponse.self).generation
    }

    /// Brings a recurrent state back; nil is a miss. A stream that breaks goes on where it broke.
    public func fetchState(session: String, layer: Int, timeout: Duration? = nil) async throws -> SSMState? {
        try PionError.check32("layer", layer)
        let deadline = until(timeout)
        let arriving = Mutex(StateReception(bytesMax: options.fetchBytesMax))
        var fruitless = 0
        while !arriving.withLock({ $0.ended }) {
            let before = arriving.withLock { $0.data.count }
            do {
                let request = arriving.withLock { $0.request(session: session, layer: layer) }
                let bytes: [UInt8] = try request.serializedBytes()
                try await receive(
                    Service.ssmState.method("Fetch"), bytes, route: route(ofState: session), deadline: deadline
                ) { message in
                    try arriving.withLock { try $0.take(message) }
                }
                guard arriving.withLock({ $0.ended }) else {
                    throw PionError(.badAnswer, "the stream ended before everything that was announced came")
                }
            } catch let error as PionError {
                if arriving.withLock({ $0.ended }) { break }
                fruitless = arriving.withLock { $0.data.count } > before ? 0 : fruitless + 1
                switch error.reason {
                case .corrupt:
                    return nil
                case .generation where fruitless < triesMax:  // replaced meanwhile: the new one, then
                    arriving.withLock { $0 = StateReception(bytesMax: options.fetchBytesMax) }
                case .checksum where fruitless < triesMax:
                    break
                default:
                    guard try await deadline.pause(after: error, attempt: fruitless) else { throw error }
                }
            }
        }
        return arriving.withLock { $0.state }
    }

    /// Drops one layer of a session, or all; returns how many values it had.
    public func dropState(session: String, layer: Int? = nil, timeout: Duration? = nil) async throws -> Int {
        try PionError.check32("layer", layer ?? 0)
        let request = Pion_V1_SSMStateDropRequest.with {
            $0.session = session
            if let layer { $0.layer = UInt32(layer) }
        }
        let answer = try await once(
            Service.ssmState.method("Drop"), request, route: route(ofState: session), timeout: timeout,
            answer: Pion_V1_SSMStateDropResponse.self)
        return Int(answer.droppedCount)
    }
}

/// A value on its way, over as many streams as it takes.
private struct StateReception: Sendable {
    let bytesMax: UInt64
    var header: Pion_V1_SSMStateFetchHeader?
    var data: [UInt8] = []
    private var headed = false

    init(bytesMax: UInt64) { self.bytesMax = bytesMax }

    var ended: Bool { header.map { UInt64(data.count) == $0.info.sizeBytes } ?? false }

    var state: SSMState? {
        guard let header, header.found else { return nil }
        return SSMState(
            data: data, boundaryTokens: header.info.boundaryTokens, description: header.info.description_p,
            model: header.info.modelID)
    }

    /// A header comes first again.
    mutating func request(session: String, layer: Int) -> Pion_V1_SSMStateFetchRequest {
        headed = false
        return .with {
            $0.session = session
            $0.layer = UInt32(layer)
            $0.offsetBytes = UInt64(data.count)
            $0.generation = header?.generation ?? 0
        }
    }

    mutating func take(_ message: [UInt8]) throws {
        let parsed: StreamMessage
        do {
            parsed = try Framing.parseBytes(message)
        } catch {
            throw PionError(.badAnswer, "\(error)")
        }
        switch parsed {
        case .header(let bytes) where !headed:
            headed = true
            try take(header: decoded(bytes))
        case .part(let chunk) where headed:
            try take(chunk)
        default:
            throw PionError(.badAnswer, "a message came out of turn")
        }
    }

    private mutating func take(header announced: Pion_V1_SSMStateFetchHeader) throws {
        guard announced.found else {
            (header, data) = (Pion_V1_SSMStateFetchHeader(), [])
            return
        }
        guard announced.info.sizeBytes <= bytesMax else {
            throw PionError(
                .badAnswer, "\(announced.info.sizeBytes) bytes were announced; fetchBytesMax is \(bytesMax)")
        }
        guard header == nil || header == announced else {
            throw PionError(.badAnswer, "a resumed stream announces something else")
        }
        header = announced
        data.reserveCapacity(Int(announced.info.sizeBytes))
    }

    private mutating func take(_ chunk: PartChunk) throws {
        let missing = (header?.info.sizeBytes ?? 0) - UInt64(data.count)
        guard !chunk.data.isEmpty, UInt64(chunk.data.count) <= missing, chunk.offsetBytes == UInt64(data.count) else {
            throw PionError(.badAnswer, "\(chunk.data.count) bytes came that were not next")
        }
        guard chunk.data.withUnsafeBytes({ CRC32C.checksum($0) }) == chunk.crc32c else {
            throw PionError(.checksum, "a chunk arrived with another checksum than it was sent with")
        }
        data.append(contentsOf: chunk.data)
    }
}
