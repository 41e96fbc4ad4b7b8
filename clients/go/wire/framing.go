package wire

import (
	"errors"
	"fmt"
	"hash/crc32"

	"google.golang.org/protobuf/encoding/protowire"
)

// The messages of chunk streams are made and taken apart here instead of by generated code: `data` is
// the last field, so what arrives is a few numbers and a view of the rest, and what is sent one copy.
// StoreRequest and FetchResponse have the same shape: header 1, rows 2, part 3.

// Castagnoli is the table of the checksum that every chunk carries: CRC-32C.
var Castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ErrFrame is what every error of ParseMessage wraps: the bytes are not a message of a chunk stream.
var ErrFrame = errors.New("not a message of a chunk stream")

// FrameBytesMax is the room that a chunk's message may need beside its data.
const FrameBytesMax = 64

const (
	fieldHeader protowire.Number = 1
	fieldRows   protowire.Number = 2
	fieldPart   protowire.Number = 3
	fieldData   protowire.Number = 15
)

// RowChunk is consecutive rows of one array of one tensor, as stored.
type RowChunk struct {
	TensorIndex uint64
	ArrayIndex  uint64
	FirstRow    uint64
	RowCount    uint64
	CRC32C      uint32
	Data        []byte
}

// PartChunk is consecutive bytes of one part.
type PartChunk struct {
	PartIndex   uint64
	OffsetBytes uint64
	CRC32C      uint32
	Data        []byte
}

// Message is one message of a chunk stream: exactly one of its fields is not nil.
type Message struct {
	Header []byte // still serialised
	Rows   *RowChunk
	Part   *PartChunk
}

// AppendHeader appends the message that holds a serialised header.
func AppendHeader(to, header []byte) []byte {
	to = protowire.AppendTag(to, fieldHeader, protowire.BytesType)
	return protowire.AppendBytes(to, header)
}

// AppendRows appends the message that holds rows, with the CRC-32C of their data.
func AppendRows(to []byte, tensorIndex, arrayIndex, firstRow, rowCount uint64, data []byte) []byte {
	var fields [FrameBytesMax]byte
	numbers := appendNumber(fields[:0], 1, tensorIndex)
	numbers = appendNumber(numbers, 2, arrayIndex)
	numbers = appendNumber(numbers, 3, firstRow)
	numbers = appendNumber(numbers, 4, rowCount)
	return appendChunk(to, fieldRows, appendChecksum(numbers, 5, data), data)
}

// AppendPart appends the message that holds bytes of a part, with the CRC-32C of their data.
func AppendPart(to []byte, partIndex, offsetBytes uint64, data []byte) []byte {
	var fields [FrameBytesMax]byte
	numbers := appendNumber(fields[:0], 1, partIndex)
	numbers = appendNumber(numbers, 2, offsetBytes)
	return appendChunk(to, fieldPart, appendChecksum(numbers, 3, data), data)
}

// ParseMessage takes a message apart. What it returns are views of the message; checksums are not
// checked yet. Every error wraps ErrFrame.
func ParseMessage(message []byte) (Message, error) {
	var found Message
	err := eachField(message, func(number protowire.Number, kind protowire.Type, _ uint64, value []byte) error {
		if number > fieldPart {
			return nil
		}
		if found.Header != nil || found.Rows != nil || found.Part != nil {
			return errors.New("it holds two things")
		}
		if kind != protowire.BytesType {
			return fmt.Errorf("its field %d has wire type %d", number, kind)
		}
		var err error
		switch number {
		case fieldHeader:
			found.Header = value[:len(value):len(value)]
		case fieldRows:
			found.Rows, err = parseRows(value)
		case fieldPart:
			found.Part, err = parsePart(value)
		}
		return err
	})
	if err == nil && found.Header == nil && found.Rows == nil && found.Part == nil {
		err = errors.New("it holds nothing")
	}
	if err != nil {
		return Message{}, fmt.Errorf("%w: %w", ErrFrame, err)
	}
	return found, nil
}

func parseRows(value []byte) (*RowChunk, error) {
	numbers, data, err := parseChunk(value, 5)
	return &RowChunk{numbers[1], numbers[2], numbers[3], numbers[4], uint32(numbers[5]), data}, err
}

func parsePart(value []byte) (*PartChunk, error) {
	numbers, data, err := parseChunk(value, 3)
	return &PartChunk{numbers[1], numbers[2], uint32(numbers[3]), data}, err
}

// parseChunk returns the numbers of a chunk by field, and its data; the checksum is the last number.
func parseChunk(value []byte, checksum protowire.Number) (numbers [6]uint64, data []byte, err error) {
	err = eachField(value, func(number protowire.Number, kind protowire.Type, n uint64, bytes []byte) error {
		switch {
		case kind == protowire.BytesType && number == fieldData:
			data = bytes
		case kind == protowire.Fixed32Type && number == checksum,
			kind == protowire.VarintType && number < checksum:
			numbers[number] = n
		}
		return nil
	})
	return numbers, data, err
}

type fieldFunc = func(number protowire.Number, kind protowire.Type, n uint64, bytes []byte) error

func eachField(message []byte, take fieldFunc) error {
	for len(message) > 0 {
		number, kind, size := protowire.ConsumeTag(message)
		if size < 0 {
			return protowire.ParseError(size)
		}
		message = message[size:]
		var n uint64
		var bytes []byte
		switch kind {
		case protowire.VarintType:
			n, size = protowire.ConsumeVarint(message)
		case protowire.Fixed32Type:
			var fixed uint32
			fixed, size = protowire.ConsumeFixed32(message)
			n = uint64(fixed)
		case protowire.Fixed64Type:
			n, size = protowire.ConsumeFixed64(message)
		case protowire.BytesType:
			bytes, size = protowire.ConsumeBytes(message)
		default:
			return fmt.Errorf("wire type %d does not exist", kind)
		}
		if size < 0 {
			return protowire.ParseError(size)
		}
		if err := take(number, kind, n, bytes); err != nil {
			return err
		}
		message = message[size:]
	}
	return nil
}

// appendNumber appends a field; zeros are left out, as generated code leaves them out.
func appendNumber(to []byte, number protowire.Number, value uint64) []byte {
	if value == 0 {
		return to
	}
	return protowire.AppendVarint(protowire.AppendTag(to, number, protowire.VarintType), value)
}

func appendChecksum(to []byte, number protowire.Number, data []byte) []byte {
	checksum := crc32.Checksum(data, Castagnoli)
	if checksum == 0 {
		return to
	}
	return protowire.AppendFixed32(protowire.AppendTag(to, number, protowire.Fixed32Type), checksum)
}

func appendChunk(to []byte, field protowire.Number, numbers, data []byte) []byte {
	if len(data) > 0 {
		numbers = protowire.AppendTag(numbers, fieldData, protowire.BytesType)
		numbers = protowire.AppendVarint(numbers, uint64(len(data)))
	}
	to = protowire.AppendTag(to, field, protowire.BytesType)
	to = protowire.AppendVarint(to, uint64(len(numbers)+len(data)))
	return append(append(to, numbers...), data...)
}
