package pion

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"pion-grpc/clients/go/pionv1"
	"pion-grpc/clients/go/wire"
)

// scripted is a server that answers as a test says, and notes what it was asked.
type scripted struct {
	pionv1.UnimplementedPrefixStoreServer
	fetch  func(attempt int, request *pionv1.PrefixStoreFetchRequest, stream pionv1.PrefixStore_FetchServer) error
	lookup func(ctx context.Context, attempt int) (*pionv1.PrefixStoreLookupResponse, error)
	store  func(attempt int, stream pionv1.PrefixStore_StoreServer) error

	mutex    sync.Mutex
	attempts int
	asked    []metadata.MD
}

func (s *scripted) count(ctx context.Context) int {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	sent, _ := metadata.FromIncomingContext(ctx)
	s.asked = append(s.asked, sent)
	s.attempts++
	return s.attempts
}

func (s *scripted) Fetch(request *pionv1.PrefixStoreFetchRequest, stream pionv1.PrefixStore_FetchServer) error {
	return s.fetch(s.count(stream.Context()), request, stream)
}

func (s *scripted) Lookup(ctx context.Context, _ *pionv1.PrefixStoreLookupRequest) (*pionv1.PrefixStoreLookupResponse, error) {
	return s.lookup(ctx, s.count(ctx))
}

func (s *scripted) Store(stream pionv1.PrefixStore_StoreServer) error {
	return s.store(s.count(stream.Context()), stream)
}

func (s *scripted) start(t *testing.T) (address string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	pionv1.RegisterPrefixStoreServer(server, s)
	var serving sync.WaitGroup
	serving.Go(func() { server.Serve(listener) })
	t.Cleanup(func() {
		server.Stop()
		serving.Wait()
	})
	return listener.Addr().String()
}

// ours is a status as the server sends it.
func ours(t *testing.T, code codes.Code, reason Reason, retry time.Duration) error {
	t.Helper()
	state := status.New(code, "said "+string(reason))
	state, err := state.WithDetails(&errdetails.ErrorInfo{Domain: errorDomain, Reason: string(reason)})
	if err == nil && retry > 0 {
		state, err = state.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(retry)})
	}
	if err != nil {
		t.Fatal(err)
	}
	return state.Err()
}

// Two tensors of ten rows of 8 bytes, and a part of 5 bytes.
func announcement() *pionv1.PrefixStoreFetchHeader {
	layout := &pionv1.Layout{}
	for _, side := range []pionv1.Side{pionv1.Side_SIDE_K, pionv1.Side_SIDE_V} {
		layout.Tensors = append(layout.Tensors, &pionv1.TensorLayout{
			Side: side, Heads: 2, HeadDim: 2, DataType: pionv1.DataType_DATA_TYPE_F16, Codec: "raw",
		})
	}
	parts := []*pionv1.PartInfo{{Kind: "state", BoundaryTokens: 10, SizeBytes: 5}}
	return &pionv1.PrefixStoreFetchHeader{
		Found:      true,
		Prefix:     &pionv1.PrefixInfo{Namespace: "n", Generation: 7, TokenCount: 10, Layout: layout},
		Layout:     layout,
		Rows:       &pionv1.RowRange{End: 10},
		TotalBytes: 165,
		TokenIds:   make([]byte, 40),
		Parts:      parts,
	}
}

func headed(header *pionv1.PrefixStoreFetchHeader) *pionv1.PrefixStoreFetchResponse {
	return &pionv1.PrefixStoreFetchResponse{Message: &pionv1.PrefixStoreFetchResponse_Header{Header: header}}
}

func rowsOf(tensor uint32, first, count int) *pionv1.PrefixStoreFetchResponse {
	data := noise("scripted", string(rune('a'+tensor)), 80)[8*first : 8*(first+count)]
	return &pionv1.PrefixStoreFetchResponse{Message: &pionv1.PrefixStoreFetchResponse_Rows{Rows: &pionv1.RowChunk{
		TensorIndex: tensor, FirstRow: uint64(first), RowCount: uint32(count), Crc32C: crcOf(data), Data: data,
	}}}
}

