// Package wire holds what every client of a pion-grpc server computes alike: block hashes and names,
// layouts, the frames of chunk streams, and the 16-bit types that Go lacks.
//
// It knows bytes, and neither calls nor connections. The vectors in tests/vectors say which bytes are
// right; the clients of all languages are held against them.
package wire

// Limits of the wire and of what may be stored, each with its unit in its name.
const (
	ChunkBytesMax = 1 << 20   // data in one message of a stream
	PageBytes     = 256 << 10 // bytes of a file under one checksum
	TokensMax     = 1_000_000
	SlotsMax      = 1_024
	TensorsMax    = 2 * SlotsMax
	RowBytesMax   = 65_536
	PartsMax      = 4_096
	PartBytesMax  = 4 << 30
	NamesMax      = 1_000 // names in one call
)
