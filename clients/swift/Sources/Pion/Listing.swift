import PionWire

extension PionClient {
    /// Yields what is visible, ordered by name: names that begin with a prefix, or all. Asks for a page when it is
    /// needed. What several nodes hold is listed once.
    public func list(_ prefix: String = "") -> AsyncThrowingStream<PrefixInfo, any Error> {
        let routes = everywhere.isEmpty ? [Routes.byName(prefix)] : everywhere
        let listing = Listing(self, prefix, routes)
        return AsyncThrowingStream { try await listing.next() }
    }
}

/// The lists of several nodes as one: of their next names the first.
private actor Listing {
    private struct Node {
        let route: String
        /// Of the next page; nil: there is none.
        var token: String? = ""
        var page: ArraySlice<PrefixInfo> = []
    }

    private let client: PionClient
    private let prefix: String
    private var nodes: [Node]
    private var last: String?

    init(_ client: PionClient, _ prefix: String, _ routes: [String]) {
        self.client = client
        self.prefix = prefix
        nodes = routes.map { Node(route: $0) }
    }

    func next() async throws -> PrefixInfo? {
        while true {
            for index in nodes.indices { nodes[index] = try await filled(nodes[index]) }
            let some = nodes.indices.filter { !nodes[$0].page.isEmpty }
            guard let first = some.min(by: { precedes(nodes[$0].page.first, nodes[$1].page.first) }) else { return nil }
            let info = nodes[first].page.removeFirst()
            // Names are bytes: two that a String calls equal may be two.
            if let last, last.utf8.elementsEqual(info.namespace.utf8) { continue }
            last = info.namespace
            return info
        }
    }

    private func precedes(_ one: PrefixInfo?, _ other: PrefixInfo?) -> Bool {
        (one?.namespace ?? "").utf8.lexicographicallyPrecedes((other?.namespace ?? "").utf8)
    }

    /// Returns a node with its next page, if it has none left and there is one.
    private func filled(_ node: Node) async throws -> Node {
        var node = node
        while node.page.isEmpty, let token = node.token {
            let request = Pion_V1_PrefixStoreListRequest.with {
                $0.pageSize = UInt32(Limits.namesMax)
                $0.namespacePrefix = prefix
                $0.pageToken = token
            }
            let answer = try await client.ask(
                Service.prefixStore.method("List"), request, route: node.route, timeout: nil,
                answer: Pion_V1_PrefixStoreListResponse.self)
            node.page = try answer.prefixes.map(PrefixInfo.init)[...]
            node.token = answer.nextPageToken.isEmpty ? nil : answer.nextPageToken
        }
        return node
    }
}