func partOf(offset, count int) *pionv1.PrefixStoreFetchResponse {
	data := []byte("state")[offset : offset+count]
	return &pionv1.PrefixStoreFetchResponse{Message: &pionv1.PrefixStoreFetchResponse_Part{Part: &pionv1.PartChunk{
		OffsetBytes: uint64(offset), Crc32C: crcOf(data), Data: data,
	}}}
}

type messages = []*pionv1.PrefixStoreFetchResponse

func (s *scripted) sends(m ...*pionv1.PrefixStoreFetchResponse) *scripted {
	s.fetch = func(_ int, _ *pionv1.PrefixStoreFetchRequest, stream pionv1.PrefixStore_FetchServer) error {
		for _, message := range m {
			if err := stream.Send(message); err != nil {
				return err
			}
		}
		return nil
	}
	return s
}

func TestAStreamThatContradictsItselfIsRefused(t *testing.T) {
	with := func(change func(*pionv1.PrefixStoreFetchHeader)) messages {
		header := announcement()
		change(header)
		return messages{headed(header), rowsOf(0, 0, 10), rowsOf(1, 0, 10), partOf(0, 5)}
	}
	altered := func(message *pionv1.PrefixStoreFetchResponse, change func(*pionv1.RowChunk)) *pionv1.PrefixStoreFetchResponse {
		change(message.GetRows())
		return message
	}
	good := headed(announcement())
	type header = pionv1.PrefixStoreFetchHeader
	for what, sent := range map[string]messages{
		"nothing":                    {},
		"an empty message":           {{}},
		"rows before the header":     {rowsOf(0, 0, 10)},
		"two headers":                {good, good},
		"a stream that is short":     {good, rowsOf(0, 0, 10)},
		"rows twice":                 {good, rowsOf(0, 0, 5), rowsOf(0, 0, 5)},
		"rows left out":              {good, rowsOf(0, 0, 5), rowsOf(0, 6, 4)},
		"the second tensor first":    {good, rowsOf(1, 0, 10)},
		"the part first":             {good, partOf(0, 5)},
		"the part's end first":       {good, rowsOf(0, 0, 10), rowsOf(1, 0, 10), partOf(2, 3)},
		"more than was announced":    {good, rowsOf(0, 0, 10), rowsOf(1, 0, 10), partOf(0, 5), rowsOf(0, 0, 10)},
		"another count than data":    {good, altered(rowsOf(0, 0, 5), func(c *pionv1.RowChunk) { c.RowCount = 6 })},
		"another array":              {good, altered(rowsOf(0, 0, 5), func(c *pionv1.RowChunk) { c.ArrayIndex = 1 })},
		"half a row":                 {good, altered(rowsOf(0, 0, 5), func(c *pionv1.RowChunk) { c.Data = c.Data[:36]; c.RowCount = 4; c.Crc32C = crcOf(c.Data) })},
		"no data":                    {good, altered(rowsOf(0, 0, 5), func(c *pionv1.RowChunk) { c.Data = nil })},
		"another total":              with(func(h *header) { h.TotalBytes++ }),
		"rows backwards":             with(func(h *header) { h.Rows.Begin = 11 }),
		"more rows than there are":   with(func(h *header) { h.Rows.End = 1 << 40; h.TokenIds = nil }),
		"ids of another prefix":      with(func(h *header) { h.TokenIds = h.TokenIds[:36] }),
		"ids that are cut":           with(func(h *header) { h.TokenIds = h.TokenIds[:39] }),
		"a part beyond all measure":  with(func(h *header) { h.Parts[0].SizeBytes = 1 << 60 }),
		"a layout out of order":      with(func(h *header) { h.Layout.Tensors[0], h.Layout.Tensors[1] = h.Layout.Tensors[1], h.Layout.Tensors[0] }),
		"a row beyond all measure":   with(func(h *header) { h.Layout.Tensors[0].HeadDim = 1 << 31 }),
		"a type that nobody knows":   with(func(h *header) { h.Layout.Tensors[0].DataType = 9 }),
		"more than the client wants": with(func(h *header) { h.Parts[0].SizeBytes = 2000; h.TotalBytes = 2160 }),
	} {
		t.Run(what, func(t *testing.T) {
			server := new(scripted).sends(sent...)
			client := dial(t, server.start(t), Options{FetchBytesMax: 1000})
			prefix, err := client.Fetch(t.Context(), FetchRequest{Namespace: "n", PartKinds: []string{"state"}})
			// A stream with one chunk too many has all that was announced: only its end is bad.
			if what == "more than was announced" {
				if err != nil || !prefix.Hit || string(prefix.Parts[0].Data) != "state" {
					t.Errorf("%+v, %v", prefix, err)
				}
			} else if !errors.Is(err, ReasonBadAnswer) || prefix != nil {
				t.Errorf("%+v, %v", prefix, err)
			} else if strings.Contains(err.Error(), "ended before") != (what == "nothing" || what == "a stream that is short") {
				t.Errorf("it was refused only because %v", err) // the contradiction itself was not noticed
			}
			if server.attempts != 1 {
				t.Errorf("it was asked for %d times", server.attempts)
			}
		})
	}
}

