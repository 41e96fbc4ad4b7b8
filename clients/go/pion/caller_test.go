package pion

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"pion-grpc/clients/go/pionv1"
	"pion-grpc/clients/go/wire"
)

// failing is a writer whose call number `at` fails, after it has written half of what it was given.
type failing struct {
	bytes.Buffer
	calls, at int
	err       error
}

func (f *failing) Write(data []byte) (int, error) {
	if f.calls++; f.calls == f.at {
		n, _ := f.Buffer.Write(data[:len(data)/2])
		return n, f.err
	}
	return f.Buffer.Write(data)
}

// elsewhere are errors that a writer may have from another client of this package, or from gRPC: each
// of them is one that a stream of this client would go on after.
func elsewhere(t *testing.T) map[string]error {
	return map[string]error{
		"a transport's":   &Error{Reason: ReasonUnavailable, Message: "another server", FromTransport: true},
		"a damaged chunk": &Error{Reason: ReasonChecksum, Message: "another chunk", cause: errDamaged},
		"a generation":    &Error{Reason: ReasonGeneration, Message: "another prefix"},
		"a miss":          &Error{Reason: ReasonNotStored, Message: "another miss"},
		"wrapped":         fmt.Errorf("mirror: %w", &Error{Reason: ReasonDraining, RetryAfter: time.Millisecond}),
		"gRPC's":          status.Error(codes.Unavailable, "another call"),
		"the end":         io.EOF,
	}
}

func TestNoErrorOfTheCallersCodeIsTakenForTheStreams(t *testing.T) {
	address := sharedServer(t)
	client := dial(t, address, Options{})
	request := sample("callers", wire.F32, 9_000) // several chunks in each tensor
	mustStore(t, client, request)
	fetched := FetchRequest{Namespace: "callers", PartKinds: []string{"state"}}
	var whole bytes.Buffer
	counting := &failing{}
	if _, err := client.FetchTo(t.Context(), fetched, io.MultiWriter(&whole, counting), nil); err != nil {
		t.Fatal(err)
	}
	for what, own := range elsewhere(t) {
		for _, at := range []int{1, 2, counting.calls} {
			w := &failing{at: at, err: own}
			prefix, err := client.FetchTo(t.Context(), fetched, w, nil)
			if err != own || prefix != nil {
				t.Errorf("%s, write %d: %+v, %v", what, at, prefix, err)
			}
			if w.calls != at || !bytes.HasPrefix(whole.Bytes(), w.Bytes()) {
				t.Errorf("%s, write %d: %d writes, of other bytes", what, at, w.calls)
			}
		}
		begun := 0
		_, err := client.FetchTo(t.Context(), fetched, io.Discard, func(*Prefix) error {
			begun++
			return own
		})
		if err != own || begun != 1 {
			t.Errorf("%s: begun %d times, %v", what, begun, err)
		}
		for _, last := range []bool{false, true} {
			fetched := fetched
			fetched.Progress = func(done, total uint64) error {
				if !last || done == total {
					return own
				}
				return nil
			}
			if prefix, err := client.Fetch(t.Context(), fetched); err != own || prefix != nil {
				t.Errorf("%s, progress, the last %v: %+v, %v", what, last, prefix, err)
			}
		}
		reads := 0
		request := sample("never", wire.F32, 100)
		request.Tensors[1].From, request.Tensors[1].Bytes = readerAt(func([]byte, int64) (int, error) {
			reads++
			return 0, own
		}), int64(len(request.Tensors[1].Data))
		want := own
		if own == io.EOF {
			want = io.ErrUnexpectedEOF
		}
		if _, err := client.Store(t.Context(), request); err != want || reads != 1 {
			t.Errorf("%s: read %d times, %v", what, reads, err)
		}
	}
	if prefix := mustFetch(t, client, FetchRequest{Namespace: "never"}); prefix.Hit {
		t.Error("what could not be read was stored")
	}
}

type readerAt func(data []byte, at int64) (int, error)

func (r readerAt) ReadAt(data []byte, at int64) (int, error) { return r(data, at) }

func TestAWriterThatTakesLessIsNotTakenForOneThatTookAll(t *testing.T) {
	client := dial(t, sharedServer(t), Options{})
	mustStore(t, client, sample("lazy", wire.F32, 100))
	lazy := &failing{at: 1} // half of the first chunk, and no word about it
	if prefix, err := client.FetchTo(t.Context(), FetchRequest{Namespace: "lazy"}, lazy, nil); !errors.Is(err, io.ErrShortWrite) {
		t.Errorf("%+v, %v", prefix, err)
	}
}

func TestTheCallersOwnTimeIsNoStall(t *testing.T) {
	const stall = 300 * time.Millisecond
	client := dial(t, sharedServer(t), Options{StallTimeout: stall})
	request := sample("slowly", wire.F32, 9_000)
	data := request.Tensors[0].Data
	reads := 0
	slow := request
	slow.Tensors = append([]Tensor{}, request.Tensors...)
	slow.Tensors[0].Bytes = int64(len(data))
	slow.Tensors[0].From = readerAt(func(into []byte, at int64) (int, error) {
		if reads++; reads <= 2 { // before anything was sent, and between two chunks
			<-time.After(2 * stall)
		}
		return copy(into, data[at:]), nil
	})
	mustStore(t, client, slow)
	if reads < 2 {
		t.Fatalf("only %d reads", reads)
	}
	paused := 0
	same(t, mustFetch(t, client, FetchRequest{Namespace: "slowly", PartKinds: []string{"state"}, Progress: func(_, _ uint64) error {
		if paused++; paused <= 2 {
			<-time.After(2 * stall)
		}
		return nil
	}}), request)
}

func TestAResumedFetchDoesNotSayWhatItCannotKnow(t *testing.T) {
	server := &scripted{}
	server.fetch = func(attempt int, _ *pionv1.PrefixStoreFetchRequest, stream pionv1.PrefixStore_FetchServer) error {
		if attempt > 1 { // another node, which never had it
			return stream.Send(headed(&pionv1.PrefixStoreFetchHeader{}))
		}
		err := errors.Join(stream.Send(headed(announcement())), stream.Send(rowsOf(0, 0, 10)))
		return errors.Join(err, status.Error(codes.Unavailable, "the node died"))
	}
	_, err := dial(t, server.start(t), Options{}).FetchTo(t.Context(), FetchRequest{Namespace: "n"}, io.Discard, nil)
	if !errors.Is(err, ReasonGeneration) || !bytes.Contains([]byte(err.Error()), []byte("another node")) {
		t.Error(err)
	}
}

// cancelling is a writer that ends the context of the fetch.
type cancelling struct {
	writes int
	cancel context.CancelFunc
}

func (c *cancelling) Write(data []byte) (int, error) {
	c.writes++
	c.cancel()
	return len(data), nil
}

func TestWhatHasArrivedIsNotWrittenAfterTheEndOfTheContext(t *testing.T) {
	client := dial(t, sharedServer(t), Options{})
	mustStore(t, client, sample("canceled", wire.F32, 40_000)) // ten chunks
	for range 20 {
		ctx, cancel := context.WithCancel(t.Context())
		w := &cancelling{cancel: cancel}
		_, err := client.FetchTo(ctx, FetchRequest{Namespace: "canceled"}, w, nil)
		if !errors.Is(err, ReasonCanceled) || w.writes != 1 {
			t.Fatalf("%d writes, %v", w.writes, err)
		}
	}
}
