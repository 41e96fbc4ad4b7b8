package pion

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"pion-grpc/clients/go/pionv1"
	"pion-grpc/clients/go/wire"
)

var dtypes = []wire.DType{wire.F32, wire.F16, wire.BF16}

// Every language the same bytes

func TestNoBitIsLostFromPythonToGo(t *testing.T) {
	address := sharedServer(t)
	client := dial(t, address, Options{})
	peer(t, "store", address, "py-F32,F32,300", "py-F16,F16,300", "py-BF16,BF16,300", "py-child,F16,400,py-F16,128")
	for _, dtype := range dtypes {
		name := "py-" + dtype.String()
		stored := sample(name, dtype, 300)
		prefix := mustFetch(t, client, FetchRequest{Namespace: name, PartKinds: []string{"state"}})
		same(t, prefix, stored)
		if prefix.Begin != 0 || prefix.End != 300 || len(prefix.Parts) != 1 || len(prefix.TokenIDs) != 300 {
			t.Errorf("rows %d to %d, %d parts, %d ids", prefix.Begin, prefix.End, len(prefix.Parts), len(prefix.TokenIDs))
		}
		part := prefix.Parts[0].PartInfo
		if part.Kind != "state" || part.Slot != 1 || part.BoundaryTokens != 300 || part.Description != "a state" {
			t.Errorf("the part is %+v", part)
		}
	}
	child := mustFetch(t, client, FetchRequest{Namespace: "py-child", Begin: 100, End: 333})
	if child.Info.Parent != "py-F16" || child.Info.Base != 128 || child.Info.TokenCount != 400 {
		t.Errorf("the child is %+v", child.Info)
	}
	parents, own := sample("py-F16", wire.F16, 300), sample("py-child", wire.F16, 400)
	for i, tensor := range child.Tensors {
		unit := tensor.Layout.RowBytes()
		want := append(bytes.Clone(parents.Tensors[i].Data[100*unit:128*unit]), own.Tensors[i].Data[128*unit:333*unit]...)
		if !bytes.Equal(tensor.Data, want) {
			t.Errorf("%s of the chain has other bytes", tensor.Layout.Name())
		}
	}
}

func TestNoBitIsLostFromGoToPython(t *testing.T) {
	address := sharedServer(t)
	client := dial(t, address, Options{})
	kinds := map[wire.DType]string{wire.F32: "float32", wire.F16: "float16", wire.BF16: "bfloat16"}
	var names []string
	var want strings.Builder
	for _, dtype := range dtypes {
		request := sample("go-"+dtype.String(), dtype, 300)
		mustStore(t, client, request)
		names = append(names, request.Namespace)
		want.WriteString(request.Namespace + "\n" + digest(request, kinds[dtype]))
	}
	child := extending(sample("go-F16", wire.F16, 400), "go-F16", 300)
	child.Namespace = "go-child"
	stored := mustStore(t, client, child)
	if stored.Base != 300 || stored.TokenCount != 400 {
		t.Errorf("stored as %+v", stored)
	}
	want.WriteString("go-child\n" + digest(sample("go-F16", wire.F16, 400), "float16"))
	if got := peer(t, append([]string{"digest", address}, append(names, "go-child")...)...); got != want.String() {
		t.Errorf("Python fetched\n%snot\n%s", got, want.String())
	}
}

func digest(request StoreRequest, kind string) string {
	var lines strings.Builder
	for _, tensor := range request.Tensors {
		fmt.Fprintf(&lines, "%s %s %x\n", tensor.Layout.Name(), kind, sha256.Sum256(tensor.Data))
	}
	for _, part := range request.Parts {
		fmt.Fprintf(&lines, "part.%d %s %x\n", part.Slot, part.Kind, sha256.Sum256(part.Data))
	}
	return lines.String()
}

// What a caller gets

