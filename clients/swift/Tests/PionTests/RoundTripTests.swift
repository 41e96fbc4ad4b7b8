import Foundation
import Pion
import Testing

/// Against a real server: `pion-grpc serve --listen 127.0.0.1:0`, its address in PION_TEST_ADDRESS.
private let address = ProcessInfo.processInfo.environment["PION_TEST_ADDRESS"]

@Suite(.enabled(if: address != nil, "PION_TEST_ADDRESS names no server"))
struct RoundTripTests {
    private let name = "swift-\(UInt64.random(in: 0 ..< .max))"
    private let model = "mlx1:00000000000000000000000000000000"

    private func sample(_ dtype: DType, tokens: Int) throws -> [Tensor] {
        try (0..<2).flatMap { slot in
            try Side.allCases.map { side in
                let layout = try TensorLayout(slot: slot, side: side, heads: 4, headDim: 64, dtype: dtype)
                let data = (0..<tokens * layout.rowBytes).map { UInt8(truncatingIfNeeded: $0 &* (slot + 3) ^ $0 >> 8) }
                return Tensor(layout: layout, data: data)
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
            #expect(some.tensors[0].data == Array(tensors[2].data[100 * 512 * dtype.itemBytes / 2..<200 * 512 * dtype.itemBytes / 2]))
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
}