func TestALossyCodecIsNotTakenForValues(t *testing.T) {
	header := announcement()
	header.Layout.Tensors[0].Codec = "int8"
	client := dial(t, new(scripted).sends(headed(header)).start(t), Options{})
	if _, err := client.Fetch(t.Context(), FetchRequest{Namespace: "n"}); !errors.Is(err, ReasonUnsupported) {
		t.Error(err)
	}
}

func TestADamagedChunkIsAskedForAgainAndThenRefused(t *testing.T) {
	for _, damaged := range []int{1, 100} {
		server := &scripted{}
		server.fetch = func(attempt int, request *pionv1.PrefixStoreFetchRequest, stream pionv1.PrefixStore_FetchServer) error {
			if request.GetResumeTensorIndex() == 0 {
				if err := errors.Join(stream.Send(headed(announcement())), stream.Send(rowsOf(0, 0, 10))); err != nil {
					return err
				}
			} else if err := stream.Send(headed(announcement())); err != nil {
				return err
			}
			if attempt > 1 && (request.GetResumeTensorIndex() != 1 || request.GetResumeRow() != 0 || request.GetGeneration() != 7) {
				t.Errorf("it was resumed with %v", request)
			}
			second := rowsOf(1, 0, 10)
			if attempt <= damaged {
				second.GetRows().Data[3] ^= 4
			}
			return errors.Join(stream.Send(second), stream.Send(partOf(0, 2)), stream.Send(partOf(2, 3)))
		}
		client := dial(t, server.start(t), Options{})
		prefix, err := client.Fetch(t.Context(), FetchRequest{Namespace: "n"})
		if damaged == 1 {
			if err != nil || !bytes.Equal(prefix.Tensors[1].Data, rowsOf(1, 0, 10).GetRows().Data) || string(prefix.Parts[0].Data) != "state" {
				t.Errorf("%+v, %v", prefix, err)
			}
		} else if !errors.Is(err, ReasonChecksum) || prefix != nil || server.attempts != 1+triesMax {
			t.Errorf("%v after %d attempts", err, server.attempts)
		}
	}
}

