package pion

import (
	"bytes"
	"hash/crc32"
	"io"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"testing"
	"time"

	"pion-grpc/clients/go/wire"
)

// pattern is rows whose bytes follow from where they are, without memory for them.
type pattern struct{ block []byte }

func (p pattern) ReadAt(into []byte, at int64) (int, error) {
	for filled := 0; filled < len(into); {
		filled += copy(into[filled:], p.block[(at+int64(filled))%int64(len(p.block)):])
	}
	return len(into), nil
}

// TestAGigabyteNeedsNoMemoryForIt runs with PION_LONG_TESTS=1.
func TestAGigabyteNeedsNoMemoryForIt(t *testing.T) {
	if os.Getenv("PION_LONG_TESTS") == "" {
		t.Skip("PION_LONG_TESTS is not set")
	}
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	client := dial(t, sharedServer(t), Options{})
	const tokens, slots, rowBytes = 32_768, 16, 1024 // 2 x 16 x 32 MiB
	request := StoreRequest{Namespace: "gigabyte", Model: "m", TokenIDs: make([]uint32, tokens)}
	want := crc32.New(wire.Castagnoli)
	for slot := range uint32(slots) {
		for _, side := range []wire.Side{wire.K, wire.V} {
			name := wire.TensorLayout{Slot: slot, Side: side}.Name()
			rows := pattern{noise("gigabyte", name, 1_000_003)}
			request.Tensors = append(request.Tensors, Tensor{
				Layout: wire.TensorLayout{Slot: slot, Side: side, Heads: 8, HeadDim: 64, DType: wire.F16},
				From:   rows,
				Bytes:  tokens * rowBytes,
			})
			if _, err := io.Copy(want, io.NewSectionReader(rows, 0, tokens*rowBytes)); err != nil {
				t.Fatal(err)
			}
		}
	}
	const most = 64 << 20
	before := heapBytes()
	measured := func(what string, work func() error) {
		begun := time.Now()
		if err := work(); err != nil {
			t.Fatal(err)
		}
		grown := int64(heapBytes()) - int64(before)
		t.Logf("%s: %.0f MB/s, the heap grew by %d MiB", what, float64(tokens*slots*2*rowBytes)/1e6/time.Since(begun).Seconds(), grown>>20)
		if grown > most {
			t.Errorf("%s: the heap grew by %d bytes", what, grown)
		}
	}
	measured("store", func() error {
		_, err := client.Store(t.Context(), request)
		return err
	})
	got := crc32.New(wire.Castagnoli)
	measured("fetch", func() error {
		_, err := client.FetchTo(t.Context(), FetchRequest{Namespace: "gigabyte"}, got, nil)
		return err
	})
	if !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
		t.Error("other bytes came back")
	}
	room := make([]byte, tokens*slots*2*rowBytes)
	clear(room)
	before = heapBytes()
	measured("fetch into the caller's buffers", func() error {
		rest := room
		_, err := client.Fetch(t.Context(), FetchRequest{Namespace: "gigabyte", Into: func(_ wire.TensorLayout, size int) (into []byte) {
			into, rest = rest[:size], rest[size:]
			return into
		}})
		return err
	})
	if crc32.Checksum(room, wire.Castagnoli) != want.Sum32() {
		t.Error("other bytes came into the buffers")
	}
}

// heapBytes is what the process has for its heap, used or not, and has not given back.
func heapBytes() uint64 {
	samples := []metrics.Sample{
		{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/heap/free:bytes"},
		{Name: "/memory/classes/heap/unused:bytes"},
	}
	metrics.Read(samples)
	total := uint64(0)
	for _, sample := range samples {
		total += sample.Value.Uint64()
	}
	return total
}
