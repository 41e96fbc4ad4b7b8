package pion

import (
	"bytes"
	"context"
	"errors"
	"io"

	"pion-grpc/clients/go/pionv1"
	"pion-grpc/clients/go/wire"
)

// StateInfo says what a recurrent state is, in the client's words.
type StateInfo struct {
	BoundaryTokens uint64 // the state after this many tokens; 0 if nobody said
	Description    string
	Model          string
}

// SSMState is a recurrent state: one opaque value per session and layer.
type SSMState struct {
	Hit bool
	StateInfo
	Data       []byte
	Generation uint64
}

// StoreState stores one value, replacing what was there. Returns its generation.
func (c *Client) StoreState(
	ctx context.Context, session string, layer uint32, info StateInfo, data []byte, durability Durability,
) (uint64, error) {
	header := &pionv1.SSMStateStoreHeader{
		Session: session,
		Layer:   layer,
		Info: &pionv1.SSMStateInfo{
			SizeBytes: uint64(len(data)), BoundaryTokens: info.BoundaryTokens, Description: info.Description,
			ModelId: info.Model,
		},
		Durability: durability,
	}
	return whole(c, ctx, func() (uint64, error) { return c.sendState(ctx, header, data) })
}

func (c *Client) sendState(
	ctx context.Context, header *pionv1.SSMStateStoreHeader, data []byte,
) (uint64, error) {
	ctx, dog, end := c.watched(ctx)
	defer end()
	stream, err := c.states.Store(c.Outgoing(ctx, c.routes.state(header.GetSession())))
	if err != nil {
		return 0, errorOf(ctx, err)
	}
	err = stream.Send(&pionv1.SSMStateStoreRequest{
		Message: &pionv1.SSMStateStoreRequest_Header{Header: header},
	})
	for chunk := range chunks(data, 0) {
		if err != nil {
			break
		}
		dog.wind()
		err = stream.Send(&pionv1.SSMStateStoreRequest{
			Message: &pionv1.SSMStateStoreRequest_Bytes{Bytes: chunk},
		})
	}
	if err != nil && err != io.EOF {
		return 0, errorOf(ctx, err)
	}
	dog.wind()
	answer, err := stream.CloseAndRecv()
	return answer.GetGeneration(), errorOf(ctx, err)
}

// FetchState brings one value back; a stream that breaks goes on where it broke.
func (c *Client) FetchState(ctx context.Context, session string, layer uint32) (*SSMState, error) {
	patient := c.patience(ctx)
	taken := &stateReception{bytesMax: c.options.FetchBytesMax}
	fruitless := 0
	for !taken.ended() {
		before := len(taken.data)
		err := c.receiveState(ctx, session, layer, taken)
		if taken.ended() {
			break
		}
		if err == nil {
			err = badAnswer("the stream ended before everything that was announced came")
		}
		if fruitless++; len(taken.data) > before {
			fruitless = 0
		}
		switch {
		case errors.Is(err, ReasonCorrupt):
			return &SSMState{}, nil
		case errors.Is(err, ReasonGeneration) && fruitless < triesMax:
			taken = &stateReception{bytesMax: taken.bytesMax} // replaced meanwhile: the new one, then
		case errors.Is(err, errDamaged) && fruitless < triesMax:
		case !pause(ctx, err, fruitless, patient):
			return nil, err
		}
	}
	header := taken.header
	return &SSMState{
		Hit: header.GetFound(),
		StateInfo: StateInfo{
			header.GetInfo().GetBoundaryTokens(), header.GetInfo().GetDescription(), header.GetInfo().GetModelId(),
		},
		Data:       taken.data,
		Generation: header.GetGeneration(),
	}, nil
}

// DropState drops one layer of a session, or all with a nil layer. Returns how many values it had.
func (c *Client) DropState(ctx context.Context, session string, layer *uint32) (uint32, error) {
	request := &pionv1.SSMStateDropRequest{Session: session, Layer: layer}
	answer, err := once(c, ctx, c.routes.state(session), c.states.Drop, request)
	return answer.GetDroppedCount(), err
}

// stateReception is a value on its way, over as many streams as it takes.
type stateReception struct {
	bytesMax uint64
	header   *pionv1.SSMStateFetchHeader
	data     []byte
}

func (r *stateReception) ended() bool {
	return r.header != nil && uint64(len(r.data)) == r.header.GetInfo().GetSizeBytes()
}

func (c *Client) receiveState(ctx context.Context, session string, layer uint32, taken *stateReception) error {
	ctx, dog, end := c.watched(ctx)
	defer end()
	request := &pionv1.SSMStateFetchRequest{
		Session: session, Layer: layer, OffsetBytes: uint64(len(taken.data)), Generation: taken.header.GetGeneration(),
	}
	stream, err := c.states.Fetch(c.Outgoing(ctx, c.routes.state(session)), request)
	if err != nil {
		return errorOf(ctx, err)
	}
	for headed := false; ; headed = true {
		dog.wind()
		message, err := stream.Recv()
		dog.stop()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return errorOf(ctx, err)
		}
		if header := message.GetHeader(); header != nil && !headed {
			err = taken.begin(header)
		} else if chunk := message.GetBytes(); chunk != nil && headed {
			err = taken.take(chunk)
		} else {
			err = badAnswer("a message came out of turn")
		}
		if err != nil {
			return err
		}
	}
}

func (r *stateReception) begin(header *pionv1.SSMStateFetchHeader) error {
	size := header.GetInfo().GetSizeBytes()
	switch {
	case !header.GetFound():
		r.header, r.data = &pionv1.SSMStateFetchHeader{}, nil
	case size > r.bytesMax:
		return badAnswer("%d bytes were announced; FetchBytesMax is %d", size, r.bytesMax)
	case r.header == nil:
		r.header, r.data = header, make([]byte, 0, size)
	case header.GetGeneration() != r.header.GetGeneration() || size != r.header.GetInfo().GetSizeBytes():
		return badAnswer("a resumed stream announces something else")
	}
	return nil
}

func (r *stateReception) take(chunk *pionv1.PartChunk) error {
	missing := cap(r.data) - len(r.data)
	if n := len(chunk.GetData()); n == 0 || n > missing || chunk.GetOffsetBytes() != uint64(len(r.data)) {
		return badAnswer("%d bytes at %d came where %d are missing from %d on",
			n, chunk.GetOffsetBytes(), missing, len(r.data))
	}
	if crcOf(chunk.GetData()) != chunk.GetCrc32C() {
		return &Error{Reason: ReasonChecksum, Message: errDamaged.Error(), cause: errDamaged}
	}
	r.data = append(r.data, chunk.GetData()...)
	return nil
}

// chunks yields data as the chunks of one part.
func chunks(data []byte, part uint32) func(yield func(*pionv1.PartChunk) bool) {
	return func(yield func(*pionv1.PartChunk) bool) {
		for offset := 0; offset < len(data); offset += wire.ChunkBytesMax {
			piece := data[offset:min(offset+wire.ChunkBytesMax, len(data))]
			chunk := &pionv1.PartChunk{
				PartIndex: part, OffsetBytes: uint64(offset), Crc32C: crcOf(piece), Data: bytes.Clone(piece),
			}
			if !yield(chunk) {
				return
			}
		}
	}
}
