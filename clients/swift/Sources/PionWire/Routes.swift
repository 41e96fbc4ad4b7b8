/// Which node of a mesh was asked about a name or a lease, so that the same one is asked again.
public struct Routes: Sendable {
    /// Names that are remembered.
    public static let countMax = 1_000

    private var known: [String: String] = [:]
    private var order: [String] = []

    public init() {}

    /// Remembers the newest thousand.
    public mutating func remember(_ key: String, _ route: String) {
        if known.updateValue(route, forKey: key) == nil {
            if known.count > Self.countMax { known[order.removeFirst()] = nil }
            order.append(key)
        } else if order.last != key, let at = order.firstIndex(of: key) {
            order.append(order.remove(at: at))
        }
    }

    /// Returns the route; of what is not known, the name itself.
    public func of(_ key: String) -> String { known[key] ?? key }
}
