/// Taking a Fetch stream in: what was announced is checked, then chunk after chunk is put in its place.
///
/// Knows neither calls nor protobuf; the header comes decoded. The stream has one order, so where it stands is
/// one number, and the same number says what to ask for after a break. A chunk is taken only if it is exactly
/// the next one: place and size first, then its checksum, then the copy.

/// What will come: the same after every break.
public struct Announced: Sendable, Hashable {
    public var namespace: String
    public var model: String
    public var fidelity: String
    public var generation: UInt64
    /// The tensors as they are streamed.
    public var layout: Layout
    public var begin: UInt64
    public var end: UInt64
    /// Bytes of all rows and parts.
    public var totalBytes: UInt64
    /// Those from row 0 to `end`; none unless all are known.
    public var tokenIDs: [UInt32]
    public var parts: [PartInfo]

    public init(
        namespace: String, model: String, fidelity: String, generation: UInt64, layout: Layout, begin: UInt64,
        end: UInt64, totalBytes: UInt64, tokenIDs: [UInt32], parts: [PartInfo]
    ) {
        self.namespace = namespace
        self.model = model
        self.fidelity = fidelity
        self.generation = generation
        self.layout = layout
        self.begin = begin
        self.end = end
        self.totalBytes = totalBytes
        self.tokenIDs = tokenIDs
        self.parts = parts
    }

    /// Refuses what contradicts itself, or is more than the caller wants; allocates nothing.
    func check(bytesMax: UInt64) throws {
        guard begin <= end, end <= UInt64(Limits.tokensMax) else {
            throw PionError.badAnswer("rows \(begin) to \(end) were announced")
        }
        guard tokenIDs.isEmpty || UInt64(tokenIDs.count) == end else {
            throw PionError.badAnswer("\(tokenIDs.count) token ids were announced for \(end) rows")
        }
        guard parts.count <= Limits.partsMax, parts.allSatisfy({ $0.sizeBytes <= Limits.partBytesMax }) else {
            throw PionError.badAnswer("parts beyond all measure were announced")
        }
        if let lossy = layout.tensors.first(where: { $0.codec != "raw" }) {
            throw PionError(.unsupported, "\(lossy.name) comes as \(lossy.codec), which is not decoded here")
        }
        let rowBytes = (end - begin) * UInt64(layout.rowBytes)
        let total = parts.reduce(rowBytes) { $0 + $1.sizeBytes }
        guard total == totalBytes else {
            throw PionError.badAnswer("\(totalBytes) bytes were announced, the layout makes \(total)")
        }
        guard total <= bytesMax else {
            throw PionError.badAnswer("\(total) bytes were announced; fetchBytesMax is \(bytesMax)")
        }
    }
}

/// Where to go on after a break; the fields of a Fetch request.
public struct Resume: Sendable, Hashable {
    public var generation: UInt64
    /// The rows announced: a live prefix may have got more meanwhile, under the same generation.
    public var begin: UInt64
    public var end: UInt64
    public var tensorIndex: UInt32 = 0
    public var row: UInt64 = 0
    /// Counted from 1; 0: in the rows.
    public var part: UInt32 = 0
    public var partOffsetBytes: UInt64 = 0
}

/// Bytes that were the next ones, and have their checksum.
public struct Arrived: Sendable, Hashable {
    /// Index into the tensors; nil: of a part.
    public var tensorIndex: Int?
    /// Index into the parts; nil: of a tensor.
    public var partIndex: Int?
    /// Where they begin in it.
    public var offsetBytes: UInt64
    public var data: ArraySlice<UInt8>
}

/// A fetch in progress, over as many streams as it takes.
public struct Reception: Sendable {
    private struct Piece: Sendable {
        let isPart: Bool
        let number: Int
        let size: UInt64
        /// Bytes of a row; 1 for a part.
        let unit: UInt64
        /// What the first row counts as; 0 for a part.
        let firstRow: UInt64
    }

    /// nil before the header has come, and after a miss.
    public private(set) var announced: Announced?
    public private(set) var doneBytes: UInt64 = 0
    private let bytesMax: UInt64
    private let keeps: Bool
    private var missed = false
    private var headed = false
    private var pieces: ArraySlice<Piece> = []
    private var filled: UInt64 = 0
    private var tensorData: [[UInt8]] = []
    private var partData: [[UInt8]] = []

    /// - Parameters:
    ///   - bytesMax: More than this is refused before memory is allocated.
    ///   - keeps: Whether the bytes are kept; otherwise the caller uses what `take` returns.
    public init(bytesMax: UInt64, keeps: Bool = true) {
        self.bytesMax = bytesMax
        self.keeps = keeps
    }

    /// Whether everything that was announced is here, or nothing was announced: a miss.
    public var ended: Bool { missed || (announced != nil && pieces.isEmpty) }