func TestAResumedStreamThatIsAnotherIsRefused(t *testing.T) {
	for what, change := range map[string]func(*pionv1.PrefixStoreFetchHeader){
		"generation": func(h *pionv1.PrefixStoreFetchHeader) { h.Prefix.Generation = 8 },
		"layout":     func(h *pionv1.PrefixStoreFetchHeader) { h.Layout.Tensors[1].DataType = pionv1.DataType_DATA_TYPE_BF16 },
		"parts":      func(h *pionv1.PrefixStoreFetchHeader) { h.Parts[0].Description = "another" },
		"rows":       func(h *pionv1.PrefixStoreFetchHeader) { h.Rows.End = 9 },
	} {
		server := &scripted{}
		server.fetch = func(attempt int, _ *pionv1.PrefixStoreFetchRequest, stream pionv1.PrefixStore_FetchServer) error {
			header := announcement()
			if attempt > 1 {
				change(header)
				return errors.Join(stream.Send(headed(header)), stream.Send(rowsOf(1, 0, 10)), stream.Send(partOf(0, 5)))
			}
			err := errors.Join(stream.Send(headed(header)), stream.Send(rowsOf(0, 0, 10)))
			return errors.Join(err, status.Error(codes.Unavailable, "a proxy's backend died"))
		}
		client := dial(t, server.start(t), Options{})
		if prefix, err := client.Fetch(t.Context(), FetchRequest{Namespace: "n"}); !errors.Is(err, ReasonBadAnswer) {
			t.Errorf("%s: %+v, %v", what, prefix, err)
		}
	}
}

// impatient is a client whose server has been away for long.
func impatient(t *testing.T, address string, options Options) *Client {
	t.Helper()
	client := dial(t, address, options)
	long := time.Now().Add(-time.Hour)
	client.away.since.Store(&long)
	return client
}

func TestOnlyWhatIsSafeIsAskedAgain(t *testing.T) {
	found := &pionv1.PrefixStoreLookupResponse{Results: []*pionv1.PrefixStoreLookupResponse_Result{{Hit: true}}}
	for _, c := range []struct {
		what     string
		err      error
		attempts int
	}{
		{"unavailable", status.Error(codes.Unavailable, "no route"), triesMax},
		{"a proxy's internal", status.Error(codes.Internal, "RST_STREAM"), triesMax},
		{"a proxy's cancelled", status.Error(codes.Canceled, "reset"), triesMax},
		{"draining", ours(t, codes.Unavailable, ReasonDraining, time.Millisecond), triesMax},
		{"too many streams", ours(t, codes.ResourceExhausted, ReasonTooManyStreams, time.Millisecond), triesMax},
		{"the server's own fault", ours(t, codes.Internal, ReasonInternal, 0), 1},
		{"over budget", ours(t, codes.ResourceExhausted, ReasonBudget, 0), 1},
		{"a proxy's refusal", status.Error(codes.PermissionDenied, "no"), 1},
	} {
		server := &scripted{lookup: func(context.Context, int) (*pionv1.PrefixStoreLookupResponse, error) { return nil, c.err }}
		client := impatient(t, server.start(t), Options{})
		_, err := client.Lookup(t.Context(), LookupRequest{Namespace: "n"})
		var failed *Error
		if !errors.As(err, &failed) || server.attempts != c.attempts {
			t.Errorf("%s: asked %d times, %v", c.what, server.attempts, err)
		}
		if _, isOurs := status.Convert(c.err).Details(), len(status.Convert(c.err).Details()) > 0; isOurs == failed.FromTransport {
			t.Errorf("%s: FromTransport is %v", c.what, failed.FromTransport)
		}
	}
	server := &scripted{lookup: func(_ context.Context, attempt int) (*pionv1.PrefixStoreLookupResponse, error) {
		if attempt < triesMax+2 {
			return nil, status.Error(codes.Unavailable, "restarting")
		}
		return found, nil
	}}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if lookup, err := dial(t, server.start(t), Options{}).Lookup(ctx, LookupRequest{Namespace: "n"}); err != nil || !lookup.Hit {
		t.Errorf("a caller with time was not waited for: %v", err)
	}
}

