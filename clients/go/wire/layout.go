package wire

import (
	"encoding/json"
	"fmt"
	"strings"
)

// DType is the type of the values of a tensor.
type DType uint8

// The types that are stored. All are little-endian; BF16 is never cast to F16.
const (
	F32 DType = iota + 1
	F16
	BF16
)

var dtypeNames = [...]string{F32: "F32", F16: "F16", BF16: "BF16"}

// String returns the name that safetensors files use.
func (d DType) String() string {
	if d < F32 || d > BF16 {
		return fmt.Sprintf("DType(%d)", uint8(d))
	}
	return dtypeNames[d]
}

// ItemBytes returns the bytes of one value.
func (d DType) ItemBytes() int {
	if d == F32 {
		return 4
	}
	return 2
}

// ParseDType returns the type of that name.
func ParseDType(name string) (DType, error) {
	for d := F32; d <= BF16; d++ {
		if dtypeNames[d] == name {
			return d, nil
		}
	}
	return 0, fmt.Errorf("%q is not stored; F32, F16 and BF16 are", name)
}

// Side is half of an attention cache.
type Side uint8

// Keys and values.
const (
	K Side = iota + 1
	V
)

// String returns "k" or "v".
func (s Side) String() string {
	switch s {
	case K:
		return "k"
	case V:
		return "v"
	}
	return fmt.Sprintf("Side(%d)", uint8(s))
}

// ParseSide returns the side of that name.
func ParseSide(name string) (Side, error) {
	switch name {
	case "k":
		return K, nil
	case "v":
		return V, nil
	}
	return 0, fmt.Errorf("%q is neither k nor v", name)
}

// RawCodec stores the bits as they came.
const RawCodec = "raw"

// TensorLayout says what the rows of one (slot, side) look like. A row is Heads times HeadDim values,
// token-major: [token][head][dim].
type TensorLayout struct {
	Slot    uint32
	Side    Side
	Heads   uint32
	HeadDim uint32 // 0 where a cache keeps nothing on this side
	DType   DType
	Codec   string // canonical name; empty means "raw"
}

// CodecName returns the canonical name of the codec.
func (t TensorLayout) CodecName() string {
	if t.Codec == "" {
		return RawCodec
	}
	return t.Codec
}

// Name returns its name in a file, such as "k.0".
func (t TensorLayout) Name() string { return fmt.Sprintf("%s.%d", t.Side, t.Slot) }

// RowBytes returns the bytes of one row of values, which is what a raw tensor stores.
func (t TensorLayout) RowBytes() int {
	return int(t.Heads) * int(t.HeadDim) * t.DType.ItemBytes()
}

// Validate says which field cannot be stored.
func (t TensorLayout) Validate() error {
	switch {
	case t.Slot >= SlotsMax:
		return fmt.Errorf("slot: %d is outside 0..%d", t.Slot, SlotsMax-1)
	case t.Side != K && t.Side != V:
		return fmt.Errorf("side: %v is neither k nor v", t.Side)
	case t.Heads < 1:
		return fmt.Errorf("heads: %d is below 1", t.Heads)
	case t.DType < F32 || t.DType > BF16:
		return fmt.Errorf("data_type: %v is not stored", t.DType)
	case uint64(t.Heads)*uint64(t.HeadDim) > RowBytesMax/uint64(t.DType.ItemBytes()):
		return fmt.Errorf("head_dim: a row of %d heads of %d %v values exceeds %d bytes",
			t.Heads, t.HeadDim, t.DType, RowBytesMax)
	}
	return nil
}

// Layout is all tensors of a prefix: ordered by slot, K before V, none twice.
type Layout []TensorLayout

// Validate says what cannot be stored.
func (l Layout) Validate() error {
	if len(l) > TensorsMax {
		return fmt.Errorf("tensors: more than %d tensors", TensorsMax)
	}
	for i, tensor := range l {
		if err := tensor.Validate(); err != nil {
			return err
		}
		if i > 0 && l[i-1].key() >= tensor.key() {
			return fmt.Errorf("tensors: they must be ordered by slot, K before V, none twice")
		}
	}
	return nil
}

// RowBytes returns the bytes of one token over all tensors.
func (l Layout) RowBytes() int {
	total := 0
	for _, tensor := range l {
		total += tensor.RowBytes()
	}
	return total
}

// Fidelity returns "raw", or the codecs of a lossy prefix in the order of its tensors.
func (l Layout) Fidelity() string {
	lossy := false
	codecs := make([]string, len(l))
	for i, tensor := range l {
		codecs[i] = tensor.Name() + "=" + tensor.CodecName()
		lossy = lossy || tensor.CodecName() != RawCodec
	}
	if !lossy {
		return RawFidelity
	}
	return strings.Join(codecs, ";")
}

// Equal tells whether two layouts store the same.
func (l Layout) Equal(other Layout) bool {
	return l.String() == other.String()
}

// String returns the canonical text: equal layouts have equal texts.
func (l Layout) String() string {
	rows := make([][6]any, len(l))
	for i, t := range l {
		rows[i] = [6]any{t.Slot, t.Side.String(), t.Heads, t.HeadDim, t.DType.String(), t.CodecName()}
	}
	text, err := json.Marshal(rows)
	if err != nil {
		panic(err) // numbers and texts always have a JSON form
	}
	return string(text)
}

// ParseLayout returns the layout of a canonical text.
func ParseLayout(text string) (Layout, error) {
	var rows [][6]json.RawMessage
	if err := json.Unmarshal([]byte(text), &rows); err != nil {
		return nil, fmt.Errorf("not a layout: %w", err)
	}
	layout := make(Layout, len(rows))
	for i, row := range rows {
		var side, dtype string
		t := &layout[i]
		for j, field := range []any{&t.Slot, &side, &t.Heads, &t.HeadDim, &dtype, &t.Codec} {
			if err := json.Unmarshal(row[j], field); err != nil {
				return nil, fmt.Errorf("not a layout: %w", err)
			}
		}
		var err error
		if t.Side, err = ParseSide(side); err != nil {
			return nil, fmt.Errorf("not a layout: %w", err)
		}
		if t.DType, err = ParseDType(dtype); err != nil {
			return nil, fmt.Errorf("not a layout: %w", err)
		}
	}
	if err := layout.Validate(); err != nil {
		return nil, fmt.Errorf("not a layout: %w", err)
	}
	if layout.String() != text {
		return nil, fmt.Errorf("not a layout in its canonical form")
	}
	return layout, nil
}

// key orders tensors: 2 slot, + 1 for V.
func (t TensorLayout) key() uint32 {
	return 2*t.Slot + uint32(t.Side) - uint32(K)
}
