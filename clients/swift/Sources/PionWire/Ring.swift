/// Which node of a mesh a route belongs to, computed as the mesh's proxies and the other clients do.
///
/// Each node has its points on a circle: XXH64 of `<node>_<index>`. A route belongs to the node whose point is the
/// first at or after XXH64 of the route, around the end if there is none. There are `pointsPerNode` points for each
/// node that there is, up or down, and those that are up share all of them: that is what a proxy does whose smallest
/// ring is set to that total.
public struct Ring: Sendable {
    /// Shares differ by about a sixteenth.
    public static let pointsPerNode = 256

    private let points: [(hash: UInt64, node: String)]

    /// - Parameters:
    ///   - nodes: The names of all, which are their addresses where nothing else was agreed.
    ///   - down: Those that have no place on it now; if that is all of them, they all have.
    /// - Throws: `PionError` if there are none, or two of the same name.
    public init(_ nodes: [String], down: Set<String> = []) throws {
        guard !nodes.isEmpty, Set(nodes).count == nodes.count else {
            throw PionError(.invalid, "a ring needs nodes, each once", metadata: ["field": "nodes"])
        }
        let some = nodes.filter { !down.contains($0) }
        let up = some.isEmpty ? nodes : some
        let each = (Self.pointsPerNode * nodes.count + up.count - 1) / up.count
        points = up.flatMap { node in (0..<each).map { (XXH64.hash("\(node)_\($0)"), node) } }
            .sorted { $0.0 < $1.0 }
    }

    /// Returns the node of a route, as it stands in the metadata `pion-route`.
    public func node(of route: String) -> String {
        let hash = XXH64.hash(route)
        var range = points.indices
        while let middle = range.isEmpty ? nil : range.lowerBound + range.count / 2 {
            range = points[middle].hash < hash ? middle + 1..<range.upperBound : range.lowerBound..<middle
        }
        return points[range.lowerBound % points.count].node
    }

    /// Returns a route to each node that is up: some text that belongs to it.
    public func routes() -> [String] {
        var left = Set(points.map(\.node))
        var routes: [String] = []
        var number = 0
        while !left.isEmpty {
            if left.remove(node(of: "\(number)")) != nil { routes.append("\(number)") }
            number += 1
        }
        return routes
    }
}