func TestAServerIsWaitedForWhileItIsRestarted(t *testing.T) {
	listen := func(address string) (net.Listener, *grpc.Server) {
		listener, err := net.Listen("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		server := grpc.NewServer()
		pionv1.RegisterPrefixStoreServer(server, &scripted{
			lookup: func(context.Context, int) (*pionv1.PrefixStoreLookupResponse, error) {
				return &pionv1.PrefixStoreLookupResponse{Results: []*pionv1.PrefixStoreLookupResponse_Result{{Hit: true}}}, nil
			},
			store: func(_ int, stream pionv1.PrefixStore_StoreServer) error {
				return stream.SendAndClose(&pionv1.PrefixStoreStoreResponse{Namespace: "n"})
			},
		})
		go server.Serve(listener)
		return listener, server
	}
	listener, server := listen("127.0.0.1:0")
	address := listener.Addr().String()
	client := dial(t, address, Options{Timeout: time.Minute})
	if _, err := client.Lookup(t.Context(), LookupRequest{Namespace: "n"}); err != nil {
		t.Fatal(err)
	}
	server.Stop()
	strange := dial(t, address, Options{Timeout: time.Minute}) // nobody has answered it, ever
	var waiting sync.WaitGroup
	waiting.Go(func() {
		if found, err := client.Lookup(t.Context(), LookupRequest{Namespace: "n"}); err != nil || !found.Hit {
			t.Errorf("lookup: %v", err)
		}
	})
	waiting.Go(func() {
		if _, err := client.Store(t.Context(), sample("n", wire.F16, 10)); err != nil {
			t.Errorf("store: %v", err)
		}
	})
	waiting.Go(func() {
		if found, err := strange.Lookup(t.Context(), LookupRequest{Namespace: "n"}); err != nil || !found.Hit {
			t.Errorf("lookup of a client that is new: %v", err)
		}
	})
	for range 3 { // longer than all tries take
		if _, err := impatient(t, address, Options{}).Fetch(t.Context(), FetchRequest{Namespace: "n"}); !errors.Is(err, ReasonUnavailable) {
			t.Error(err)
		}
	}
	_, server = listen(address)
	defer server.Stop()
	waiting.Wait()
}

func TestAServerThatStaysAwayIsNotWaitedForAgainAndAgain(t *testing.T) {
	var back atomic.Bool
	s := scripted{fetch: func(int, *pionv1.PrefixStoreFetchRequest, pionv1.PrefixStore_FetchServer) error {
		if back.Load() {
			return ours(t, codes.Internal, ReasonInternal, 0)
		}
		return status.Error(codes.Unavailable, "a proxy's word")
	}}
	client := dial(t, s.start(t), Options{Timeout: 200 * time.Millisecond})
	asked := func() int {
		s.mutex.Lock()
		defer s.mutex.Unlock()
		return s.attempts
	}
	for i := range 3 {
		before := asked()
		if _, err := client.Fetch(t.Context(), FetchRequest{Namespace: "n"}); !errors.Is(err, ReasonUnavailable) {
			t.Fatal(err)
		}
		if tries := asked() - before; i > 0 && tries != triesMax {
			t.Errorf("it was asked %d times", tries)
		}
	}
	back.Store(true)
	if _, err := client.Fetch(t.Context(), FetchRequest{Namespace: "n"}); !errors.Is(err, ReasonInternal) {
		t.Fatal(err)
	}
	if away := client.away.lasted(); away != 0 {
		t.Errorf("it has answered, and is away for %v", away)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	client.Fetch(ended, FetchRequest{Namespace: "n"})
	if away := client.away.lasted(); away != 0 {
		t.Errorf("its caller has ended the call, and it is away for %v", away)
	}
}

func TestAClosedClientIsNotWaitedFor(t *testing.T) {
	begun := make(chan struct{})
	server := &scripted{fetch: func(_ int, _ *pionv1.PrefixStoreFetchRequest, stream pionv1.PrefixStore_FetchServer) error {
		close(begun)
		<-stream.Context().Done()
		return stream.Context().Err()
	}}
	client := dial(t, server.start(t), Options{})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	failed := make(chan error)
	go func() {
		_, err := client.Fetch(ctx, FetchRequest{Namespace: "n"})
		failed <- err
	}()
	<-begun
	client.Close()
	if err := <-failed; !errors.Is(err, ReasonClosed) {
		t.Errorf("during a call: %v", err)
	}
	if _, err := client.Lookup(ctx, LookupRequest{Namespace: "n"}); !errors.Is(err, ReasonClosed) || ctx.Err() != nil {
		t.Errorf("after it: %v", err)
	}
}

func TestTheSharedStatusesKeepTheirReasons(t *testing.T) {
	var known struct {
		Statuses []struct {
			Name, Status string
			Reason       *Reason
			Metadata     map[string]string
			RetryMS      *int64 `json:"retry_ms"`
		}
	}
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "tests", "vectors", "errors.json"))
	if err != nil || json.Unmarshal(text, &known) != nil || len(known.Statuses) == 0 {
		t.Fatalf("no vectors: %v", err)
	}
	for _, v := range known.Statuses {
		data, err := hex.DecodeString(v.Status)
		if err != nil {
			t.Fatal(err)
		}
		said := new(spb.Status)
		if proto.Unmarshal(data, said) != nil { // gRPC then makes the status from code and message alone
			said = &spb.Status{Code: int32(codes.Internal)}
		}
		if said.GetCode() == 0 {
			said.Code = int32(codes.Internal)
		}
		var failed *Error
		if !errors.As(errorOf(t.Context(), status.FromProto(said).Err()), &failed) {
			t.Fatalf("%s: no error", v.Name)
		}
		if failed.FromTransport != (v.Reason == nil) {
			t.Errorf("%s: FromTransport is %v", v.Name, failed.FromTransport)
		}
		if v.Reason == nil {
			continue
		}
		retry := int64(0)
		if v.RetryMS != nil {
			retry = *v.RetryMS
		}
		if failed.Reason != *v.Reason || failed.RetryAfter.Milliseconds() != retry || len(failed.Metadata) != len(v.Metadata) {
			t.Errorf("%s: %#v", v.Name, failed)
		}
		for key, value := range v.Metadata {
			if failed.Metadata[key] != value {
				t.Errorf("%s: %s is %q", v.Name, key, failed.Metadata[key])
			}
		}
	}
}