    /// Whether another prefix may take this one's place: not if bytes are with the caller already.
    public var restarts: Bool { keeps || doneBytes == 0 }

    /// Forgets everything: the rows have changed between two streams.
    public mutating func restart() {
        self = Reception(bytesMax: bytesMax, keeps: keeps)
    }

    /// Returns what to ask for; nil: from the beginning. A header comes first again.
    public mutating func beginStream() -> Resume? {
        headed = false
        guard let announced, let next = pieces.first else { return nil }
        var resume = Resume(generation: announced.generation, begin: announced.begin, end: announced.end)
        if next.isPart {
            resume.part = UInt32(next.number) + 1
            resume.partOffsetBytes = filled
        } else {
            resume.tensorIndex = UInt32(next.number)
            resume.row = next.firstRow + filled / next.unit
        }
        return resume
    }

    /// Takes the header of a stream; nil says that nothing is stored.
    public mutating func take(header: Announced?) throws {
        guard !headed else { throw PionError.badAnswer("a second header came") }
        headed = true
        guard let header else {
            guard restarts else {
                throw PionError(
                    .generation,
                    "the stream broke, and where it was to go on the prefix is not: it is gone, or this is another node"
                )
            }
            restart()
            missed = true
            return
        }
        if let announced {
            guard header == announced else {
                throw PionError.badAnswer("a resumed stream announces something else")
            }
            return
        }
        try header.check(bytesMax: bytesMax)
        announced = header
        let tensors = header.layout.tensors.enumerated().map { index, tensor in
            let unit = UInt64(tensor.rowBytes)
            return Piece(
                isPart: false, number: index, size: (header.end - header.begin) * unit, unit: unit,
                firstRow: header.begin)
        }
        let parts = header.parts.enumerated().map { index, part in
            Piece(isPart: true, number: index, size: part.sizeBytes, unit: 1, firstRow: 0)
        }
        pieces = (tensors + parts).filter { $0.size > 0 }[...]
        tensorData = Array(repeating: [], count: tensors.count)
        partData = Array(repeating: [], count: parts.count)
    }

    /// Takes the next chunk of a stream.
    ///
    /// - Throws: `PionError` with `badAnswer` if it is not the next one, or `checksum` if its bytes are not those
    ///   that were sent: ask for them again.
    public mutating func take(_ message: StreamMessage) throws -> Arrived {
        guard headed, let next = pieces.first else {
            throw PionError.badAnswer("a chunk came that was not announced")
        }
        let data: ArraySlice<UInt8>
        let crc: UInt32
        let fits: Bool
        switch message {
        case .header:
            throw PionError.badAnswer("a header came out of turn")
        case .rows(let chunk):
            (data, crc) = (chunk.data, chunk.crc32c)
            let size = UInt64(data.count)
            fits =
                !next.isPart && chunk.tensorIndex == UInt64(next.number) && chunk.arrayIndex == 0
                && chunk.firstRow == next.firstRow + filled / next.unit && size % next.unit == 0
                && chunk.rowCount == size / next.unit
        case .part(let chunk):
            (data, crc) = (chunk.data, chunk.crc32c)
            fits = next.isPart && chunk.partIndex == UInt64(next.number) && chunk.offsetBytes == filled
        }
        let size = UInt64(data.count)
        guard size > 0, size <= next.size - filled else {
            throw PionError.badAnswer("\(size) bytes came where \(next.size - filled) are missing")
        }
        guard fits else { throw PionError.badAnswer("\(size) bytes came that were not next") }
        guard data.withUnsafeBytes({ CRC32C.checksum($0) }) == crc else {
            throw PionError(.checksum, "a chunk arrived with another checksum than it was sent with")
        }
        let arrived = Arrived(
            tensorIndex: next.isPart ? nil : next.number, partIndex: next.isPart ? next.number : nil,
            offsetBytes: filled, data: data)
        if keeps { keep(data, of: next) }
        filled += size
        doneBytes += size
        if filled == next.size {
            pieces.removeFirst()
            filled = 0
        }
        return arrived
    }

    /// Returns the tensors and parts, once `ended`.
    public func result() -> (tensors: [Tensor], parts: [Part]) {
        precondition(ended && keeps, "not everything has come")
        guard let announced else { return ([], []) }
        let tensors = zip(announced.layout.tensors, tensorData).map { Tensor(layout: $0, data: $1) }
        let parts = zip(announced.parts, partData).map { Part(info: $0, data: $1) }
        return (tensors, parts)
    }

    private mutating func keep(_ data: ArraySlice<UInt8>, of piece: Piece) {
        if piece.isPart {
            if filled == 0 { partData[piece.number].reserveCapacity(Int(piece.size)) }
            partData[piece.number].append(contentsOf: data)
        } else {
            if filled == 0 { tensorData[piece.number].reserveCapacity(Int(piece.size)) }
            tensorData[piece.number].append(contentsOf: data)
        }
    }
}