func TestTheCallersBuffersAndAWriterGetTheSameBytes(t *testing.T) {
	client := dial(t, sharedServer(t), Options{})
	request := sample("buffers", wire.BF16, 700)
	mustStore(t, client, request)

	buffers := map[string][]byte{}
	var progress []uint64
	prefix := mustFetch(t, client, FetchRequest{
		Namespace: "buffers",
		Slots:     []uint32{1},
		Begin:     5,
		Into: func(tensor wire.TensorLayout, size int) []byte {
			buffers[tensor.Name()] = make([]byte, size+3)
			return buffers[tensor.Name()]
		},
		Progress: func(done, total uint64) error {
			progress = append(progress, done, total)
			return nil
		},
	})
	if len(prefix.Tensors) != 2 || len(buffers) != 2 {
		t.Fatalf("%d tensors in %d buffers", len(prefix.Tensors), len(buffers))
	}
	for i, tensor := range prefix.Tensors {
		want := request.Tensors[2+i].Data[5*tensor.Layout.RowBytes():]
		if &tensor.Data[0] != &buffers[tensor.Layout.Name()][0] || !bytes.Equal(tensor.Data, want) {
			t.Errorf("%s is not the caller's buffer with the rows", tensor.Layout.Name())
		}
	}
	if last := progress[len(progress)-2:]; last[0] != last[1] || last[1] != prefix.TotalBytes {
		t.Errorf("progress ended with %v", last)
	}

	var all, begun bytes.Buffer
	_, err := client.FetchTo(t.Context(), FetchRequest{Namespace: "buffers", PartKinds: []string{"state"}}, &all,
		func(prefix *Prefix) error {
			fmt.Fprint(&begun, prefix.TotalBytes)
			return nil
		})
	var want []byte
	for _, tensor := range request.Tensors {
		want = append(want, tensor.Data...)
	}
	want = append(want, request.Parts[0].Data...)
	if err != nil || !bytes.Equal(all.Bytes(), want) || begun.String() != fmt.Sprint(len(want)) {
		t.Errorf("%d of %d bytes were written, %s were announced: %v", all.Len(), len(want), begun.String(), err)
	}

	_, err = client.Fetch(t.Context(), FetchRequest{Namespace: "buffers", Into: func(wire.TensorLayout, int) []byte {
		return make([]byte, 1)
	}})
	if !errors.Is(err, ReasonInvalid) {
		t.Errorf("a buffer that is too small: %v", err)
	}
	stop := errors.New("enough")
	_, err = client.Fetch(t.Context(), FetchRequest{Namespace: "buffers", Progress: func(_, _ uint64) error { return stop }})
	if !errors.Is(err, stop) {
		t.Errorf("the caller's own error became %v", err)
	}
}

func TestValuesAreViewedAsWhatTheyAre(t *testing.T) {
	client := dial(t, sharedServer(t), Options{})
	layout := wire.TensorLayout{Side: wire.K, Heads: 1, HeadDim: 2, DType: wire.BF16}
	values := []wire.Brain{wire.BrainOf(1.5), wire.BrainOf(-3), wire.BrainOf(0.25), 0x7fc1}
	mustStore(t, client, StoreRequest{
		Namespace: "values", Model: "m", TokenIDs: []uint32{1, 2},
		Tensors: []Tensor{{Layout: layout, Data: wire.Bytes(values)}},
	})
	tensor := mustFetch(t, client, FetchRequest{Namespace: "values"}).Tensors[0]
	brains, err := tensor.BF16()
	if err != nil || len(brains) != 4 || brains[1].Float32() != -3 || brains[3] != 0x7fc1 {
		t.Errorf("%v, %v", brains, err)
	}
	if _, err := tensor.F16(); err == nil {
		t.Error("bf16 was taken for f16")
	}
}

func TestAMissIsAnAnswer(t *testing.T) {
	client := dial(t, sharedServer(t), Options{})
	prefix := mustFetch(t, client, FetchRequest{Namespace: "nobody's"})
	if prefix.Hit || prefix.Reason != pionv1.MissReason_MISS_REASON_NOT_STORED {
		t.Errorf("%+v", prefix)
	}
	var nothing bytes.Buffer
	if prefix, err := client.FetchTo(t.Context(), FetchRequest{Namespace: "nobody's"}, &nothing, nil); err != nil || prefix.Hit || nothing.Len() > 0 {
		t.Errorf("%+v, %v", prefix, err)
	}
	match, err := client.Match(t.Context(), MatchRequest{Model: "nobody's", TokenIDs: []uint32{1, 2, 3}})
	if err != nil || match.Hit || match.Reason != pionv1.MissReason_MISS_REASON_NOT_STORED {
		t.Errorf("%+v, %v", match, err)
	}
	lookup, err := client.Lookup(t.Context(), LookupRequest{Namespace: "nobody's"})
	if err != nil || lookup.Hit || lookup.Prefix != nil {
		t.Errorf("%+v, %v", lookup, err)
	}
	state, err := client.FetchState(t.Context(), "nobody's", 3)
	if err != nil || state.Hit || state.Data != nil {
		t.Errorf("%+v, %v", state, err)
	}
	dropped, err := client.Drop(t.Context(), "nobody's")
	if err != nil || len(dropped) != 1 || dropped[0] {
		t.Errorf("%v, %v", dropped, err)
	}
}

