package pion

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"

	"google.golang.org/protobuf/proto"

	"pion-grpc/clients/go/pionv1"
	"pion-grpc/clients/go/wire"
)

// StoreRequest is a prefix to store.
type StoreRequest struct {
	// Namespace is its name; empty derives one from the token ids.
	Namespace string
	Model     string
	// TokenIDs are all ids of the prefix, the parent's share included.
	TokenIDs []uint32
	// Tensors are its rows, from Base on, ordered by slot, K before V.
	Tensors []Tensor
	// Parts follow the rows.
	Parts []Part
	// Parent is the prefix that this one extends, and Base how many rows it takes from it.
	Parent string
	Base   uint64
	// Replace puts it in the place of what the namespace holds.
	Replace    bool
	Durability Durability
	// PrefillMS is the measured prefill time of these tokens; 0: not measured.
	PrefillMS float64
	Table     *BlockTable
	// Progress is called with the bytes handed to the network, and those in all.
	Progress func(done, total uint64)
}

// Stored is the acknowledgement of a Store.
type Stored struct {
	Namespace     string
	AlreadyStored bool // the same was there; nothing was written
	Generation    uint64
	TokenCount    uint64
	StoredBytes   uint64
	Durability    Durability
	Base          uint64
}

// Store stores a prefix: it is there as a whole when this returns, or not at all. If only the transport
// failed, everything is sent again.
func (c *Client) Store(ctx context.Context, request StoreRequest) (Stored, error) {
	header, pieces, err := request.plan()
	if err != nil {
		return Stored{}, err
	}
	route := wire.RouteKey(c.options.Tenant, request.Model, request.TokenIDs)
	answer, err := whole(c, ctx, func() (*pionv1.PrefixStoreStoreResponse, error) {
		return c.send(ctx, header, pieces, request.Progress, route)
	})
	if own, ok := err.(ofCaller); ok {
		return Stored{}, own.error
	}
	if err != nil {
		return Stored{}, err
	}
	c.routes.follow(answer.GetNamespace(), nil, route)
	return Stored{
		answer.GetNamespace(), answer.GetAlreadyStored(), answer.GetGeneration(), answer.GetTokenCount(),
		answer.GetStoredBytes(), answer.GetDurability(), answer.GetBase(),
	}, nil
}

// source is a tensor or a part to send.
type source struct {
	from     io.ReaderAt
	size     int64
	unit     int // bytes of a row; 1 for a part
	firstRow uint64
	frame    func(to []byte, offset uint64, data []byte) []byte // offset in units
}

// plan checks that everything fits together, and says what will be sent.
func (r *StoreRequest) plan() ([]byte, []source, error) {
	if len(r.TokenIDs) == 0 || len(r.TokenIDs) > wire.TokensMax {
		return nil, nil, invalid("token_ids", "%d of them; 1 to %d", len(r.TokenIDs), wire.TokensMax)
	}
	if r.Base > uint64(len(r.TokenIDs)) {
		return nil, nil, invalid("base", "%d is more than the %d tokens", r.Base, len(r.TokenIDs))
	}
	header := &pionv1.PrefixStoreStoreHeader{
		Namespace:       r.Namespace,
		ModelId:         r.Model,
		TokenIds:        wire.PackTokenIDs(r.TokenIDs),
		ParentNamespace: r.Parent,
		Base:            r.Base,
		Replace:         r.Replace,
		Durability:      r.Durability,
		PrefillMs:       r.PrefillMS,
		Table:           r.Table.message(),
	}
	var pieces []source
	layout := make(wire.Layout, len(r.Tensors))
	rows := int64(len(r.TokenIDs)) - int64(r.Base)
	for i, tensor := range r.Tensors {
		layout[i] = tensor.Layout
		piece := source{from: tensor.From, size: tensor.Bytes, unit: tensor.Layout.RowBytes(), firstRow: r.Base}
		if piece.from == nil {
			piece.from, piece.size = bytes.NewReader(tensor.Data), int64(len(tensor.Data))
		}
		if tensor.Layout.CodecName() != wire.RawCodec {
			return nil, nil, invalid("codec", "%s is %s; this client stores raw rows", tensor.Layout.Name(), tensor.Layout.Codec)
		}
		if piece.size != rows*int64(piece.unit) {
			return nil, nil, invalid("tensors", "%s has %d bytes, not %d rows of %d", tensor.Layout.Name(), piece.size, rows, piece.unit)
		}
		piece.frame = func(to []byte, row uint64, data []byte) []byte {
			return wire.AppendRows(to, uint64(i), 0, row, uint64(len(data)/piece.unit), data)
		}
		pieces = append(pieces, piece)
	}
	if err := layout.Validate(); err != nil {
		return nil, nil, invalid("layout", "%v", err)
	}
	if len(layout) > 0 {
		header.Layout = layoutMessage(layout)
	}
	for i, part := range r.Parts {
		piece := source{from: part.From, size: int64(part.SizeBytes), unit: 1}
		if piece.from == nil {
			piece.from, piece.size = bytes.NewReader(part.Data), int64(len(part.Data))
			part.SizeBytes = uint64(len(part.Data))
		}
		piece.frame = func(to []byte, offset uint64, data []byte) []byte {
			return wire.AppendPart(to, uint64(i), offset, data)
		}
		pieces = append(pieces, piece)
		header.Parts = append(header.Parts, partMessage(part.PartInfo))
	}
	if err := checkText(header.ProtoReflect()); err != nil {
		return nil, nil, err
	}
	text, err := proto.Marshal(header)
	if err != nil {
		return nil, nil, invalid("header", "%v", err)
	}
	return text, pieces, nil
}

