import Foundation
import PionWire
import SwiftProtobuf

/// The longest stored prefix of a token sequence.
public struct Match: Sendable, Hashable {
    /// Whether there is one.
    public let hit: Bool
    /// Why not, or why it is shorter than the prompt.
    public let reason: MissReason
    /// The prefix to fetch; with a miss the nearest stored one, if any.
    public let prefix: PrefixInfo?
    public let requestedTokens: UInt64
    /// Leading tokens that it has in common with the prompt.
    public let matchedTokens: UInt64
    /// Rows that may be fetched.
    public let servedTokens: UInt64
    /// The first of the kinds of parts asked for that is not at the later boundary, which made them fewer; empty if
    /// none did.
    public let shortenedBy: String
    /// The prefix with the most leading tokens in common, whatever parts it has, with a hit or without; empty if there
    /// is none. A store of the prompt that extends it, as its `parent`, keeps none of these rows twice.
    public let longestNamespace: String
    /// How many they are.
    public let longestTokens: UInt64
    /// Pass it to `fetch`.
    public let leaseID: [UInt8]
}

/// What is stored under a name.
public struct Lookup: Sendable, Hashable {
    /// Whether it is what was expected.
    public let hit: Bool
    public let reason: MissReason
    /// nil if nothing is stored there.
    public let prefix: PrefixInfo?
    /// Index of the first token that differs, where they do.
    public let firstDifference: UInt64
    public let leaseID: [UInt8]
}

/// The acknowledgement of a store.
public struct Stored: Sendable, Hashable {
    public let namespace: String
    /// The same was there; nothing was written.
    public let alreadyStored: Bool
    public let generation: UInt64
    public let tokenCount: UInt64
    public let storedBytes: UInt64
    public let durability: Durability
    public let base: UInt64
}

/// What a fetch brought: whole, each chunk of it checked.
public struct Prefix: Sendable, Hashable {
    public let announced: Announced
    public let tensors: [Tensor]
    public let parts: [Part]

    public var namespace: String { announced.namespace }
    public var tokenIDs: [UInt32] { announced.tokenIDs }
    public var rows: Range<UInt64> { announced.begin..<announced.end }
}

extension PionClient {
    /// Finds the longest stored prefix of a token sequence.
    ///
    /// - Parameters:
    ///   - fidelities: Which may answer; none means "raw", what was stored without loss.
    ///   - minTokens: A shorter match is a miss.
    ///   - leaseMS: How long it stays readable; nil means 10,000, 0 not at all, at most 60,000.
    ///   - partKinds: Kinds of parts that are needed at the boundary: the match is shortened to the longest one that
    ///     every kind has, and `shortenedBy` says which kind it was.
    ///   - timeout: Until it is over a server that cannot be reached is waited for; nil: the client's, three tries.
    public func match(
        model: String, tokenIDs: [UInt32], fidelities: [String] = [], minTokens: UInt64 = 0, leaseMS: UInt32? = nil,
        partKinds: [String] = [], timeout: Duration? = nil
    ) async throws -> Match {
        try check(tokenIDs)
        let request = Pion_V1_PrefixStoreMatchRequest.with {
            $0.modelID = model
            $0.tokenIds = Data(Blocks.pack(tokenIDs))
            $0.fidelities = fidelities
            $0.minTokens = minTokens
            if let leaseMS { $0.leaseMs = leaseMS }
            $0.partKinds = partKinds
        }
        let route = routeKey(model: model, tokenIDs: tokenIDs)
        let answer = try await ask(
            Service.prefixStore.method("Match"), request, route: route, timeout: timeout,
            answer: Pion_V1_PrefixStoreMatchResponse.self)
        let match = Match(
            hit: answer.hit, reason: MissReason(answer.reason),
            prefix: answer.hasPrefix ? try PrefixInfo(answer.prefix) : nil,
            requestedTokens: answer.requestedTokens, matchedTokens: answer.matchedTokens,
            servedTokens: answer.servedTokens, shortenedBy: answer.shortenedBy,
            longestNamespace: answer.longestNamespace, longestTokens: answer.longestTokens,
            leaseID: Array(answer.leaseID))
        if match.hit {
            guard let prefix = match.prefix else { throw PionError(.badAnswer, "a hit names no prefix") }
            remember(prefix.namespace, leaseID: match.leaseID, route: route)
        }
        if !match.longestNamespace.isEmpty { remember(match.longestNamespace, route: route) }
        return match
    }

    /// Says what is stored under a name, and whether it is what is expected. A client of several nodes that does not
    /// know where the name is asks all of them.
    ///
    /// - Parameters:
    ///   - model: Another one is a miss.
    ///   - tokenIDs: Others are a miss.
    ///   - layout: Another one is a miss.
    ///   - leaseMS: How long a hit stays readable, at most 60,000.
    public func lookup(
        _ namespace: String, model: String? = nil, tokenIDs: [UInt32] = [], layout: Layout? = nil, leaseMS: UInt32 = 0,
        timeout: Duration? = nil
    ) async throws -> Lookup {
        let request = Pion_V1_PrefixStoreLookupRequest.with {
            $0.leaseMs = leaseMS
            $0.queries = [
                .with {
                    $0.namespace = namespace
                    $0.modelID = model ?? ""
                    $0.tokenIds = Data(Blocks.pack(tokenIDs))
                    if let layout { $0.layout = layout.message }
                }
            ]
        }
        var routes = routes(to: namespace)
        if let model, !tokenIDs.isEmpty { routes = [routeKey(model: model, tokenIDs: tokenIDs)] }
        let deadline = until(timeout)
        var lookup: Lookup
        repeat {
            let route = routes.removeFirst()
            lookup = try await lookUp(request, route: route, timeout: deadline.remaining)
            if lookup.hit { remember(namespace, leaseID: lookup.leaseID, route: route) }
        } while lookup.prefix == nil && !routes.isEmpty
        return lookup
    }

