import Testing

@testable import PionWire

private let names = ["a:1", "b:1", "c:1"]
private let now = ContinuousClock.now

/// Some routes that lead to a node while all are up.
private func routes(to node: String) throws -> [String] {
    let ring = try Ring(names)
    return (0..<200).map { "\($0)" }.filter { ring.node(of: $0) == node }
}

@Test func aRingOfNobodyOrOfTwinsIsRefused() {
    for names in [[], ["a:1", "b:1", "a:1"]] {
        #expect { _ = try Ring(names) } throws: { ($0 as? PionError)?.reason == .invalid }
        #expect { _ = try Nodes(names) } throws: { ($0 as? PionError)?.reason == .invalid }
    }
}

@Test func everyNodeIsFoundByARouteToEach() throws {
    var nodes = try Nodes(names)
    #expect(Set(nodes.everywhere.map { nodes.node(of: $0, now: now) }) == Set(names))
    #expect(try Nodes(["a:1"]).everywhere.isEmpty)
}

@Test func theCallsOfANodeThatIsDownGoWhereAProxySendsThem() throws {
    var nodes = try Nodes(names)
    nodes.note("a:1", .unreachable, now: now)
    let without = try Ring(names, down: ["a:1"])
    for route in (0..<200).map({ "\($0)" }) {
        #expect(nodes.node(of: route, now: now) == without.node(of: route))
    }
}

@Test func aNodeThatMayBeBackIsTriedWithOneCallOfItsOwn() throws {
    var nodes = try Nodes(names)
    nodes.note("a:1", .unreachable, now: now)
    nodes.note("a:1", .unreachable, now: now)  // a call that was on its way: no longer pause for that
    let mine = try routes(to: "a:1")
    let others = try routes(to: "b:1")
    let later = now + Nodes.downFirst
    #expect(nodes.node(of: others[0], now: later) != "a:1")
    #expect(nodes.node(of: mine[0], now: later) == "a:1")
    #expect(nodes.node(of: mine[1], now: later) != "a:1")
    nodes.note("a:1", .unreachable, now: later)
    #expect(nodes.node(of: mine[0], now: later + Nodes.downFirst) != "a:1")
    #expect(nodes.node(of: mine[0], now: later + Nodes.downFirst * 2) == "a:1")
    nodes.note("a:1", .reached, now: later)
    for route in mine { #expect(nodes.node(of: route, now: later) == "a:1") }
}

@Test func thePauseOfANodeEndsSomewhere() throws {
    var nodes = try Nodes(names)
    let mine = try routes(to: "a:1")
    var at = now
    nodes.note("a:1", .unreachable, now: at)
    for _ in 0..<10 {
        at += Nodes.downMax
        #expect(nodes.node(of: mine[0], now: at) == "a:1")
        nodes.note("a:1", .unreachable, now: at)
    }
    #expect(nodes.node(of: mine[0], now: at + Nodes.downMax) == "a:1")
}

@Test func aCallThatOnlyItsCallerEndedSaysNothingAboutANode() throws {
    var nodes = try Nodes(names)
    let mine = try routes(to: "a:1")
    nodes.note("a:1", .unknown, now: now)
    #expect(nodes.node(of: mine[0], now: now) == "a:1")
    nodes.note("a:1", .unreachable, now: now)
    nodes.note("a:1", .unknown, now: now)
    #expect(nodes.node(of: mine[0], now: now) != "a:1")
}

@Test func whenAllAreDownAllAreAsked() throws {
    var nodes = try Nodes(names)
    for name in names { nodes.note(name, .unreachable, now: now) }
    #expect(Set((0..<200).map { nodes.node(of: "\($0)", now: now) }) == Set(names))
}

@Test(arguments: [
    ("unix:/run/pion.sock", Address.unix(path: "/run/pion.sock")),
    ("unix:///run/a,b.sock", .unix(path: "/run/a,b.sock")),
    ("127.0.0.1:50051", .ipv4("127.0.0.1", port: 50_051)),
    ("[fd00::4]:50052", .ipv6("fd00::4", port: 50_052)),
    ("[fe80::1%en0]:1", .name("fe80::1%en0", port: 1)),
    ("mini-1.local:65535", .name("mini-1.local", port: 65_535)),
    ("1.2.3:80", .name("1.2.3", port: 80)),
])
func anAddressIsTakenForWhatItIs(_ text: String, _ address: Address) throws {
    let list = try Address.list(text)
    #expect(list.map(\.text) == [text] && list.map(\.address) == [address])
}

@Test func severalAddressesKeepTheirNames() throws {
    let list = try Address.list("a:1,[::1]:2")
    #expect(list.map(\.text) == ["a:1", "[::1]:2"])
    #expect(list.map(\.address) == [.name("a", port: 1), .ipv6("::1", port: 2)])
}

@Test(arguments: [
    "", "host", "host:", ":1", "host:0", "host:65536", "host:+1", "host:01", "http://host:1", "ho st:1", "unix:",
    "::1:50051", "[host]:1", "[::1/]:1", "a:1,", "a:1,b",
])
func whatIsNoAddressIsRefused(_ text: String) {
    #expect { _ = try Address.list(text) } throws: { ($0 as? PionError)?.reason == .invalid }
}
