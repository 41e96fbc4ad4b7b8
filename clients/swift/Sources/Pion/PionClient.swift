import Foundation
import GRPCCore
import GRPCNIOTransportHTTP2
@_exported import PionWire
import Synchronization

/// What a client needs beside an address; the defaults suit a server on this host.
public struct PionOptions: Sendable {
    /// Encrypts the connection: `.tls`, `.mTLS(certificateChain:privateKey:)`. Files are read once, when the
    /// client is made.
    public var security: HTTP2ClientTransport.Posix.TransportSecurity = .plaintext
    /// The name that the server's certificate is checked for; nil: the host of its address.
    public var authority: String?
    public var tenant = ""
    /// nil sends no credentials.
    public var password: String?
    /// Of a call with one answer.
    public var timeout: Duration = .seconds(5)
    /// Ends a stream on which nothing moved for so long.
    public var stallTimeout: Duration = .seconds(30)
    /// A prefix that is larger is refused before memory is allocated.
    public var fetchBytesMax: UInt64 = 16 << 30

    public init() {}
}

/// Makes a client, lends it, and closes it.
public func withPionClient<Result: Sendable>(
    _ address: String, options: PionOptions = PionOptions(),
    _ body: @Sendable @escaping (PionClient) async throws -> Result
) async throws -> Result {
    let client = try PionClient(address, options: options)
    return try await withThrowingTaskGroup(of: Void.self) { group in
        group.addTask { try await client.run() }
        defer { client.close() }
        return try await body(client)
    }
}

/// Talks to one server, to a mesh behind one address, or to all nodes of a mesh. Safe for concurrent use.
///
/// A miss is an answer, an error is an error: `match`, `lookup` and `fetch` say what is not there instead of
/// throwing. Errors of calls are `PionError`; `CancellationError` means that the task was cancelled.
public final class PionClient: Sendable {
    typealias Connection = GRPCClient<HTTP2ClientTransport.Posix>

    let options: PionOptions
    private let connections: [String: Connection]  // by the name of the node
    private let nodes: Mutex<Nodes>
    private let awaySince = Mutex<ContinuousClock.Instant?>(nil)  // nil: it was there last
    private let routes = Mutex(Routes())  // of prefixes, by name
    private let leases = Mutex(Routes())  // short-lived, and never at the cost of names
    private let sessions = Mutex(Routes())  // of attend, by session

    /// The client makes calls while `run()` runs; `withPionClient` sees to that.
    ///
    /// - Parameter address: "host:port" or "unix:/path", of one server or of a proxy that knows the nodes of a mesh.
    ///   With "host:port,host:port" it is a client of all nodes of a mesh, each as it is named everywhere: every call
    ///   goes to the node that a proxy would send it to. An address of a proxy has no place in such a list.
    /// - Throws: `PionError` if it is neither.
    public init(_ address: String, options: PionOptions = PionOptions()) throws {
        self.options = options
        let list = try Address.list(address)
        nodes = Mutex(try Nodes(list.map(\.text)))
        let config = HTTP2ClientTransport.Posix.Config.defaults { config in
            // What a fast network can have in flight, and frames of a chunk's size.
            config.http2.targetWindowSize = 16 << 20
            config.http2.maxFrameSize = Limits.chunkBytesMax
            config.http2.authority = options.authority
            // Finds a machine that went without a word, minutes before TCP gives it up; the link may be slow.
            config.connection.keepalive = .init(
                time: .seconds(5), timeout: .seconds(20), allowWithoutCalls: false)
            // A server that comes back is found at once: sooner than tries end.
            config.backoff.initial = .milliseconds(100)
            config.backoff.max = .milliseconds(200)
        }
        connections = try Dictionary(
            uniqueKeysWithValues: list.map { name, address in
                let transport = try HTTP2ClientTransport.Posix(
                    target: Self.target(address), transportSecurity: options.security, config: config)
                return (name, GRPCClient(transport: transport))
            })
    }

    /// Keeps the connections; returns after `close()`, when every call has ended.
    public func run() async throws {
        try await withThrowingTaskGroup(of: Void.self) { group in
            for connection in connections.values {
                group.addTask { try await connection.runConnections() }
            }
            try await group.waitForAll()
        }
    }

    /// Lets calls end, and takes no new ones.
    public func close() {
        for connection in connections.values { connection.beginGracefulShutdown() }
    }

