import PionWire

/// The server, and what it holds.
public struct Description: Sendable, Hashable {
    public let version: String
    /// Empty if attend is off.
    public let attendBackend: String
    public let diskBudgetBytes: UInt64
    public let diskUsedBytes: UInt64
    public let prefixCount: UInt64
    public let rowCount: UInt64
    public let limits: [String: UInt64]

    /// Several as one: what is counted is the sum, a limit the smallest, a feature one that all have.
    init(_ nodes: [Pion_V1_PrefixStoreDescribeResponse]) {
        let backends = nodes.map(\.attendBackend)
        version = joined(nodes.map(\.version))
        attendBackend = backends.contains("") ? "" : joined(backends)  // a session may lie on any of them
        diskBudgetBytes = sum(nodes, \.diskBudgetBytes)
        diskUsedBytes = sum(nodes, \.diskUsedBytes)
        prefixCount = sum(nodes, \.prefixCount)
        rowCount = sum(nodes, \.rowCount)
        limits = Dictionary(nodes.flatMap(\.limits).map { ($0.name, $0.value) }, uniquingKeysWith: min)
    }
}

/// The value receipt: what the store did for its clients.
public struct Receipt: Sendable, Hashable {
    public let hits: UInt64
    public let misses: UInt64
    public let tokensServed: UInt64
    public let bytesStreamed: UInt64
    public let prefillSecondsAvoided: Double
    /// Of which backed by a prefill time that a client reported.
    public let prefillSecondsAvoidedMeasured: Double

    init(_ nodes: [Pion_V1_Receipt]) {
        hits = sum(nodes, \.hits)
        misses = sum(nodes, \.misses)
        tokensServed = sum(nodes, \.tokensServed)
        bytesStreamed = sum(nodes, \.bytesStreamed)
        prefillSecondsAvoided = nodes.reduce(0) { $0 + $1.prefillSecondsAvoided }
        prefillSecondsAvoidedMeasured = nodes.reduce(0) { $0 + $1.prefillSecondsAvoidedMeasured }
    }
}

extension PionClient {
    /// Describes the server; of several nodes, what they are together. No node is left out: if one cannot be reached,
    /// that is the answer. So it is with `stats` and `sync`.
    public func describe(timeout: Duration? = nil) async throws -> Description {
        Description(
            try await each(timeout) { node, timeout in
                try await ask(
                    Service.prefixStore.method("Describe"), Pion_V1_PrefixStoreDescribeRequest(), route: "", node: node,
                    timeout: timeout)
            })
    }

    /// Returns the value receipt, all nodes together.
    public func stats(timeout: Duration? = nil) async throws -> Receipt {
        let answers: [Pion_V1_StatsGetResponse] = try await each(timeout) { node, timeout in
            try await ask(
                Service.stats.method("Get"), Pion_V1_StatsGetRequest(), route: "", node: node, timeout: timeout)
        }
        return Receipt(answers.map(\.receipt))
    }

    /// Returns when everything acknowledged before is on stable storage, on every node.
    public func sync(timeout: Duration? = nil) async throws {
        let _: [Pion_V1_PrefixStoreSyncResponse] = try await each(timeout) { node, timeout in
            try await ask(
                Service.prefixStore.method("Sync"), Pion_V1_PrefixStoreSyncRequest(), route: "", node: node,
                timeout: timeout)
        }
    }

    /// Asks every node as it is named, whether it is up or not: for what is asked about nodes, and of which no other
    /// can stand in.
    private func each<Answer>(
        _ timeout: Duration?, _ ask: (_ node: String, _ timeout: Duration?) async throws -> Answer
    ) async throws -> [Answer] {
        let deadline = until(timeout)
        var answers: [Answer] = []
        for node in nodeNames { answers.append(try await ask(node, deadline.remaining)) }
        return answers
    }
}

private func sum<Message>(_ nodes: [Message], _ count: KeyPath<Message, UInt64>) -> UInt64 {
    nodes.reduce(0) { $0 + $1[keyPath: count] }
}

/// Returns each text once.
private func joined(_ texts: [String]) -> String {
    var seen: Set<String> = []
    return texts.filter { seen.insert($0).inserted }.joined(separator: ", ")
}
