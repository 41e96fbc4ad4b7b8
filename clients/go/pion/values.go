package pion

import (
	"fmt"
	"io"
	"time"

	"pion-grpc/clients/go/pionv1"
	"pion-grpc/clients/go/wire"
)

// Durability says how much an acknowledgement promises.
type Durability = pionv1.Durability

// Process survives the death of the server process, Disk a power cut.
const (
	DurabilityProcess = pionv1.Durability_DURABILITY_PROCESS
	DurabilityDisk    = pionv1.Durability_DURABILITY_DISK
)

// MissReason says why less was served than was asked, or nothing.
type MissReason = pionv1.MissReason

// State says where a prefix stands.
type State = pionv1.PrefixState

// Tensor is all rows of one (slot, side): Layout.RowBytes() bytes each, token-major, little-endian.
type Tensor struct {
	Layout wire.TensorLayout
	// Data is the rows. In a StoreRequest they may be From instead.
	Data []byte
	// From is read instead of Data, if it is not nil: Bytes of it.
	From io.ReaderAt
	// Bytes is the size of From; of Data, its length counts.
	Bytes int64
}

// F32 returns the values of an F32 tensor: the same memory, where it is aligned.
func (t Tensor) F32() ([]float32, error) { return view[float32](t, wire.F32) }

// F16 returns the values of an F16 tensor: the same memory, where it is aligned.
func (t Tensor) F16() ([]wire.Half, error) { return view[wire.Half](t, wire.F16) }

// BF16 returns the values of a BF16 tensor: the same memory, where it is aligned.
func (t Tensor) BF16() ([]wire.Brain, error) { return view[wire.Brain](t, wire.BF16) }

func view[T wire.Value](t Tensor, want wire.DType) ([]T, error) {
	if t.Layout.DType != want {
		return nil, fmt.Errorf("pion: %s holds %v, not %v", t.Layout.Name(), t.Layout.DType, want)
	}
	return wire.View[T](t.Data)
}

// PartInfo says what an opaque piece of a prefix is, and at which token boundary it is exact.
type PartInfo struct {
	Kind           string
	Slot           uint32
	BoundaryTokens uint64
	SizeBytes      uint64
	Description    string
}

// Part is an opaque piece of a prefix. In a StoreRequest its size follows from what it holds.
type Part struct {
	PartInfo
	Data []byte
	// From is read instead of Data, if it is not nil: SizeBytes of it.
	From io.ReaderAt
}

// PrefixInfo is what is known of a visible prefix.
type PrefixInfo struct {
	Namespace   string
	State       State
	Model       string
	Layout      wire.Layout
	TokenCount  uint64 // of the whole chain
	Base        uint64 // rows taken from the parent
	Parent      string
	Generation  uint64
	StoredBytes uint64 // on disk, without the parents'
	RowBytes    uint64 // that a Fetch of all rows streams
	Fidelity    string // "raw", or the codecs of a lossy prefix
	Created     time.Time
	Durability  Durability
	Parts       []PartInfo
	PrefillMS   float64
	Depth       uint32
}

// BlockTable is a caller's own table of hashes over the blocks of a prefix.
type BlockTable struct {
	BlockTokens uint32
	Hashes      []uint64
}

func infoOf(message *pionv1.PrefixInfo) (PrefixInfo, error) {
	layout, err := layoutOf(message.GetLayout())
	return PrefixInfo{
		Namespace:   message.GetNamespace(),
		State:       message.GetState(),
		Model:       message.GetModelId(),
		Layout:      layout,
		TokenCount:  message.GetTokenCount(),
		Base:        message.GetBase(),
		Parent:      message.GetParentNamespace(),
		Generation:  message.GetGeneration(),
		StoredBytes: message.GetStoredBytes(),
		RowBytes:    message.GetRowBytes(),
		Fidelity:    message.GetFidelity(),
		Created:     time.UnixMilli(int64(message.GetCreatedUnixMs())),
		Durability:  message.GetDurability(),
		Parts:       partInfosOf(message.GetParts()),
		PrefillMS:   message.GetPrefillMs(),
		Depth:       message.GetDepth(),
	}, err
}

var (
	dtypeMessages = map[wire.DType]pionv1.DataType{
		wire.F32: pionv1.DataType_DATA_TYPE_F32, wire.F16: pionv1.DataType_DATA_TYPE_F16,
		wire.BF16: pionv1.DataType_DATA_TYPE_BF16,
	}
	sideMessages = map[wire.Side]pionv1.Side{wire.K: pionv1.Side_SIDE_K, wire.V: pionv1.Side_SIDE_V}
)

func layoutOf(message *pionv1.Layout) (wire.Layout, error) {
	layout := make(wire.Layout, len(message.GetTensors()))
	for i, tensor := range message.GetTensors() {
		layout[i] = wire.TensorLayout{
			Slot:    tensor.GetSlot(),
			Side:    wire.Side(tensor.GetSide()),
			Heads:   tensor.GetHeads(),
			HeadDim: tensor.GetHeadDim(),
			DType:   wire.DType(tensor.GetDataType()),
			Codec:   tensor.GetCodec(),
		}
	}
	if err := layout.Validate(); err != nil {
		return nil, badAnswer("its layout cannot be: %v", err)
	}
	return layout, nil
}

func layoutMessage(layout wire.Layout) *pionv1.Layout {
	message := &pionv1.Layout{Tensors: make([]*pionv1.TensorLayout, len(layout))}
	for i, tensor := range layout {
		message.Tensors[i] = &pionv1.TensorLayout{
			Slot:     tensor.Slot,
			Side:     sideMessages[tensor.Side],
			Heads:    tensor.Heads,
			HeadDim:  tensor.HeadDim,
			DataType: dtypeMessages[tensor.DType],
			Codec:    tensor.CodecName(),
		}
	}
	return message
}

func partInfosOf(messages []*pionv1.PartInfo) []PartInfo {
	infos := make([]PartInfo, len(messages))
	for i, part := range messages {
		infos[i] = PartInfo{
			part.GetKind(), part.GetSlot(), part.GetBoundaryTokens(), part.GetSizeBytes(), part.GetDescription(),
		}
	}
	return infos
}

func partMessage(part PartInfo) *pionv1.PartInfo {
	return &pionv1.PartInfo{
		Kind: part.Kind, Slot: part.Slot, BoundaryTokens: part.BoundaryTokens, SizeBytes: part.SizeBytes,
		Description: part.Description,
	}
}
