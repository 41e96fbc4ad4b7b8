import Foundation
import Pion
import Synchronization
import Testing

/// Against a real server: `pion-grpc serve --listen 127.0.0.1:0`, its address in PION_TEST_ADDRESS; or several, with
/// commas between them.
private let address = ProcessInfo.processInfo.environment["PION_TEST_ADDRESS"]

@Suite(.serialized, .enabled(if: address != nil, "PION_TEST_ADDRESS names no server"))
struct RoundTripTests {
    private let name = "swift-\(UInt64.random(in: 0 ..< .max))"
    private let model = "mlx1:00000000000000000000000000000000"

    private func sample(_ dtype: DType, tokens: Int) throws -> [Tensor] {
        try (0..<2).flatMap { slot in
            try Side.allCases.map { side in
                let layout = try TensorLayout(slot: slot, side: side, heads: 4, headDim: 64, dtype: dtype)
                // Of a prime length, so that no two rows are the same for long.
                let block = (0..<4_099).map { UInt8(truncatingIfNeeded: $0 &* (slot + 3) ^ $0 >> 8) }
                var data: [UInt8] = []
                while data.count < tokens * layout.rowBytes { data += block }
                return Tensor(layout: layout, data: Array(data.prefix(tokens * layout.rowBytes)))
            }
        }
    }

    @Test(arguments: DType.allCases)
    func noBitIsLost(_ dtype: DType) async throws {
        let (name, model, tensors) = (name, model, try sample(dtype, tokens: 3_000))
        let part = Part(kind: "state", slot: 1, boundaryTokens: 3_000, data: Array(repeating: 7, count: 1_500_000))
        let ids = (0..<3_000).map { UInt32($0) }
        try await withPionClient(try #require(address)) { client in
            let stored = try await client.store(name, model: model, tokenIDs: ids, tensors: tensors, parts: [part])
            #expect(stored.tokenCount == 3_000 && !stored.alreadyStored)
            let match = try await client.match(model: model, tokenIDs: Array(ids.prefix(2_000)) + [1])
            #expect(match.hit)
            let prefix = try #require(try await client.fetch(.namespace(name), partKinds: ["state"]))
            #expect(prefix.tensors == tensors && prefix.parts == [part] && prefix.tokenIDs == ids)
            let some = try #require(try await client.fetch(.namespace(name), rows: 100..<200, slots: [1]))
            #expect(some.tensors.count == 2)
            let rowBytes = tensors[2].layout.rowBytes
            #expect(some.tensors[0].data == Array(tensors[2].data[100 * rowBytes..<200 * rowBytes]))
            #expect(try await client.drop([name, "nobody's"]) == [true, false])
            #expect(try await client.fetch(.namespace(name)) == nil)
        }
    }