func TestRowsDoNotComeWithoutTheirParts(t *testing.T) {
	client := dial(t, sharedServer(t), Options{})
	stored := sample("cut", wire.F16, 300)
	stored.Parts[0].BoundaryTokens = 128
	mustStore(t, client, stored)
	prefix := mustFetch(t, client, FetchRequest{Namespace: "cut", PartKinds: []string{"state"}})
	same(t, prefix, stored)
	missing := pionv1.MissReason_MISS_REASON_PART_MISSING
	if prefix.End != 128 || len(prefix.Parts) != 1 || prefix.Reason != missing || prefix.ShortenedBy != "state" {
		t.Errorf("rows to %d and %d parts: %v, %q", prefix.End, len(prefix.Parts), prefix.Reason, prefix.ShortenedBy)
	}
	for _, request := range []FetchRequest{
		{Namespace: "cut", PartKinds: []string{"state", "ring"}},
		{Namespace: "cut", PartKinds: []string{"state"}, End: 127},
		{Namespace: "cut", PartKinds: []string{"state"}, Begin: 129},
	} {
		if prefix := mustFetch(t, client, request); prefix.Hit || prefix.Reason != missing || prefix.ShortenedBy == "" {
			t.Errorf("%+v: %+v", request, prefix)
		}
	}
}

func TestWhatCannotBeServedIsExtendedNevertheless(t *testing.T) {
	client := dial(t, sharedServer(t), Options{})
	stored := sample("without parts", wire.F16, 300)
	stored.Model, stored.Parts = "extended", nil
	mustStore(t, client, stored)
	request := MatchRequest{Model: stored.Model, TokenIDs: bytesToIDs(200), PartKinds: []string{"state"}}
	match, err := client.Match(t.Context(), request)
	if err != nil || match.Hit || match.LongestNamespace != "without parts" || match.LongestTokens != 200 {
		t.Errorf("%+v, %v", match, err)
	}
	key := wire.RouteKey("", stored.Model, stored.TokenIDs)
	fresh := dial(t, sharedServer(t), Options{})
	if _, err := fresh.Match(t.Context(), request); err != nil || fresh.routes.prefix("without parts") != key {
		t.Errorf("it is looked for at %q: %v", fresh.routes.prefix("without parts"), err)
	}
}

func TestMatchLookupListAndDropAgree(t *testing.T) {
	client := dial(t, sharedServer(t), Options{})
	request := sample("agree", wire.F16, 200)
	request.Model, request.Parts = "agreeing", nil
	request.PrefillMS = 123
	request.Table = &BlockTable{64, []uint64{1, 2, 3}}
	request.Durability = DurabilityDisk
	stored := mustStore(t, client, request)
	if stored.AlreadyStored || stored.Durability != DurabilityDisk || stored.TokenCount != 200 {
		t.Errorf("stored as %+v", stored)
	}
	if again := mustStore(t, client, request); !again.AlreadyStored || again.Generation != stored.Generation {
		t.Errorf("stored again as %+v", again)
	}

	prompt := append(bytesToIDs(150), 7, 7, 7)
	match, err := client.Match(t.Context(), MatchRequest{Model: "agreeing", TokenIDs: prompt})
	if err != nil || !match.Hit || match.ServedTokens != 150 || match.Reason != pionv1.MissReason_MISS_REASON_PARTIAL {
		t.Fatalf("%+v, %v", match, err)
	}
	prefix := mustFetch(t, client, FetchRequest{LeaseID: match.LeaseID, End: match.ServedTokens})
	same(t, prefix, request)
	if prefix.End != 150 {
		t.Errorf("rows up to %d came", prefix.End)
	}

	lookup, err := client.Lookup(t.Context(), LookupRequest{
		Namespace: "agree", Model: "agreeing", TokenIDs: request.TokenIDs, Layout: prefix.Info.Layout, LeaseMS: 1000,
	})
	if err != nil || !lookup.Hit || len(lookup.LeaseID) == 0 || lookup.Prefix.PrefillMS != 123 ||
		!lookup.Prefix.Layout.Equal(layoutsOf(request)) {
		t.Errorf("%+v, %v", lookup, err)
	}
	lookup, err = client.Lookup(t.Context(), LookupRequest{Namespace: "agree", TokenIDs: prompt})
	if err != nil || lookup.Hit || lookup.FirstDifference != 150 {
		t.Errorf("%+v, %v", lookup, err)
	}

	var names []string
	for info, err := range client.List(t.Context(), "agre") {
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, info.Namespace)
	}
	if len(names) != 1 || names[0] != "agree" {
		t.Errorf("listed %q", names)
	}
	dropped, err := client.Drop(t.Context(), "agree", "nobody's")
	if err != nil || len(dropped) != 2 || !dropped[0] || dropped[1] {
		t.Errorf("%v, %v", dropped, err)
	}
	if mustFetch(t, client, FetchRequest{Namespace: "agree"}).Hit {
		t.Error("what was dropped came back")
	}
}