func TestAStoreIsRepeatedOnlyIfTheTransportFailed(t *testing.T) {
	request := sample("again", wire.F16, 10)
	for _, c := range []struct {
		err      error
		attempts int
	}{
		{status.Error(codes.Unavailable, "no route"), triesMax},
		{ours(t, codes.ResourceExhausted, ReasonBudget, 0), 1},
		{ours(t, codes.Aborted, ReasonConflict, 0), 1},
		{ours(t, codes.ResourceExhausted, ReasonTooManyStreams, time.Millisecond), 1},
	} {
		server := &scripted{store: func(int, pionv1.PrefixStore_StoreServer) error { return c.err }}
		if _, err := impatient(t, server.start(t), Options{}).Store(t.Context(), request); err == nil || server.attempts != c.attempts {
			t.Errorf("%v: sent %d times, %v", c.err, server.attempts, err)
		}
	}
	early := &scripted{store: func(_ int, stream pionv1.PrefixStore_StoreServer) error {
		return stream.SendAndClose(&pionv1.PrefixStoreStoreResponse{Namespace: "again", AlreadyStored: true})
	}}
	big := sample("again", wire.F32, 50_000)
	if stored, err := dial(t, early.start(t), Options{}).Store(t.Context(), big); err != nil || !stored.AlreadyStored {
		t.Errorf("an early answer: %+v, %v", stored, err)
	}
}

