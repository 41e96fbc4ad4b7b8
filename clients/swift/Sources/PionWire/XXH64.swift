/// XXH64 with seed 0, the hash of the ring.
enum XXH64 {
    private static let primes: [UInt64] = [
        0x9e37_79b1_85eb_ca87, 0xc2b2_ae3d_27d4_eb4f, 0x1656_67b1_9e37_79f9, 0x85eb_ca77_c2b2_ae63,
        0x27d4_eb2f_1656_67c5,
    ]

    /// Returns the hash of a text in UTF-8.
    static func hash(_ text: String) -> UInt64 {
        let bytes = Array(text.utf8)
        return bytes.withUnsafeBytes { hash($0) }
    }

    private static func hash(_ bytes: UnsafeRawBufferPointer) -> UInt64 {
        let (p1, p2, p3, p4, p5) = (primes[0], primes[1], primes[2], primes[3], primes[4])
        var at = 0
        var hash = p5
        if bytes.count >= 32 {
            var lanes = [p1 &+ p2, p2, 0, 0 &- p1]
            while at + 32 <= bytes.count {
                for lane in 0..<4 {
                    lanes[lane] = round(lanes[lane], word(bytes, at + 8 * lane))
                }
                at += 32
            }
            hash = zip(lanes, [1, 7, 12, 18]).reduce(0) { $0 &+ rotated($1.0, $1.1) }
            for lane in lanes {
                hash = (hash ^ round(0, lane)) &* p1 &+ p4
            }
        }
        hash &+= UInt64(bytes.count)
        while at + 8 <= bytes.count {
            hash = rotated(hash ^ round(0, word(bytes, at)), 27) &* p1 &+ p4
            at += 8
        }
        if at + 4 <= bytes.count {
            let half = UInt64(UInt32(littleEndian: bytes.loadUnaligned(fromByteOffset: at, as: UInt32.self)))
            hash = rotated(hash ^ half &* p1, 23) &* p2 &+ p3
            at += 4
        }
        for byte in bytes[at...] {
            hash = rotated(hash ^ UInt64(byte) &* p5, 11) &* p1
        }
        hash = (hash ^ hash >> 33) &* p2
        hash = (hash ^ hash >> 29) &* p3
        return hash ^ hash >> 32
    }

    private static func round(_ lane: UInt64, _ word: UInt64) -> UInt64 {
        rotated(lane &+ word &* primes[1], 31) &* primes[0]
    }

    private static func word(_ bytes: UnsafeRawBufferPointer, _ at: Int) -> UInt64 {
        UInt64(littleEndian: bytes.loadUnaligned(fromByteOffset: at, as: UInt64.self))
    }

    private static func rotated(_ value: UInt64, _ count: UInt64) -> UInt64 {
        value << count | value >> (64 - count)
    }
}
