/// Where a server listens, as it is written: "host:port" or "unix:/path".
public enum Address: Sendable, Hashable {
    case unix(path: String)
    case ipv4(String, port: Int)
    /// Without brackets.
    case ipv6(String, port: Int)
    /// To be resolved; so are addresses of IPv6 with a zone.
    case name(String, port: Int)

    /// Returns the addresses in a text: one, or several of "host:port" with commas between them.
    ///
    /// - Throws: `PionError` if one of them is not valid.
    public static func list(_ text: String) throws -> [(text: String, address: Address)] {
        if text.hasPrefix("unix:") { return [(text, try Address(text))] }
        return try text.split(separator: ",", omittingEmptySubsequences: false).map { one in
            (String(one), try Address(String(one)))
        }
    }

    /// - Throws: `PionError` if this is no address.
    public init(_ text: String) throws {
        guard let address = Self.parse(text) else {
            throw PionError(.invalid, "\(text) is neither host:port nor unix:/path", metadata: ["field": "address"])
        }
        self = address
    }

    private static func parse(_ text: String) -> Address? {
        if text.hasPrefix("unix:") {
            let path = text.dropFirst("unix:".count)
            let plain = String(path.hasPrefix("//") ? path.dropFirst(2) : path)
            return plain.isEmpty ? nil : .unix(path: plain)
        }
        guard let colon = text.lastIndex(of: ":"), let port = number(text[text.index(after: colon)...], max: 65_535),
            port > 0
        else { return nil }
        let host = text[..<colon]
        if host.hasPrefix("["), host.hasSuffix("]") {
            let literal = String(host.dropFirst().dropLast())
            guard literal.contains(":") else { return nil }
            if literal.allSatisfy({ $0.isHexDigit || $0 == ":" || $0 == "." }) { return .ipv6(literal, port: port) }
            let zoned = literal.allSatisfy { isOfNames($0) || $0 == ":" || $0 == "%" }
            return zoned ? .name(literal, port: port) : nil
        }
        guard !host.isEmpty, host.allSatisfy(isOfNames) else { return nil }
        let numbers = host.split(separator: ".", omittingEmptySubsequences: false)
        if numbers.count == 4, numbers.allSatisfy({ number($0, max: 255) != nil }) {
            return .ipv4(String(host), port: port)
        }
        return .name(String(host), port: port)
    }

    private static func isOfNames(_ character: Character) -> Bool {
        character.isASCII && (character.isLetter || character.isNumber || "-._".contains(character))
    }

    /// Returns a number in plain decimal digits.
    private static func number(_ digits: Substring, max: Int) -> Int? {
        guard (1...5).contains(digits.utf8.count), let number = Int(digits), number <= max, "\(number)" == digits
        else { return nil }
        return number
    }
}