    private func lookUp(
        _ request: Pion_V1_PrefixStoreLookupRequest, route: String, timeout: Duration?
    ) async throws -> Lookup {
        let answer = try await ask(
            Service.prefixStore.method("Lookup"), request, route: route, timeout: timeout,
            answer: Pion_V1_PrefixStoreLookupResponse.self)
        guard answer.results.count == 1 else {
            throw PionError(.badAnswer, "\(answer.results.count) answers to one query")
        }
        let result = answer.results[0]
        return Lookup(
            hit: result.hit, reason: MissReason(result.reason),
            prefix: result.hasPrefix ? try PrefixInfo(result.prefix) : nil, firstDifference: result.firstDifference,
            leaseID: Array(result.leaseID))
    }

    /// Stores a prefix: it is there as a whole when this returns, or not at all. If only the transport failed,
    /// everything is sent again.
    ///
    /// - Parameters:
    ///   - namespace: nil derives one from the token ids.
    ///   - tokenIDs: All ids, the parent's share included.
    ///   - tensors: The rows from `base` on, ordered by slot, K before V; of none, if that is all tokens.
    ///   - parent: The prefix that this one extends, and `base` how many rows it takes from it.
    ///   - replace: Puts it in the place of what the namespace holds.
    ///   - prefillMS: The measured prefill time of these tokens; 0: not measured.
    ///   - timeout: For everything; nil: as long as it makes progress.
    public func store(
        _ namespace: String? = nil, model: String, tokenIDs: [UInt32], tensors: [Tensor], parts: [Part] = [],
        parent: String? = nil, base: Int = 0, replace: Bool = false, durability: Durability = .process,
        prefillMS: Double = 0, timeout: Duration? = nil
    ) async throws -> Stored {
        try check(tokenIDs)
        guard (0...tokenIDs.count).contains(base) else {
            throw PionError(.invalid, "base: \(base) of \(tokenIDs.count) tokens", metadata: ["field": "base"])
        }
        for tensor in tensors where tensor.data.count != (tokenIDs.count - base) * tensor.layout.rowBytes {
            throw PionError(
                .invalid, "\(tensor.layout.name) has \(tensor.data.count) bytes, not \(tokenIDs.count - base) rows",
                metadata: ["field": "tensors"])
        }
        try PionError.check32("parts", parts.map(\.info.slot))
        let layout: Layout
        do {
            layout = try Layout(tensors.map(\.layout))
        } catch let error as LayoutError {
            throw PionError(.invalid, "\(error)", metadata: ["field": error.field])
        }
        guard layout.fidelity == Blocks.rawFidelity else {
            throw PionError(.invalid, "this client stores raw rows", metadata: ["field": "codec"])
        }
        let header = Pion_V1_PrefixStoreStoreHeader.with {
            $0.namespace = namespace ?? ""
            $0.modelID = model
            $0.tokenIds = Data(Blocks.pack(tokenIDs))
            if !tensors.isEmpty { $0.layout = layout.message }
            $0.parentNamespace = parent ?? ""
            $0.base = UInt64(base)
            $0.replace = replace
            $0.durability = durability.message
            $0.prefillMs = prefillMS
            $0.parts = parts.map { part in
                var info = part.info
                info.sizeBytes = UInt64(part.data.count)
                return info.message
            }
        }
        let outgoing = Outgoing(
            header: try header.serializedBytes(), tensors: tensors, parts: parts, firstRow: UInt64(base))
        let route = routeKey(model: model, tokenIDs: tokenIDs)
        let deadline = until(timeout)
        let answer = try await sendWhole(deadline) {
            try await send(Service.prefixStore.method("Store"), route: route, deadline: deadline) { send in
                try await outgoing.forEach { message, _ in try await send(message) }
            }
        }
        let stored = try decoded(answer, as: Pion_V1_PrefixStoreStoreResponse.self)
        remember(stored.namespace, route: route)
        return Stored(
            namespace: stored.namespace, alreadyStored: stored.alreadyStored, generation: stored.generation,
            tokenCount: stored.tokenCount, storedBytes: stored.storedBytes, durability: Durability(stored.durability),
            base: stored.base)
    }

    /// Takes names away, and tells for each whether anything was stored under it. A client of several nodes has all of
    /// them do it.
    public func drop(_ namespaces: [String], timeout: Duration? = nil) async throws -> [Bool] {
        guard let first = namespaces.first else { return [] }
        let request = Pion_V1_PrefixStoreDropRequest.with { $0.namespaces = namespaces }
        let routes = everywhere.isEmpty ? [route(of: first)] : everywhere
        let deadline = until(timeout)
        var dropped = namespaces.map { _ in false }
        for route in routes {
            let answer = try await once(
                Service.prefixStore.method("Drop"), request, route: route, timeout: deadline.remaining,
                answer: Pion_V1_PrefixStoreDropResponse.self)
            guard answer.results.count == namespaces.count else {
                throw PionError(.badAnswer, "\(answer.results.count) answers about \(namespaces.count) names")
            }
            dropped = zip(dropped, answer.results).map { $0 || $1.dropped }
        }
        return dropped
    }

    private func check(_ tokenIDs: [UInt32]) throws {
        guard (1...Limits.tokensMax).contains(tokenIDs.count) else {
            throw PionError(
                .invalid, "token_ids: \(tokenIDs.count) of them; 1 to \(Limits.tokensMax)",
                metadata: ["field": "token_ids"])
        }
    }
}
