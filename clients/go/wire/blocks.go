package wire

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"
)

// BlockTokens is the number of consecutive tokens under one hash; the last block may be shorter.
const BlockTokens = 64

// RawFidelity is the fidelity of a prefix that is stored without loss.
const RawFidelity = "raw"

// Hash is the hash of a block and of everything before it.
type Hash [sha256.Size]byte

// String returns 64 hex digits.
func (h Hash) String() string { return hex.EncodeToString(h[:]) }

// RootHash returns what the chains of one tenant, model and fidelity start from:
// SHA-256("pion-prefix/1" || field(tenant) || field(model id) || field(fidelity)), where field(x) is
// the length of x in bytes as u32, little-endian, and x.
func RootHash(tenant, model, fidelity string) Hash {
	text := []byte("pion-prefix/1")
	for _, field := range []string{tenant, model, fidelity} {
		text = binary.LittleEndian.AppendUint32(text, uint32(len(field)))
		text = append(text, field...)
	}
	return sha256.Sum256(text)
}

// BlockHashes returns the hash of every block: SHA-256 of the hash before it, or the root, and the
// block's token ids as u32, little-endian.
func BlockHashes(root Hash, tokenIDs []uint32) []Hash {
	hashes := make([]Hash, 0, (len(tokenIDs)+BlockTokens-1)/BlockTokens)
	text := make([]byte, 0, len(root)+4*BlockTokens)
	for previous := root; len(tokenIDs) > 0; {
		count := min(BlockTokens, len(tokenIDs))
		text = append(text[:0], previous[:]...)
		previous = sha256.Sum256(appendTokenIDs(text, tokenIDs[:count]))
		hashes = append(hashes, previous)
		tokenIDs = tokenIDs[count:]
	}
	return hashes
}

// DerivedNamespace returns the name of a prefix stored without one: 32 hex digits of its last block's
// hash. There must be a token.
func DerivedNamespace(root Hash, tokenIDs []uint32) string {
	hashes := BlockHashes(root, tokenIDs)
	return hashes[len(hashes)-1].String()[:32]
}

// RouteKey returns what a proxy hashes on: the hex of the first block's hash, of a shorter prompt that
// of its only block. The fidelity is always raw here, so that a Match and the lossy prefix that it may
// be answered with meet on one node. There must be a token.
func RouteKey(tenant, model string, tokenIDs []uint32) string {
	first := tokenIDs[:min(BlockTokens, len(tokenIDs))]
	return BlockHashes(RootHash(tenant, model, RawFidelity), first)[0].String()
}

// RouteMetadata returns a route as the value of the metadata `pion-route`. Metadata is ASCII: blanks,
// percent signs and what is not ASCII are percent-encoded, so that equal names have equal routes.
func RouteMetadata(route string) string {
	var text strings.Builder
	for _, b := range []byte(route) {
		if b > ' ' && b < 0x7f && b != '%' {
			text.WriteByte(b)
		} else {
			fmt.Fprintf(&text, "%%%02X", b)
		}
	}
	return text.String()
}

// MakeNamespace returns a namespace for parts: 32 hex digits of SHA-256 of their texts joined with "|".
func MakeNamespace(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "|")))
	return hex.EncodeToString(sum[:16])
}

// PackTokenIDs returns token ids as they travel: u32, little-endian.
func PackTokenIDs(tokenIDs []uint32) []byte {
	return appendTokenIDs(make([]byte, 0, 4*len(tokenIDs)), tokenIDs)
}

// UnpackTokenIDs returns what PackTokenIDs packed.
func UnpackTokenIDs(packed []byte) ([]uint32, error) {
	if len(packed)%4 != 0 {
		return nil, fmt.Errorf("packed token ids have %d bytes, not a multiple of 4", len(packed))
	}
	tokenIDs := make([]uint32, len(packed)/4)
	for i := range tokenIDs {
		tokenIDs[i] = binary.LittleEndian.Uint32(packed[4*i:])
	}
	return tokenIDs, nil
}

func appendTokenIDs(text []byte, tokenIDs []uint32) []byte {
	for _, id := range tokenIDs {
		text = binary.LittleEndian.AppendUint32(text, id)
	}
	return text
}