// send makes one attempt.
func (c *Client) send(
	ctx context.Context, header []byte, pieces []source, progress func(done, total uint64), route string,
) (*pionv1.PrefixStoreStoreResponse, error) {
	ctx, dog, end := c.watched(ctx)
	defer end()
	stream, err := c.openFrames(ctx, &storeStream, pionv1.PrefixStore_Store_FullMethodName, route)
	if err != nil {
		return nil, errorOf(ctx, err)
	}
	first := newFrame(len(header)+wire.FrameBytesMax, func(to []byte) []byte {
		return wire.AppendHeader(to, header)
	})
	var total, done uint64
	for _, piece := range pieces {
		total += uint64(piece.size)
	}
	err = stream.SendMsg(first)
	dog.stop() // the time that reading takes is the caller's own
	room := make([]byte, wire.ChunkBytesMax)
	for i := 0; i < len(pieces) && err == nil; i++ {
		err = pieces[i].each(room, func(chunk *frame, size int) error {
			dog.wind()
			err := stream.SendMsg(chunk)
			dog.stop()
			if err != nil {
				return err
			}
			if done += uint64(size); progress != nil {
				progress(done, total)
			}
			return nil
		})
	}
	if own, ok := err.(ofCaller); ok {
		return nil, own
	}
	if err != nil && err != io.EOF { // EOF: the server has answered already
		return nil, errorOf(ctx, err)
	}
	dog.wind()
	answer := new(pionv1.PrefixStoreStoreResponse)
	if err := stream.CloseSend(); err != nil {
		return nil, errorOf(ctx, err)
	}
	if err := stream.RecvMsg(answer); err != nil {
		return nil, errorOf(ctx, err)
	}
	return answer, nil
}

// each reads whole units and hands them on as chunks.
func (s source) each(room []byte, take func(chunk *frame, size int) error) error {
	if s.size == 0 {
		return nil
	}
	room = room[:len(room)/s.unit*s.unit]
	for offset := int64(0); offset < s.size; {
		data := room[:min(int64(len(room)), s.size-offset)]
		if n, err := s.from.ReadAt(data, offset); n < len(data) {
			if err == nil || err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return ofCaller{err}
		}
		chunk := newFrame(len(data)+wire.FrameBytesMax, func(to []byte) []byte {
			return s.frame(to, s.firstRow+uint64(offset)/uint64(s.unit), data)
		})
		if err := take(chunk, len(data)); err != nil {
			return err
		}
		offset += int64(len(data))
	}
	return nil
}

func (t *BlockTable) message() *pionv1.BlockTable {
	if t == nil {
		return nil
	}
	hashes := make([]byte, 0, 8*len(t.Hashes))
	for _, hash := range t.Hashes {
		hashes = binary.LittleEndian.AppendUint64(hashes, hash)
	}
	return &pionv1.BlockTable{BlockTokens: t.BlockTokens, Hashes: hashes}
}
