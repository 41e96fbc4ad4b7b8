import Testing

@testable import PionWire

/// Two tensors of ten rows of 8 bytes, and a part of 5 bytes.
private func announcement() throws -> Announced {
    let tensors = try Side.allCases.map {
        try TensorLayout(slot: 0, side: $0, heads: 2, headDim: 2, dtype: .f16)
    }
    return Announced(
        namespace: "n", model: "m", fidelity: "raw", generation: 7, layout: try Layout(tensors), begin: 0, end: 10,
        totalBytes: 165, tokenIDs: Array(0..<10),
        parts: [PartInfo(kind: "state", slot: 0, boundaryTokens: 10, sizeBytes: 5)])
}

private let stored: [[UInt8]] = [Array(0..<80), Array(100..<180), Array("state".utf8)]

private func rows(_ tensor: Int, _ first: Int, _ count: Int) throws -> StreamMessage {
    let data = Array(stored[tensor][8 * first..<8 * (first + count)])
    return try Framing.parse(
        Framing.rows(tensorIndex: UInt64(tensor), firstRow: UInt64(first), rowCount: UInt64(count), data: data))
}

private func part(_ offset: Int, _ count: Int) throws -> StreamMessage {
    let data = Array(stored[2][offset..<offset + count])
    return try Framing.parse(Framing.part(partIndex: 0, offsetBytes: UInt64(offset), data: data))
}

private func refused(_ reason: Reason, _ body: () throws -> Void) {
    #expect { try body() } throws: { ($0 as? PionError)?.reason == reason }
}

@Test func aFetchGoesOnWhereItBroke() throws {
    var taken = Reception(bytesMax: 1_000)
    #expect(taken.beginStream() == nil)
    try taken.take(header: announcement())
    _ = try taken.take(rows(0, 0, 10))
    _ = try taken.take(rows(1, 0, 3))
    #expect(!taken.ended)
    #expect(taken.beginStream() == Resume(generation: 7, begin: 0, end: 10, tensorIndex: 1, row: 3))
    try taken.take(header: announcement())
    _ = try taken.take(rows(1, 3, 7))
    _ = try taken.take(part(0, 2))
    #expect(taken.beginStream() == Resume(generation: 7, begin: 0, end: 10, part: 1, partOffsetBytes: 2))
    try taken.take(header: announcement())
    let last = try taken.take(part(2, 3))
    #expect(last == Arrived(tensorIndex: nil, partIndex: 0, offsetBytes: 2, data: Array("ate".utf8)[...]))
    #expect(taken.ended && taken.doneBytes == 165)
    let (tensors, parts) = taken.result()
    #expect(tensors.map(\.data) == Array(stored[..<2]))
    #expect(parts.map(\.data) == [stored[2]])
    refused(.badAnswer) { _ = try taken.take(rows(0, 0, 10)) }
}

@Test func aStreamThatContradictsItselfIsRefused() throws {
    let changes: [(inout Announced) throws -> Void] = [
        { $0.totalBytes += 1 },
        { $0.begin = 11 },
        { $0.end = 1 << 40; $0.tokenIDs = [] },
        { $0.tokenIDs.removeLast() },
        { $0.parts[0].sizeBytes = 1 << 60 },
        { $0.parts[0].sizeBytes = 2_000; $0.totalBytes = 2_160 },
    ]
    for change in changes {
        var header = try announcement()
        try change(&header)
        var taken = Reception(bytesMax: 1_000)
        refused(.badAnswer) { try taken.take(header: header) }
    }
    var lossy = try announcement()
    lossy.layout = try Layout([TensorLayout(slot: 0, side: .k, heads: 2, headDim: 2, dtype: .f16, codec: "int8")])
    var taken = Reception(bytesMax: 1_000)
    refused(.unsupported) { try taken.take(header: lossy) }

    let wrong: [StreamMessage] = try [
        rows(1, 0, 10), part(0, 5), rows(0, 1, 9), .header([]),
        .rows(RowChunk(tensorIndex: 0, arrayIndex: 0, firstRow: 0, rowCount: 1, crc32c: 0, data: [])),
        .rows(RowChunk(tensorIndex: 0, arrayIndex: 1, firstRow: 0, rowCount: 1, crc32c: 0, data: stored[0][..<8])),
        .rows(RowChunk(tensorIndex: 0, arrayIndex: 0, firstRow: 0, rowCount: 2, crc32c: 0, data: stored[0][..<8])),
        .rows(RowChunk(tensorIndex: 0, arrayIndex: 0, firstRow: 0, rowCount: 0, crc32c: 0, data: stored[0][..<4])),
        .rows(
            RowChunk(tensorIndex: 0, arrayIndex: 0, firstRow: 0, rowCount: 11, crc32c: 0, data: (stored[0] + stored[1])[..<88])),
    ]
    for message in wrong {
        var taken = Reception(bytesMax: 1_000)
        refused(.badAnswer) { _ = try taken.take(message) }
        try taken.take(header: announcement())
        refused(.badAnswer) { _ = try taken.take(message) }
    }
}

@Test func aDamagedChunkIsNotTakenAndMayComeAgain() throws {
    var taken = Reception(bytesMax: 1_000)
    try taken.take(header: announcement())
    guard case .rows(var chunk) = try rows(0, 0, 10) else { return }
    chunk.data[chunk.data.startIndex + 3] ^= 4
    refused(.checksum) { _ = try taken.take(.rows(chunk)) }
    #expect(taken.doneBytes == 0)
    _ = try taken.take(rows(0, 0, 10))
}