func TestACallThatIsNotAnsweredEndsInTime(t *testing.T) {
	hang := func(ctx context.Context) error {
		<-ctx.Done()
		return ctx.Err()
	}
	server := &scripted{
		lookup: func(ctx context.Context, _ int) (*pionv1.PrefixStoreLookupResponse, error) { return nil, hang(ctx) },
		fetch: func(_ int, _ *pionv1.PrefixStoreFetchRequest, stream pionv1.PrefixStore_FetchServer) error {
			return errors.Join(stream.Send(headed(announcement())), hang(stream.Context()))
		},
		store: func(_ int, stream pionv1.PrefixStore_StoreServer) error { return hang(stream.Context()) },
	}
	client := dial(t, server.start(t), Options{Timeout: 100 * time.Millisecond, StallTimeout: 100 * time.Millisecond})
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, ownDeadline := client.Lookup(ctx, LookupRequest{Namespace: "n"})
	_, clients := client.Lookup(t.Context(), LookupRequest{Namespace: "n"})
	_, stalledFetch := client.Fetch(t.Context(), FetchRequest{Namespace: "n"})
	_, stalledStore := client.Store(t.Context(), sample("n", wire.F32, 60_000))
	for i, err := range []error{ownDeadline, clients, stalledFetch, stalledStore} {
		if !errors.Is(err, ReasonDeadlineExceeded) {
			t.Errorf("%d: %v", i, err)
		}
	}
	if !errors.Is(ownDeadline, context.DeadlineExceeded) {
		t.Errorf("%v is not the context's", ownDeadline)
	}
	ctx, cancel = context.WithCancel(t.Context())
	_, err := client.Fetch(ctx, FetchRequest{Namespace: "n", Progress: func(_, _ uint64) error { return nil }})
	cancel()
	if err == nil {
		t.Error("nothing was an answer")
	}
	if _, err = client.Lookup(ctx, LookupRequest{Namespace: "n"}); !errors.Is(err, ReasonCanceled) || !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if server.attempts > 8 {
		t.Errorf("it was asked %d times", server.attempts)
	}
}

func TestEveryCallSaysWhereItShallGoAndWhoAsks(t *testing.T) {
	request := sample("büro 1", wire.F16, 100)
	route := wire.RouteKey("acme", sampleModel, request.TokenIDs)
	server := new(scripted).sends(headed(&pionv1.PrefixStoreFetchHeader{}))
	server.lookup = func(context.Context, int) (*pionv1.PrefixStoreLookupResponse, error) {
		return &pionv1.PrefixStoreLookupResponse{Results: make([]*pionv1.PrefixStoreLookupResponse_Result, 1)}, nil
	}
	server.store = func(_ int, stream pionv1.PrefixStore_StoreServer) error {
		for {
			if _, err := stream.Recv(); err == io.EOF {
				return stream.SendAndClose(&pionv1.PrefixStoreStoreResponse{Namespace: "büro 1"})
			} else if err != nil {
				return err
			}
		}
	}
	client := dial(t, server.start(t), Options{Tenant: "acme", Password: "secret"})
	for range 2 { // before the name is known, and after
		if _, err := client.Lookup(t.Context(), LookupRequest{Namespace: "büro 1"}); err != nil {
			t.Fatal(err)
		}
		if prefix := mustFetch(t, client, FetchRequest{Namespace: "büro 1"}); prefix.Hit {
			t.Error("a hit")
		}
		mustStore(t, client, request)
	}
	want := []string{"b%C3%BCro%201", "b%C3%BCro%201", route, route, route, route}
	for i, sent := range server.asked {
		if got := sent.Get("pion-route"); len(got) != 1 || got[0] != want[i] {
			t.Errorf("call %d went to %q, not %q", i, got, want[i])
		}
		if got := sent.Get("authorization"); len(got) != 1 || got[0] != "Basic YWNtZTpzZWNyZXQ=" {
			t.Errorf("call %d came from %q", i, got)
		}
	}
	routes := newRoutes()
	for i := range routesMax + 1 {
		routes.remember(string(rune(i+256)), "x")
	}
	if len(routes.known) != routesMax || routes.of(string(rune(256))) == "x" || routes.of(string(rune(257))) != "x" {
		t.Errorf("%d routes are remembered", len(routes.known))
	}
}

// TLS

// authority signs certificates for 127.0.0.1 and for clients, and writes them to files.
type authority struct {
	directory   string
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{directory: t.TempDir()}
	a.certificate, a.key = a.sign(t, "ca", time.Hour)
	return a
}

func (a *authority) path(name string) string { return filepath.Join(a.directory, name) }

