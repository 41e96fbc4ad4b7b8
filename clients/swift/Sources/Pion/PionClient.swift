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

/// Talks to one server, or to a mesh behind one address. Safe for concurrent use.
///
/// A miss is an answer, an error is an error: `match`, `lookup` and `fetch` say what is not there instead of
/// throwing. Errors of calls are `PionError`; `CancellationError` means that the task was cancelled.
public final class PionClient: Sendable {
    let options: PionOptions
    let grpc: GRPCClient<HTTP2ClientTransport.Posix>
    private let answered = Mutex(false)
    private let routes = Mutex(Routes())  // of prefixes, by name
    private let leases = Mutex(Routes())  // short-lived, and never at the cost of names
    private let sessions = Mutex(Routes())  // of attend, by session

    /// The client makes calls while `run()` runs; `withPionClient` sees to that.
    ///
    /// - Parameter address: "host:port" or "unix:/path".
    /// - Throws: `PionError` if it is neither.
    public init(_ address: String, options: PionOptions = PionOptions()) throws {
        self.options = options
        let config = HTTP2ClientTransport.Posix.Config.defaults { config in
            // What a fast network can have in flight, and frames of a chunk's size.
            config.http2.targetWindowSize = 16 << 20
            config.http2.maxFrameSize = Limits.chunkBytesMax
            // A server that comes back is found at once: sooner than tries end.
            config.backoff.initial = .milliseconds(100)
            config.backoff.max = .milliseconds(200)
        }
        let transport = try HTTP2ClientTransport.Posix(
            target: Self.target(address), transportSecurity: options.security, config: config)
        grpc = GRPCClient(transport: transport)
    }

    /// Keeps the connection; returns after `close()`, when every call has ended.
    public func run() async throws {
        try await grpc.runConnections()
    }

    /// Lets calls end, and takes no new ones.
    public func close() {
        grpc.beginGracefulShutdown()
    }

    private static func target(_ address: String) throws -> any ResolvableTarget {
        if address.hasPrefix("unix:") {
            var path = String(address.dropFirst("unix:".count))
            if path.hasPrefix("//") { path.removeFirst(2) }
            guard !path.isEmpty else { throw PionError(.invalid, "unix: needs a path") }
            return .unixDomainSocket(path: path, authority: "localhost")
        }
        guard let colon = address.lastIndex(of: ":"), let port = UInt16(address[address.index(after: colon)...]),
            port > 0, colon > address.startIndex, !address.contains("/")
        else { throw PionError(.invalid, "\(address) is neither host:port nor unix:/path") }
        let host = address[..<colon].trimmingCharacters(in: CharacterSet(charactersIn: "[]"))
        return .dns(host: host, port: Int(port))
    }

    /// Whether any call was answered, ever.
    var hasAnswered: Bool { answered.withLock { $0 } }

    func noteAnswer() { answered.withLock { $0 = true } }

    // MARK: Routes

    // Prefixes are where their token ids lead, so that a match finds them: of a name, this is remembered. What else
    // has a name may have the same one as a prefix, and is nevertheless not where that is.

    /// Of calls about a prefix.
    func route(of namespace: String) -> String { routes.withLock { $0.of(namespace) } }

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
    func metadata(route: String) -> Metadata {
        var metadata: Metadata = [:]
        metadata.addString(Blocks.routeMetadata(route), forKey: "pion-route")
        if let password = options.password {
            let pair = Data("\(options.tenant):\(password)".utf8).base64EncodedString()
            metadata.addString("Basic \(pair)", forKey: "authorization")
        }
        return metadata
    }
}