    /// A literal of an IP address is no name: as one it would be sent in the TLS handshake, which refuses it.
    private static func target(_ address: Address) -> any ResolvableTarget {
        switch address {
        case .unix(let path): .unixDomainSocket(path: path, authority: "localhost")
        case .ipv4(let host, let port): .ipv4(pairs: [(host: host, port: port)])
        case .ipv6(let host, let port): .ipv6(pairs: [(host: host, port: port)])
        case .name(let host, let port): .dns(host: host, port: port)
        }
    }

    // MARK: Nodes

    /// Every node by name, whether it is up or not.
    var nodeNames: [String] { nodes.withLock { $0.names } }

    /// A route to each node; none where a proxy knows them, or there is one server.
    var everywhere: [String] { nodes.withLock { $0.everywhere } }

    /// Makes a call on the connection to a node, notes how it ended, and turns what the transport throws into our
    /// errors.
    ///
    /// - Parameters:
    ///   - route: What the metadata says of it; the node is the one that it leads to.
    ///   - node: That one instead.
    func reaching<Result: Sendable>(
        _ route: String, node: String? = nil, _ call: (Connection, Metadata) async throws -> Result
    ) async throws -> Result {
        let text = Blocks.routeMetadata(route)
        let node = node ?? nodes.withLock { $0.node(of: text) }
        guard let connection = connections[node] else { preconditionFailure("\(node) is no node of this client") }
        do {
            let result = try await call(connection, metadata(route: text))
            note(node, .reached)
            noteAnswer()
            return result
        } catch let error as RPCError {
            let meaning = pionError(error)
            note(node, outcome(error.code, meaning))
            if Task.isCancelled { throw CancellationError() }
            if !meaning.fromTransport {
                noteAnswer()
            } else if meaning.reason == .unavailable {
                awaySince.withLock { $0 = $0 ?? .now }
            }
            throw meaning
        } catch let error as RuntimeError {
            throw PionError(.unavailable, "this client makes no calls: \(error.message)")
        }
    }

    private func note(_ node: String, _ outcome: Nodes.Outcome) {
        nodes.withLock { $0.note(node, outcome) }
    }

    /// For how long no call has reached a server that was called; zero if the last one did.
    var away: Duration { awaySince.withLock { $0.map { ContinuousClock.now - $0 } ?? .zero } }

    func noteAnswer() { awaySince.withLock { $0 = nil } }

    // MARK: Routes

    // Prefixes are where their token ids lead, so that a match finds them: of a name, this is remembered. What else
    // has a name may have the same one as a prefix, and is nevertheless not where that is.

    /// Of calls about a prefix.
    func route(of namespace: String) -> String { routes.withLock { $0.of(namespace) } }

    /// Returns the routes to try for a name, one after the other: all nodes, if it is not known where it is.
    func routes(to namespace: String) -> [String] {
        if let known = routes.withLock({ $0.find(namespace) }) { return [known] }
        return [Routes.byName(namespace)] + everywhere
    }

    func route(of leaseID: [UInt8]) -> String { leases.withLock { $0.of(hex(leaseID)) } }

    /// Of calls about recurrent states: always where the session's name leads.
    func route(ofState session: String) -> String { Routes.byName(session) }

    /// Of calls about a session of attend: where the prefix is that it was made resident from, else where its name
    /// leads.
    func route(ofAttend session: String) -> String { sessions.withLock { $0.of(session) } }

    /// Has later calls about a session of attend go where the prefix is.
    func rememberWarmed(_ session: String, from namespace: String) {
        let route = route(of: namespace)
        sessions.withLock { $0.remember(session, route) }
    }

    /// Has later calls about a name or a lease go where this one went.
    func remember(_ namespace: String, leaseID: [UInt8] = [], route: String) {
        routes.withLock { $0.remember(namespace, route) }
        if !leaseID.isEmpty { leases.withLock { $0.remember(hex(leaseID), route) } }
    }

    func routeKey(model: String, tokenIDs: [UInt32]) -> String {
        Blocks.routeKey(tenant: options.tenant, model: model, tokenIDs: tokenIDs)
    }

    /// Returns what every call carries: where a proxy shall send it, and who asks.
    private func metadata(route: String) -> Metadata {
        var metadata: Metadata = [:]
        metadata.addString(route, forKey: "pion-route")
        if let password = options.password {
            let pair = Data("\(options.tenant):\(password)".utf8).base64EncodedString()
            metadata.addString("Basic \(pair)", forKey: "authorization")
        }
        return metadata
    }
}
