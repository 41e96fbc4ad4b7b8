/// Limits of the wire and of what may be stored, each with its unit in its name.
public enum Limits {
    /// Data in one message of a stream.
    public static let chunkBytesMax = 1 << 20
    public static let tokensMax = 1_000_000
    public static let slotsMax = 1_024
    public static let tensorsMax = 2 * slotsMax
    public static let rowBytesMax = 65_536
    public static let partsMax = 4_096
    public static let partBytesMax: UInt64 = 4 << 30
    /// Names in one call.
    public static let namesMax = 1_000
}