@Test func prefixesAreNeverMixed() throws {
    var kept = Reception(bytesMax: 1_000)
    try kept.take(header: announcement())
    _ = try kept.take(rows(0, 0, 5))
    var other = try announcement()
    other.generation = 8
    _ = kept.beginStream()
    refused(.badAnswer) { try kept.take(header: other) }
    kept.restart()
    #expect(kept.beginStream() == nil)
    try kept.take(header: other)

    var passedOn = Reception(bytesMax: 1_000, keeps: false)
    try passedOn.take(header: announcement())
    #expect(passedOn.restarts)
    _ = try passedOn.take(rows(0, 0, 5))
    #expect(!passedOn.restarts)
    _ = passedOn.beginStream()
    refused(.generation) { try passedOn.take(header: nil) }
}

@Test func aMissIsAnAnswer() throws {
    var taken = Reception(bytesMax: 1_000)
    try taken.take(header: nil)
    #expect(taken.ended && taken.announced == nil)
    #expect(taken.result().tensors.isEmpty)
}

@Test func nothingOfAStoreIsLostOnItsWay() async throws {
    let layout = try Side.allCases.map { try TensorLayout(slot: 3, side: $0, heads: 4, headDim: 129, dtype: .bf16) }
    let tensors = layout.map { layout in
        Tensor(layout: layout, data: (0..<1_100 * layout.rowBytes).map { UInt8(truncatingIfNeeded: $0 &* 31) })
    }
    let part = Part(kind: "ring", slot: 3, boundaryTokens: 1_164, data: Array(repeating: 9, count: 1_200_000))
    let outgoing = Outgoing(header: [1, 2, 3], tensors: tensors, parts: [part], firstRow: 64)
    let announced = Announced(
        namespace: "n", model: "m", fidelity: "raw", generation: 1, layout: try Layout(layout), begin: 64, end: 1_164,
        totalBytes: UInt64(outgoing.totalBytes), tokenIDs: [], parts: [part.info])
    var taken = Reception(bytesMax: 1 << 30)
    var sent = 0
    try await outgoing.forEach { message, dataBytes in
        #expect(message.count <= Limits.chunkBytesMax + 64)
        sent += dataBytes
        let parsed = try Framing.parse(message)
        if case .header(let header) = parsed {
            #expect(header == [1, 2, 3])
            try taken.take(header: announced)
        } else {
            _ = try taken.take(parsed)
        }
    }
    #expect(sent == outgoing.totalBytes && taken.ended)
    #expect(taken.result().tensors == tensors)
    #expect(taken.result().parts == [part])
}

@Test func onlyWhatIsSafeIsAskedAgain() {
    #expect(PionError(.unavailable, "", fromTransport: true).pauseBeforeAskingAgain == .zero)
    #expect(PionError(.draining, "", retryAfter: .seconds(2)).pauseBeforeAskingAgain == .seconds(2))
    #expect(PionError(.tooManyStreams, "").pauseBeforeAskingAgain == .zero)
    for reason: Reason in [.budget, .internal, .conflict, .notAllowed, .generation, .deadlineExceeded] {
        #expect(PionError(reason, "").pauseBeforeAskingAgain == nil)
    }
    #expect(PionError(.notAllowed, "", fromTransport: true).pauseBeforeAskingAgain == nil)
}

@Test func numbersThatDoNotTravelAreRefused() throws {
    try PionError.check32("layer", 0, Int(UInt32.max))
    refused(.invalid) { try PionError.check32("layer", 0, -1) }
    refused(.invalid) { try PionError.check32("slots", [Int(UInt32.max) + 1]) }
}

@Test func namesThatLookAlikeAreTwo() {
    var routes = Routes()
    routes.remember("caf\u{e9}", "one")
    #expect(routes.find("cafe\u{301}") == nil)
    routes.remember("cafe\u{301}", "two")
    #expect(routes.of("caf\u{e9}") == "one")
}

@Test func theNewestRoutesAreRemembered() {
    var routes = Routes()
    for i in 0..<2 * Routes.countMax + 1 { routes.remember("\(i)", "x") }
    #expect(routes.of("0") == "0")
    for i in Routes.countMax + 1...2 * Routes.countMax { #expect(routes.of("\(i)") == "x") }
    routes.remember("1", "y")
    #expect(routes.of("1") == "y")
    #expect(routes.find("1") == "y" && routes.find("0") == nil)
}

@Test func noNameMakesMetadataThatEndsAConnection() {
    let routes = Routes()
    let long = String(repeating: "ß", count: Routes.charactersMax)
    #expect(routes.of(long) == long)
    #expect(routes.of(long + String(repeating: "x", count: 100_000)) == long)
    #expect(Routes.byName("short") == "short")
}

@Test func no16BitPatternIsLost() throws {
    let bits = (0...UInt16.max).map { $0 }
    let data = bits.flatMap { [UInt8(truncatingIfNeeded: $0), UInt8(truncatingIfNeeded: $0 >> 8)] }
    for dtype in [DType.f16, .bf16] {
        let layout = try TensorLayout(slot: 0, side: .k, heads: 1, headDim: 1, dtype: dtype)
        let tensor = Tensor(layout: layout, data: data)
        #expect(tensor.patterns(UInt16.self) == bits)
        let values = tensor.floats()
        #expect(values[0].bitPattern == 0 && values[0x8000].bitPattern == 0x8000_0000)
        #expect(values[dtype == .f16 ? 0x3c00 : 0x3f80] == 1)
        #expect(values[dtype == .f16 ? 0xfc00 : 0xff80] == -.infinity)
        #expect(values[0x7fff].isNaN)
        #expect(Set(values.filter { !$0.isNaN }.map(\.bitPattern)).count == values.filter { !$0.isNaN }.count)
    }
    #expect(float(half: 1) == 5.9604645e-8 && float(half: 0x3ff) == 6.097555e-5 && float(half: 0x7bff) == 65_504)
}