func (a *authority) sign(t *testing.T, name string, valid time.Duration) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: time.Now().Add(valid),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, BasicConstraintsValid: true, IsCA: a.key == nil,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	parent, signer := a.certificate, a.key
	if a.key == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{
		name + ".pem": {Type: "CERTIFICATE", Bytes: der}, name + ".key": {Type: "PRIVATE KEY", Bytes: keyDER},
	} {
		if err := os.WriteFile(a.path(file), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return certificate, key
}

func TestMutualTLSLetsInWhoHasACertificateAndNobodyElse(t *testing.T) {
	trusted, strange := newAuthority(t), newAuthority(t)
	trusted.sign(t, "server", time.Hour)
	trusted.sign(t, "client", time.Hour)
	trusted.sign(t, "expired", -time.Hour)
	strange.sign(t, "client", time.Hour)
	address := startServer(t, "--tls-cert", trusted.path("server.pem"), "--tls-key", trusted.path("server.key"),
		"--tls-client-ca", trusted.path("ca.pem"))

	mutual := func(ca, certificate, key string) Options {
		config, err := TLSFromFiles(ca, certificate, key)
		if err != nil {
			t.Fatal(err)
		}
		return Options{TLS: config}
	}
	request := sample("encrypted", wire.F16, 5_000)
	good := dial(t, address, mutual(trusted.path("ca.pem"), trusted.path("client.pem"), trusted.path("client.key")))
	mustStore(t, good, request)
	same(t, mustFetch(t, good, FetchRequest{Namespace: "encrypted"}), request)

	for what, options := range map[string]Options{
		"no TLS":                   {},
		"no certificate":           mutual(trusted.path("ca.pem"), "", ""),
		"an expired certificate":   mutual(trusted.path("ca.pem"), trusted.path("expired.pem"), trusted.path("expired.key")),
		"a stranger":               mutual(trusted.path("ca.pem"), strange.path("client.pem"), strange.path("client.key")),
		"a server of a stranger's": mutual(strange.path("ca.pem"), trusted.path("client.pem"), trusted.path("client.key")),
	} {
		if prefix, err := impatient(t, address, options).Fetch(t.Context(), FetchRequest{Namespace: "encrypted"}); err == nil {
			t.Errorf("%s: %+v", what, prefix.Info)
		}
	}
	// An authority that changes needs no restart.
	changing := TLSFiles{trusted.path("changing.pem"), trusted.path("client.pem"), trusted.path("client.key")}
	replaced := func(from string) {
		text, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(changing.Authorities, text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	replaced(strange.path("ca.pem"))
	follows := dial(t, address, Options{TLSFiles: &changing})
	if _, err := follows.Lookup(t.Context(), LookupRequest{Namespace: "encrypted"}); !errors.Is(err, ReasonNotAuthenticated) {
		t.Error(err)
	}
	replaced(trusted.path("ca.pem"))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for err := errors.New("not yet"); err != nil; { // gRPC waits before it connects again
		_, err = follows.Lookup(ctx, LookupRequest{Namespace: "encrypted"})
		if err != nil && !errors.Is(err, ReasonNotAuthenticated) {
			t.Fatal(err)
		}
	}
	if client, err := Dial(address, Options{TLSFiles: &TLSFiles{Authorities: "nowhere.pem"}}); err == nil {
		client.Close()
		t.Error("files that are not there were taken")
	}
	// Asking again does not make a certificate trusted, however much time there is.
	wrong := mutual(strange.path("ca.pem"), trusted.path("client.pem"), trusted.path("client.key"))
	if _, err := dial(t, address, wrong).Lookup(ctx, LookupRequest{Namespace: "encrypted"}); !errors.Is(err, ReasonNotAuthenticated) || ctx.Err() != nil {
		t.Error(err)
	}
	for _, files := range [][3]string{{"", "", trusted.path("client.key")}, {"nowhere.pem", "", ""}, {trusted.path("client.key"), "", ""}, {"", trusted.path("client.pem"), ""}} {
		if _, err := TLSFromFiles(files[0], files[1], files[2]); err == nil {
			t.Errorf("%v were taken", files)
		}
	}
}