func bytesToIDs(count int) []uint32 {
	ids := make([]uint32, count)
	for i := range ids {
		ids[i] = uint32(i)
	}
	return ids
}

func layoutsOf(request StoreRequest) wire.Layout {
	var layout wire.Layout
	for _, tensor := range request.Tensors {
		layout = append(layout, tensor.Layout)
	}
	return layout
}

func TestNoNameOfAListIsLostBetweenItsPages(t *testing.T) {
	client := dial(t, sharedServer(t), Options{})
	layout := wire.Layout{{Side: wire.K, Heads: 1, HeadDim: 1, DType: wire.F16}}
	const count = wire.NamesMax + 5
	for i := range count {
		if _, _, err := client.Register(t.Context(), Registration{Namespace: fmt.Sprintf("page-%04d", i), Layout: layout}); err != nil {
			t.Fatal(err)
		}
	}
	listed := 0
	for info, err := range client.List(t.Context(), "page-") {
		if err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("page-%04d", listed); info.Namespace != want {
			t.Fatalf("%s came instead of %s", info.Namespace, want)
		}
		listed++
	}
	if listed != count {
		t.Errorf("%d of %d names came", listed, count)
	}
}

func TestTheReceiptCountsWhatWasServed(t *testing.T) {
	client := dial(t, startServer(t), Options{})
	request := sample("receipt", wire.F16, 100)
	request.Parts = nil
	mustStore(t, client, request)
	if lookup, err := client.Lookup(t.Context(), LookupRequest{Namespace: "receipt"}); err != nil || !lookup.Hit {
		t.Fatalf("%+v, %v", lookup, err)
	}
	prefix := mustFetch(t, client, FetchRequest{Namespace: "receipt"})
	receipt, err := client.ResetStats(t.Context())
	if err != nil || receipt.GetHits() != 1 || receipt.GetBytesStreamed() != prefix.TotalBytes || receipt.GetTokensServed() != 100 {
		t.Errorf("%v, %v", receipt, err)
	}
	if receipt, err = client.Stats(t.Context()); err != nil || receipt.GetHits() != 0 {
		t.Errorf("%v, %v", receipt, err)
	}
	described, err := client.Describe(t.Context())
	if err != nil || described.GetPrefixCount() != 1 || described.GetVersion() == "" {
		t.Errorf("%v, %v", described, err)
	}
	if err := client.Sync(t.Context()); err != nil {
		t.Error(err)
	}
}

// Errors