    @Test func errorsKeepTheirReason() async throws {
        let (name, model, tensors) = (name, model, try sample(.f16, tokens: 100))
        try await withPionClient(try #require(address)) { client in
            let ids = (0..<100).map { UInt32($0) }
            _ = try await client.store(name, model: model, tokenIDs: ids, tensors: tensors)
            await #expect {
                _ = try await client.store(name, model: model, tokenIDs: ids.reversed(), tensors: tensors)
            } throws: { ($0 as? PionError)?.reason == .otherContent }
            await #expect {
                _ = try await client.fetch(.namespace(name), rows: 10..<101)
            } throws: { ($0 as? PionError)?.reason == .rows }
            await #expect {
                _ = try await client.fetch(.namespace(name), rows: 0..<0)
            } throws: { ($0 as? PionError)?.reason == .invalid }
            _ = try await client.drop([name])
        }
    }

    @Test func statesComeBack() async throws {
        let name = name
        try await withPionClient(try #require(address)) { client in
            let state = SSMState(data: (0..<3_000_000).map { UInt8(truncatingIfNeeded: $0) }, boundaryTokens: 9)
            _ = try await client.storeState(session: name, layer: 2, state)
            #expect(try await client.fetchState(session: name, layer: 2) == state)
            #expect(try await client.dropState(session: name) == 1)
            #expect(try await client.fetchState(session: name, layer: 2) == nil)
        }
    }

    @Test func queriesOfAStreamGetTheirOwnAnswers() async throws {
        let name = name
        try await withPionClient(try #require(address)) { client in
            // One row each, so that attention returns V whatever is asked.
            for layer in 0..<4 {
                let v = [Float](repeating: Float(layer), count: 8)
                _ = try await client.attendStore(
                    session: name, layer: layer, heads: 1, rows: 1, headDim: 8, k: v, v: v)
            }
            try await client.withAttendStream(session: name) { stream in
                try await withThrowingTaskGroup(of: Void.self) { group in
                    for layer in 0..<4 {
                        group.addTask {
                            let query = AttendQuery(
                                session: name, layer: layer, heads: 1, headDim: 8, kind: .dense(queries: 1),
                                q: [Float](repeating: 1, count: 8))
                            let answer = try await stream.query(query)
                            #expect(answer.out == [Float](repeating: Float(layer), count: 8))
                        }
                    }
                    try await group.waitForAll()
                }
            }
            #expect(try await client.attendDrop(session: name) == 4)
        }
    }

    @Test func aNameIsFoundByAClientThatHasOnlyHeardOfIt() async throws {
        let (name, model, tensors) = (name, model, try sample(.f16, tokens: 200))
        let ids = (0..<200).map { UInt32($0) }
        try await withPionClient(try #require(address)) { client in
            _ = try await client.store(name, model: model, tokenIDs: ids, tensors: tensors)
            try await client.sync()
        }
        try await withPionClient(try #require(address)) { client in
            let lookup = try await client.lookup(name, model: model)
            #expect(lookup.hit && lookup.prefix?.tokenCount == 200)
            #expect(try await client.fetch(.namespace(name))?.tensors == tensors)
            var names: [String] = []
            for try await info in client.list("swift-") { names.append(info.namespace) }
            #expect(names.filter { $0 == name }.count == 1 && names == names.sorted())
            #expect(try await client.describe().prefixCount >= 1)
            #expect(try await client.stats().bytesStreamed > 0)
        }
        try await withPionClient(try #require(address)) { client in
            let dropped = try await client.drop([name])
            let lookup = try await client.lookup(name)
            #expect(dropped == [true] && !lookup.hit)
        }
    }

    @Test func partsShortenAMatchAndSaySo() async throws {
        let (name, model, tensors) = (name, model, try sample(.bf16, tokens: 200))
        let ids = (0..<200).map { UInt32($0) + 7 }
        let parts = [64, 200].map { Part(kind: "state", slot: 0, boundaryTokens: $0, data: [UInt8($0)]) }
        try await withPionClient(try #require(address)) { client in
            _ = try await client.store(name, model: model, tokenIDs: ids, tensors: tensors, parts: parts)
            let match = try await client.match(
                model: model, tokenIDs: Array(ids.prefix(150)), partKinds: ["state"])
            #expect(match.hit && match.matchedTokens == 150 && match.servedTokens == 64)
            #expect(match.shortenedBy == "state" && match.reason != .none)
            #expect(match.longestNamespace == name && match.longestTokens == 150)
            let rows = 0..<match.servedTokens
            let prefix = try await client.fetch(.lease(match.leaseID), rows: rows, partKinds: ["state"])
            #expect(prefix?.parts == [parts[0]] && prefix?.tokenIDs == Array(ids.prefix(64)))
            #expect(try await client.fetch(.lease(match.leaseID), rows: 0..<150, partKinds: ["state"]) == nil)
            _ = try await client.drop([name])
        }
    }

    @Test func aChildTakesTheRowsOfItsParent() async throws {
        let (name, model, tensors) = (name, model, try sample(.f16, tokens: 100))
        let ids = (0..<100).map { UInt32($0) + 13 }
        let rest = tensors.map { tensor in
            Tensor(layout: tensor.layout, data: Array(tensor.data.dropFirst(64 * tensor.layout.rowBytes)))
        }
        let first = tensors.map { tensor in
            Tensor(layout: tensor.layout, data: Array(tensor.data.prefix(64 * tensor.layout.rowBytes)))
        }
        try await withPionClient(try #require(address)) { client in
            _ = try await client.store(name, model: model, tokenIDs: Array(ids.prefix(64)), tensors: first)
            let child = try await client.store(
                name + "-child", model: model, tokenIDs: ids, tensors: rest, parent: name, base: 64)
            #expect(child.base == 64 && child.tokenCount == 100)
            #expect(try await client.fetch(.namespace(name + "-child"))?.tensors == tensors)
            _ = try await client.drop([name + "-child", name])
        }
    }

    private struct OwnError: Error {}

    @Test func whatTheCallerThrowsIsThrownAsItIs() async throws {
        let (name, model, tensors) = (name, model, try sample(.f32, tokens: 3_000))
        let ids = (0..<3_000).map { UInt32($0) + 11 }
        try await withPionClient(try #require(address)) { client in
            _ = try await client.store(name, model: model, tokenIDs: ids, tensors: tensors)
            let arrived = Mutex([UInt8]())
            let announced = try await client.fetch(.namespace(name)) { _, chunk in
                arrived.withLock { $0.append(contentsOf: chunk.data) }
            }
            #expect(arrived.withLock { $0 } == tensors.flatMap(\.data) && announced?.tokenIDs == ids)
            await #expect(throws: OwnError.self) {
                _ = try await client.fetch(.namespace(name)) { _, _ in throw OwnError() }
            }
            _ = try await client.drop([name])
        }
    }

    @Test func aSessionIsWhereThePrefixIsThatItCameFrom() async throws {
        let (name, model) = (name, model)
        let layout = try Side.allCases.map { try TensorLayout(slot: 0, side: $0, heads: 1, headDim: 2, dtype: .f32) }
        let row = Blocks.pack([Float(3), 4].map(\.bitPattern))
        try await withPionClient(try #require(address)) { client in
            _ = try await client.store(
                name, model: model, tokenIDs: [1], tensors: layout.map { Tensor(layout: $0, data: row) })
            let warmed = try await client.attendWarm(session: name, namespace: name)
            #expect(warmed.layers == 1)
            #expect(try await client.attendLookup(session: name, layers: [0, 1]).map(\.state) == [.resident, .missing])
            var query = AttendQuery(
                session: name, layer: 0, heads: 1, headDim: 2, kind: .dense(queries: 1), q: [1, 0])
            query.logSumExp = true
            query.scale = 1
            let answer = try await client.attendQuery(query)
            #expect(answer.out == [3, 4] && answer.logSumExp == [3])
            #expect(try await client.attendDrop(session: name) == 1)
            _ = try await client.drop([name])
        }
    }

    @Test func aCancelledTaskSaysSo() async throws {
        try await withPionClient(try #require(address)) { client in
            let task = Task {
                withUnsafeCurrentTask { $0?.cancel() }
                _ = try await client.describe()
            }
            await #expect(throws: CancellationError.self) { try await task.value }
        }
    }
}

@Test func aClientThatIsClosedSaysSo() async throws {
    let client = try PionClient("127.0.0.1:1")
    client.close()
    await #expect {
        _ = try await client.describe()
    } throws: { ($0 as? PionError)?.reason == .unavailable }
}

@Test func whatIsNoAddressOrIsNamedTwiceIsRefused() {
    for address in ["127.0.0.1", "a:1,a:1", "unix:"] {
        #expect { _ = try PionClient(address) } throws: { ($0 as? PionError)?.reason == .invalid }
    }
}
