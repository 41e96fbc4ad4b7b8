package pion

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // the codec that frames falls back on
	"google.golang.org/grpc/mem"

	"pion-grpc/clients/go/wire"
)

// frame is a message of a chunk stream in pooled memory: its bytes, framed by hand.
type frame struct{ buffer mem.Buffer }

// frames is the codec of chunk streams: frames pass as they are, anything else as protobuf.
type frames struct{ encoding.CodecV2 }

var (
	frameCodec = frames{encoding.GetCodecV2("proto")}
	framePool  = mem.NewTieredBufferPool(4<<10, 64<<10, wire.ChunkBytesMax+2*wire.FrameBytesMax)
)

func (f frames) Marshal(message any) (mem.BufferSlice, error) {
	if frame, ok := message.(*frame); ok {
		return mem.BufferSlice{frame.buffer}, nil
	}
	return f.CodecV2.Marshal(message)
}

func (f frames) Unmarshal(data mem.BufferSlice, message any) error {
	frame, ok := message.(*frame)
	if !ok {
		return f.CodecV2.Unmarshal(data, message)
	}
	frame.buffer = data.MaterializeToBuffer(framePool)
	return nil
}

// newFrame lets build append a message of at most this size to pooled memory.
func newFrame(size int, build func(to []byte) []byte) *frame {
	memory := framePool.Get(size)
	*memory = build((*memory)[:0])
	if len(*memory) > size {
		panic(fmt.Sprintf("a frame of %d bytes was announced as %d", len(*memory), size))
	}
	return &frame{mem.NewBuffer(memory, framePool)}
}

var (
	storeStream = grpc.StreamDesc{StreamName: "Store", ClientStreams: true}
	fetchStream = grpc.StreamDesc{StreamName: "Fetch", ServerStreams: true}
)

// openFrames opens a stream whose chunks are frames.
func (c *Client) openFrames(
	ctx context.Context, stream *grpc.StreamDesc, method, route string,
) (grpc.ClientStream, error) {
	return c.conn.NewStream(c.Outgoing(ctx, route), stream, method, grpc.ForceCodecV2(frameCodec))
}