func TestNoErrorLosesItsReason(t *testing.T) {
	client := dial(t, sharedServer(t), Options{})
	request := sample("reasons", wire.F16, 100)
	mustStore(t, client, request)

	other := sample("reasons", wire.F16, 100)
	other.TokenIDs[40] = 999
	_, err := client.Store(t.Context(), other)
	var failed *Error
	if !errors.As(err, &failed) || failed.Reason != ReasonOtherContent || failed.Metadata["first_difference"] != "40" || failed.FromTransport {
		t.Errorf("other tokens: %#v", err)
	}
	layout := sample("reasons", wire.BF16, 100)
	if _, err = client.Store(t.Context(), layout); !errors.Is(err, ReasonLayout) {
		t.Errorf("another layout: %v", err)
	}
	layout.Replace = true
	if _, err = client.Store(t.Context(), layout); err != nil {
		t.Errorf("another layout, replacing: %v", err)
	}
	orphan := extending(sample("orphan", wire.F16, 100), "nobody's", 64)
	if _, err = client.Store(t.Context(), orphan); !errors.Is(err, ReasonNotStored) {
		t.Errorf("no parent: %v", err)
	}
	if _, err = client.Fetch(t.Context(), FetchRequest{Namespace: "reasons", Begin: 10, End: 101}); !errors.Is(err, ReasonRows) {
		t.Errorf("rows beyond the end: %v", err)
	}
	if _, err = client.Lookup(t.Context(), LookupRequest{Namespace: "bell\a"}); !errors.Is(err, ReasonInvalid) {
		t.Errorf("a control character: %v", err)
	}
	for what, request := range map[string]StoreRequest{
		"no tokens":       {Namespace: "x", Model: "m"},
		"too few rows":    {Namespace: "x", Model: "m", TokenIDs: []uint32{1, 2}, Tensors: request.Tensors},
		"a base too deep": {Namespace: "x", Model: "m", TokenIDs: []uint32{1}, Base: 2},
		"tensors twice":   {Namespace: "x", Model: "m", TokenIDs: request.TokenIDs, Tensors: append(request.Tensors[:1:1], request.Tensors[0])},
		"text not UTF-8":  {Namespace: "\xff", Model: "m", TokenIDs: []uint32{1}},
	} {
		if _, err = client.Store(t.Context(), request); !errors.Is(err, ReasonInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	short := sample("short", wire.F16, 100)
	short.Tensors[3] = Tensor{Layout: short.Tensors[3].Layout, From: bytes.NewReader(short.Tensors[3].Data[:64]), Bytes: 6400}
	if _, err = client.Store(t.Context(), short); err == nil || mustFetch(t, client, FetchRequest{Namespace: "short"}).Hit {
		t.Errorf("a source that ends early: %v", err)
	}
}

func TestWrongCredentialsAreRefused(t *testing.T) {
	t.Setenv("PION_PASSWORD", "of the administrator")
	address := startServer(t, "--tenant", "acme=secret")
	request := sample("tenants", wire.F16, 80)
	good := dial(t, address, Options{Tenant: "acme", Password: "secret"})
	request.Namespace = ""
	stored := mustStore(t, good, request)
	want := wire.DerivedNamespace(wire.RootHash("acme", sampleModel, wire.RawFidelity), request.TokenIDs)
	if stored.Namespace != want {
		t.Errorf("the derived name is %s, not %s", stored.Namespace, want)
	}
	same(t, mustFetch(t, good, FetchRequest{Namespace: want}), request)
	for _, options := range []Options{{}, {Tenant: "acme", Password: "wrong"}} {
		if _, err := dial(t, address, options).Fetch(t.Context(), FetchRequest{Namespace: want}); !errors.Is(err, ReasonNotAuthenticated) {
			t.Errorf("%v", err)
		}
	}
}

func TestAddressesThatAreSomeAreTaken(t *testing.T) {
	for _, address := range []string{"localhost:1", "node-1.pion_x.local:50051", "10.0.0.1:1", "[::1]:1", "[fd00::4]:50051", "[fe80::1%en0]:50051", "unix:/x"} {
		client, err := Dial(address, Options{})
		if err != nil {
			t.Fatal(err)
		}
		client.Close()
	}
}

func TestAddressesThatAreNoneAreRefused(t *testing.T) {
	for _, address := range []string{"", "host", "host:", ":50051", "host:0", "host:99999", "host:x", "unix:", "http://host:1", "a,b:1", "a:1,a:1", "a:1,", "a:1,b", "ho st:1", "host\n:1", "[a,b]:1"} {
		if client, err := Dial(address, Options{}); err == nil {
			client.Close()
			t.Errorf("%q was taken", address)
		}
	}
}

func TestAServerThatIsNotThereIsGivenUp(t *testing.T) {
	client := impatient(t, "127.0.0.1:1", Options{})
	_, err := client.Lookup(t.Context(), LookupRequest{Namespace: "x"})
	var failed *Error
	if !errors.As(err, &failed) || failed.Reason != ReasonUnavailable || !failed.FromTransport {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err = client.Fetch(ctx, FetchRequest{Namespace: "x"}); err == nil {
		t.Error("something came from nowhere")
	}
	cancel()
	if _, err = client.Fetch(ctx, FetchRequest{Namespace: "x"}); !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

// Breaks

func TestAFetchThatBreaksAgainAndAgainGoesOn(t *testing.T) {
	address := sharedServer(t)
	request := sample("breaks", wire.F32, 20_000)
	mustStore(t, dial(t, address, Options{}), request)
	broken := startLink(t, address, &link{limit: func(n int64) int64 {
		if n < 6 {
			return 1_600_000
		}
		return -1
	}})
	client := dial(t, broken.address, Options{})
	prefix := mustFetch(t, client, FetchRequest{Namespace: "breaks", PartKinds: []string{"state"}})
	same(t, prefix, request)
	if broken.broken.Load() < 3 {
		t.Errorf("the link broke %d times", broken.broken.Load())
	}
	hash := sha256.New()
	again := startLink(t, address, &link{limit: broken.limit})
	if _, err := dial(t, again.address, Options{}).FetchTo(t.Context(), FetchRequest{Namespace: "breaks"}, hash, nil); err != nil {
		t.Fatal(err)
	}
	want := sha256.New()
	for _, tensor := range request.Tensors {
		want.Write(tensor.Data)
	}
	if !bytes.Equal(hash.Sum(nil), want.Sum(nil)) {
		t.Error("the writer got other bytes")
	}
}

func TestAFlippedBitNeverBecomesWrongRows(t *testing.T) {
	address := sharedServer(t)
	request := sample("flipped", wire.F16, 8_000)
	mustStore(t, dial(t, address, Options{}), request)
	size := int64(4*8_000*64 + 1_500_000)
	random := rand.New(rand.NewPCG(1, 2))
	for range 24 {
		at := 200_000 + random.Int64N(size-200_000) // behind the header, which carries no checksum
		noisy := startLink(t, address, &link{flips: func(n int64) int64 {
			if n == 0 {
				return at
			}
			return -1
		}})
		client := dial(t, noisy.address, Options{StallTimeout: time.Second})
		prefix, err := client.Fetch(t.Context(), FetchRequest{Namespace: "flipped", PartKinds: []string{"state"}})
		if err != nil {
			t.Logf("a bit at %d: %v", at, err)
			continue
		}
		same(t, prefix, request)
	}
}

func TestAPrefixThatChangesOnTheWayIsNeverMixed(t *testing.T) {
	address := sharedServer(t)
	direct := dial(t, address, Options{})
	old, fresh := sample("changes", wire.F32, 8_000), sample("changed", wire.F16, 9_000)
	fresh.Namespace, fresh.Replace = "changes", true
	for _, name := range []string{"memory", "writer"} {
		replaced := old
		replaced.Replace = true
		mustStore(t, direct, replaced)
		broken := startLink(t, address, &link{
			limit: func(n int64) int64 {
				if n == 0 {
					return 1_600_000
				}
				return -1
			},
			onBreak: func(int64) {
				if _, err := direct.Store(context.Background(), fresh); err != nil {
					t.Error(err)
				}
			},
		})
		client := dial(t, broken.address, Options{})
		if name == "memory" {
			same(t, mustFetch(t, client, FetchRequest{Namespace: "changes"}), fresh)
		} else {
			var some bytes.Buffer
			_, err := client.FetchTo(t.Context(), FetchRequest{Namespace: "changes"}, &some, nil)
			if !errors.Is(err, ReasonGeneration) || !bytes.Equal(some.Bytes(), old.Tensors[0].Data[:some.Len()]) {
				t.Errorf("%d bytes were written, %v", some.Len(), err)
			}
		}
	}
}

func TestAStoreIsSentAgainAsAWholeAfterABreak(t *testing.T) {
	address := sharedServer(t)
	broken := startLink(t, address, &link{limit: func(n int64) int64 {
		if n == 0 {
			return 200 // settings and the first window updates
		}
		return -1
	}})
	request := sample("resent", wire.F32, 40_000)
	client := dial(t, broken.address, Options{})
	mustStore(t, client, request)
	same(t, mustFetch(t, client, FetchRequest{Namespace: "resent"}), request)
	if broken.broken.Load() != 1 {
		t.Error("the link did not break")
	}
}

func TestWhatIsMadeResidentIsSentAgainAsAWholeAfterABreak(t *testing.T) {
	const heads, rows, dim = 2, 100_000, 8
	mustStore(t, dial(t, sharedServer(t), Options{}), sample("resident", wire.F32, 100))
	k, v := floats("k", heads*rows*dim), floats("v", heads*rows*dim)
	for what, make := range map[string]func(*Client) (Warmed, error){
		"rows": func(client *Client) (Warmed, error) {
			return client.AttendStore(t.Context(), "broken", AttendRows{1, heads, rows, dim, k, v})
		},
		"a prefix": func(client *Client) (Warmed, error) {
			return client.AttendWarm(t.Context(), "broken", AttendPrefix{Namespace: "resident"})
		},
	} {
		broken := startLink(t, sharedServer(t), &link{limit: func(n int64) int64 {
			if n == 0 {
				return 90 // settings
			}
			return -1
		}})
		if warmed, err := make(dial(t, broken.address, Options{})); err != nil || warmed.Layers == 0 {
			t.Errorf("%s: %+v, %v", what, warmed, err)
		}
		if broken.broken.Load() != 1 {
			t.Errorf("%s: the link did not break", what)
		}
	}
}

// States and attention

func TestStatesComeBackAsTheyWereStored(t *testing.T) {
	address := sharedServer(t)
	client := dial(t, address, Options{})
	value := noise("state", "value", 5_000_001)
	info := StateInfo{BoundaryTokens: 77, Description: "ArraysCache", Model: "m"}
	generation, err := client.StoreState(t.Context(), "states", 3, info, value, DurabilityProcess)
	if err != nil {
		t.Fatal(err)
	}
	broken := startLink(t, address, &link{limit: func(n int64) int64 {
		if n < 3 {
			return 1_600_000
		}
		return -1
	}})
	state, err := dial(t, broken.address, Options{}).FetchState(t.Context(), "states", 3)
	if err != nil || !state.Hit || state.StateInfo != info || state.Generation != generation || !bytes.Equal(state.Data, value) {
		t.Fatalf("%v: %+v", err, state.StateInfo)
	}
	if broken.broken.Load() == 0 {
		t.Error("the link did not break")
	}
	if _, err := client.StoreState(t.Context(), "states", 4, StateInfo{}, []byte{1}, DurabilityDisk); err != nil {
		t.Error(err)
	}
	layer := uint32(3)
	if n, err := client.DropState(t.Context(), "states", &layer); n != 1 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if n, err := client.DropState(t.Context(), "states", nil); n != 1 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
}

func TestAttentionIsWhatTheFormulaSays(t *testing.T) {
	client := dial(t, sharedServer(t), Options{})
	const heads, rows, dim = 2, 50, 8
	k, v, q := floats("k", heads*rows*dim), floats("v", heads*rows*dim), floats("q", heads*dim)
	warmed, err := client.AttendStore(t.Context(), "attend", AttendRows{1, heads, rows, dim, k, v})
	if err != nil || warmed.Layers != 1 || warmed.ResidentBytes == 0 {
		t.Fatalf("%+v, %v", warmed, err)
	}
	entries, err := client.AttendLookup(t.Context(), "attend", 0, 1)
	if err != nil || entries[0].State != pionv1.AttendState_ATTEND_STATE_UNSPECIFIED ||
		entries[1] != (AttendEntry{1, pionv1.AttendState_ATTEND_STATE_RESIDENT, heads, rows, dim}) {
		t.Errorf("%+v, %v", entries, err)
	}
	dense := AttendQuery{
		Session: "attend", Layer: 1, Heads: heads, HeadDim: dim, LogSumExp: true, Kind: Dense{1}, Q: q,
	}
	want, wantLSE := attention(k, v, q, heads, rows, dim)
	answer, err := client.AttendQuery(t.Context(), dense)
	if err != nil {
		t.Fatal(err)
	}
	near(t, answer.Out, want)
	near(t, answer.LogSumExp, wantLSE)

	stream, err := client.OpenAttendStream(t.Context(), "attend")
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	window := uint64(rows)
	everything := SparseAuto{BlockRows: 8, Blocks: 100, Quest: true}
	all := make([]int32, heads*rows)
	for i := range all {
		all[i] = int32(i % rows)
	}
	kinds := []AttendKind{
		Dense{1}, everything, Sparse{all, []uint32{rows, rows}, rows},
		Fused{1, 0, nil, nil}, SparseAutoFused{everything, 0, nil, nil},
	}
	for _, kind := range kinds {
		query := dense
		query.Kind, query.LogSumExp, query.WindowRows = kind, false, &window
		if _, err := stream.Send(query); err != nil {
			t.Fatal(err)
		}
	}
	missing := dense
	missing.Layer = 9
	if _, err := stream.Send(missing); err != nil {
		t.Fatal(err)
	}
	for i, kind := range kinds {
		id, answer, err := stream.Recv()
		if err != nil || id != uint64(i+1) {
			t.Fatalf("%T: %d, %v", kind, id, err)
		}
		near(t, answer.Out, want)
	}
	if id, _, err := stream.Recv(); id != 6 || !IsQueryError(err) || !errors.Is(err, ReasonMissing) {
		t.Errorf("%d, %v", id, err)
	}
	if answer, err = stream.Query(dense); err != nil {
		t.Fatalf("the stream did not go on: %v", err)
	}
	near(t, answer.LogSumExp, wantLSE)

	stored := mustStore(t, client, sample("attended", wire.F16, 100))
	another := AttendPrefix{Namespace: "attended", Generation: stored.Generation + 1}
	if _, err = client.AttendWarm(t.Context(), "from-prefix", another); !errors.Is(err, ReasonGeneration) {
		t.Errorf("another generation: %v", err)
	}
	warmed, err = client.AttendWarm(t.Context(), "from-prefix", AttendPrefix{Namespace: "attended", Generation: stored.Generation, Rows: 64})
	if err != nil || warmed.Layers != sampleSlots {
		t.Errorf("%+v, %v", warmed, err)
	}
	if n, err := client.AttendDrop(t.Context(), "from-prefix", nil); n != sampleSlots || err != nil {
		t.Errorf("%d, %v", n, err)
	}
}

// attention is softmax(q k / sqrt(dim)) v, and the log-sum-exp, of one query per head.
func attention(k, v, q []float32, heads, rows, dim int) (out, lse []float32) {
	for head := range heads {
		var sum float64
		weighted := make([]float64, dim)
		for row := range rows {
			var score float64
			at := (head*rows + row) * dim
			for i := range dim {
				score += float64(q[head*dim+i]) * float64(k[at+i])
			}
			weight := math.Exp(score / math.Sqrt(float64(dim)))
			sum += weight
			for i := range dim {
				weighted[i] += weight * float64(v[at+i])
			}
		}
		for i := range dim {
			out = append(out, float32(weighted[i]/sum))
		}
		lse = append(lse, float32(math.Log(sum)))
	}
	return out, lse
}

func floats(what string, count int) []float32 {
	values := make([]float32, count)
	for i, b := range noise("floats", what, count) {
		values[i] = (float32(b) - 128) / 64
	}
	return values
}

func near(t *testing.T, got, want []float32) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d values, not %d", len(got), len(want))
	}
	for i := range got {
		if math.Abs(float64(got[i]-want[i])) > 1e-4 {
			t.Fatalf("value %d is %g, not %g", i, got[i], want[i])
		}
	}
}

func TestOneClientServesManyGoroutines(t *testing.T) {
	client := dial(t, sharedServer(t), Options{})
	var working sync.WaitGroup
	for i := range 8 {
		working.Go(func() {
			request := sample(fmt.Sprintf("many-%d", i), wire.BF16, 200+i)
			if _, err := client.Store(t.Context(), request); err != nil {
				t.Error(err)
				return
			}
			for range 5 {
				prefix, err := client.Fetch(t.Context(), FetchRequest{Namespace: request.Namespace, PartKinds: []string{"state"}})
				if err != nil {
					t.Error(err)
					return
				}
				same(t, prefix, request)
			}
		})
	}
	working.Wait()
}
