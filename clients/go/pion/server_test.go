package pion

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"pion-grpc/clients/go/internal/realserver"
	"pion-grpc/clients/go/wire"
)

const (
	sampleHeads, sampleHeadDim, sampleSlots = 2, 16, 2
	sampleModel                             = "mlx1:00000000000000000000000000000000"
)

// startServer starts a real server with a directory of its own; it ends with the test.
func startServer(t testing.TB, flags ...string) (address string) {
	t.Helper()
	return realserver.Start(t, flags...)
}

// shared is the server of tests that use names of their own.
var shared struct {
	once    sync.Once
	address string
}

func sharedServer(t *testing.T) string {
	t.Helper()
	shared.once.Do(func() { shared.address = startServer(mainTB) })
	if shared.address == "" {
		t.Fatal("the server did not start")
	}
	return shared.address
}

// mainTB ends what it started after the last test.
var mainTB = &untilTheEnd{}

type untilTheEnd struct {
	testing.TB
	cleanups []func()
	failed   bool
}

func TestMain(m *testing.M) {
	status := m.Run()
	for _, cleanup := range slices.Backward(mainTB.cleanups) {
		cleanup()
	}
	if mainTB.failed && status == 0 {
		status = 1
	}
	os.Exit(status)
}

func (u *untilTheEnd) Helper()          {}
func (u *untilTheEnd) Cleanup(f func()) { u.cleanups = append(u.cleanups, f) }
func (u *untilTheEnd) Fatal(values ...any) {
	panic(fmt.Sprint(values...))
}
func (u *untilTheEnd) Fatalf(format string, values ...any) { panic(fmt.Sprintf(format, values...)) }
func (u *untilTheEnd) Errorf(format string, values ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", values...)
	u.failed = true
}

