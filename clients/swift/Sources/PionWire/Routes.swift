/// Where the calls about a name go in a mesh of nodes.

/// Which node was asked about a name, so that the same one is asked again.
///
/// Two halves: the older one is forgotten as a whole when the younger one is full, so that remembering costs the
/// same however many names there are.
public struct Routes: Sendable {
    /// At least so many of the newest names are remembered, at most twice as many.
    public static let countMax = 50_000
    /// What is longer is no name, and metadata of its size would end the connection of everybody behind the same
    /// proxy. The server is the one to refuse it.
    public static let charactersMax = 200

    // Names are bytes: two that a String calls equal may be two.
    private var young: [[UInt8]: String] = [:]
    private var old: [[UInt8]: String] = [:]

    public init() {}

    /// Remembers the newest.
    public mutating func remember(_ key: String, _ route: String) {
        let name = Array(key.utf8)
        if young[name] == nil, young.count == Self.countMax {
            old = young
            young = [:]
        }
        young[name] = route
    }

    /// Returns the route, if it is known.
    public func find(_ key: String) -> String? {
        let name = Array(key.utf8)
        return young[name] ?? old[name]
    }

    /// Returns the route; of what is not known, the name itself.
    public func of(_ key: String) -> String { find(key) ?? Self.byName(key) }

    /// Returns the route of what is known by its name alone.
    public static func byName(_ name: String) -> String {
        String(name.unicodeScalars.prefix(charactersMax))
    }
}
