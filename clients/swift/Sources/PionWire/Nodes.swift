/// Several servers as one: which of them a call goes to, and which are left alone for a moment.
///
/// Knows names and how calls ended; no connection. Whether a call is made again is its caller's business.
public struct Nodes: Sendable {
    /// How long a node is left alone after a call that did not reach it; doubled as long as none does.
    static let (downFirst, downMax) = (Duration.seconds(1), Duration.seconds(16))
    /// Rings that are kept, one for each set of nodes that are left out.
    private static let ringsMax = 32

    /// How a call to a node ended.
    public enum Outcome: Sendable {
        /// The node has answered, whatever it said.
        case reached
        /// It cannot be reached, or says that it is going.
        case unreachable
        /// Our own side has ended the call: whether there is a node at the other end remains open.
        case unknown
    }

    private struct Down {
        /// When it is tried.
        var again: ContinuousClock.Instant
        var pause: Duration
        /// Whether a call is on its way to it, to see.
        var tried = false
    }

    public let names: [String]
    /// A route to each; none if there is only one.
    public let everywhere: [String]
    private var down: [String: Down] = [:]
    private var rings: [Set<String>: Ring]

    /// - Throws: `PionError` if there are none, or two of the same name.
    public init(_ names: [String]) throws {
        let ring = try Ring(names)
        self.names = names
        everywhere = names.count > 1 ? ring.routes() : []
        rings = [[]: ring]
    }

    /// Returns the node of a route, as it stands in the metadata, of those that are up; now and then one that may be
    /// up again.
    ///
    /// It is one of its own calls that a node is tried with: all others keep to the ring without it until it has
    /// answered, or they would go back and forth between two rings.
    public mutating func node(of route: String, now: ContinuousClock.Instant = .now) -> String {
        let waiting = Set(down.filter { now < $0.value.again }.keys)
        if waiting.count < down.count {
            let node = ring(without: waiting).node(of: route)
            if down[node] != nil, !waiting.contains(node) {
                down[node]?.again = now + Self.downMax
                down[node]?.tried = true
                return node
            }
        }
        return ring(without: Set(down.keys)).node(of: route)
    }

    /// Notes how a call to a node ended.
    public mutating func note(_ node: String, _ outcome: Outcome, now: ContinuousClock.Instant = .now) {
        switch outcome {
        case .unknown:
            break
        case .reached:
            down[node] = nil
        case .unreachable:
            guard let known = down[node] else {
                down[node] = Down(again: now + Self.downFirst, pause: Self.downFirst)
                return
            }
            guard known.tried else { return }  // a call that was on its way when the first one failed
            let pause = min(known.pause * 2, Self.downMax)
            down[node] = Down(again: now + pause, pause: pause)
        }
    }

    private mutating func ring(without down: Set<String>) -> Ring {
        if let ring = rings[down] { return ring }
        if rings.count >= Self.ringsMax { rings = [:] }
        guard let ring = try? Ring(names, down: down) else { preconditionFailure("the names were checked before") }
        rings[down] = ring
        return ring
    }
}