func dial(t testing.TB, address string, options Options) *Client {
	t.Helper()
	client, err := Dial(address, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

// noise is the bytes of something of a sample, as testdata/peer.py makes them.
func noise(name, what string, size int) []byte {
	data := make([]byte, 0, size+sha256.Size)
	for counter := 0; len(data) < size; counter++ {
		sum := sha256.Sum256(fmt.Appendf(nil, "%s|%s|%d", name, what, counter))
		data = append(data, sum[:]...)
	}
	return data[:size]
}

// sample is a prefix whose bytes follow from its name.
func sample(name string, dtype wire.DType, tokens int) StoreRequest {
	request := StoreRequest{Namespace: name, Model: sampleModel, TokenIDs: make([]uint32, tokens)}
	for i := range request.TokenIDs {
		request.TokenIDs[i] = uint32(i)
	}
	for slot := range uint32(sampleSlots) {
		for _, side := range []wire.Side{wire.K, wire.V} {
			layout := wire.TensorLayout{Slot: slot, Side: side, Heads: sampleHeads, HeadDim: sampleHeadDim, DType: dtype}
			data := noise(name, layout.Name(), tokens*layout.RowBytes())
			request.Tensors = append(request.Tensors, Tensor{Layout: layout, Data: data})
		}
	}
	info := PartInfo{Kind: "state", Slot: 1, BoundaryTokens: uint64(tokens), Description: "a state"}
	request.Parts = []Part{{PartInfo: info, Data: noise(name, "part", 1_500_000)}}
	return request
}

// extending returns a sample's rows from base on, as a child.
func extending(request StoreRequest, parent string, base int) StoreRequest {
	request.Parent, request.Base = parent, uint64(base)
	for i := range request.Tensors {
		tensor := &request.Tensors[i]
		tensor.Data = tensor.Data[base*tensor.Layout.RowBytes():]
	}
	return request
}

func mustStore(t testing.TB, client *Client, request StoreRequest) Stored {
	t.Helper()
	stored, err := client.Store(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	return stored
}

func mustFetch(t testing.TB, client *Client, request FetchRequest) *Prefix {
	t.Helper()
	prefix, err := client.Fetch(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	return prefix
}

// same holds what came against what was stored, row for row.
func same(t testing.TB, prefix *Prefix, stored StoreRequest) {
	t.Helper()
	if !prefix.Hit {
		t.Fatalf("a miss: %v", prefix.Reason)
	}
	if len(prefix.Tensors) != len(stored.Tensors) {
		t.Fatalf("%d tensors came, not %d", len(prefix.Tensors), len(stored.Tensors))
	}
	for i, tensor := range prefix.Tensors {
		unit := uint64(tensor.Layout.RowBytes())
		want := stored.Tensors[i].Data[prefix.Begin*unit : prefix.End*unit]
		if !bytes.Equal(tensor.Data, want) {
			t.Errorf("%s of %s has other bytes", tensor.Layout.Name(), prefix.Info.Namespace)
		}
	}
	for i, part := range prefix.Parts {
		if !bytes.Equal(part.Data, stored.Parts[i].Data) {
			t.Errorf("part %d of %s has other bytes", i, prefix.Info.Namespace)
		}
	}
}

// link is a TCP connection that breaks: each passes on so many bytes of answers, then both ends are cut.
type link struct {
	address string
	opened  atomic.Int64
	broken  atomic.Int64
	// limit returns how many bytes connection number n (from 0) passes on; below 0: all.
	limit func(n int64) int64
	// onBreak is called before a connection is cut, if not nil.
	onBreak func(n int64)
	// flips returns where in the answers of a connection one bit is wrong, if not nil; below 0: nowhere.
	flips func(n int64) int64
	// silent links pass nothing on, in either direction, and close nothing.
	silent atomic.Bool
}

// hushed is a writer on a link.
type hushed struct {
	io.Writer
	silent *atomic.Bool
}

func (h hushed) Write(data []byte) (int, error) {
	if h.silent.Load() {
		return len(data), nil
	}
	return h.Writer.Write(data)
}

// flipping is a reader with one wrong bit.
type flipping struct {
	io.Reader
	at int64
}

func (f *flipping) Read(into []byte) (int, error) {
	n, err := f.Reader.Read(into)
	if f.at >= 0 && f.at < int64(n) {
		into[f.at] ^= 1 << (f.at % 8)
	}
	f.at -= int64(n)
	return n, err
}

func startLink(t testing.TB, to string, l *link) *link {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.address = listener.Addr().String()
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", to)
			if err != nil {
				near.Close()
				continue
			}
			serving.Go(func() { l.serve(near, far) })
		}
	})
	t.Cleanup(func() {
		listener.Close()
		serving.Wait()
	})
	return l
}

func (l *link) serve(near, far net.Conn) {
	number := l.opened.Add(1) - 1
	done := make(chan struct{})
	go func() {
		io.Copy(hushed{far, &l.silent}, near)
		far.Close()
		close(done)
	}()
	limit := int64(-1)
	if l.limit != nil {
		limit = l.limit(number)
	}
	answers := io.Reader(far)
	if l.flips != nil {
		answers = &flipping{far, l.flips(number)}
	}
	down := hushed{near, &l.silent}
	if limit < 0 {
		io.Copy(down, answers)
	} else if _, err := io.CopyN(down, answers, limit); err == nil {
		l.broken.Add(1)
		if l.onBreak != nil {
			l.onBreak(number)
		}
	}
	near.Close()
	far.Close()
	<-done
}

// peer runs the Python client.
func peer(t testing.TB, arguments ...string) string {
	t.Helper()
	script := filepath.Join("testdata", "peer.py")
	command := exec.CommandContext(context.Background(), realserver.Tool(t, "python"), append([]string{script}, arguments...)...)
	var errors bytes.Buffer
	command.Stderr = &errors
	output, err := command.Output()
	if err != nil {
		t.Fatalf("peer.py %v: %v\n%s", arguments, err, errors.String())
	}
	return string(output)
}
