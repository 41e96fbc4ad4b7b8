package pion

import (
	"context"
	"errors"
	"testing"
	"time"

	"pion-grpc/clients/go/pionv1"
	"pion-grpc/clients/go/wire"
)

func TestTextThatIsNoneIsRefusedAtOnceEverywhere(t *testing.T) {
	const bad = "n\xff"
	client := dial(t, sharedServer(t), Options{})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // a caller with time is patient
	defer cancel()
	ids := []uint32{1}
	query := AttendQuery{Session: bad, Heads: 1, HeadDim: 4, Kind: Dense{1}, Q: make([]float32, 4)}
	stream, err := client.OpenAttendStream(ctx, "s")
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	named := func(change func(*StoreRequest)) func() error {
		return func() error {
			request := sample("never", wire.F16, 10)
			change(&request)
			_, err := client.Store(ctx, request)
			return err
		}
	}
	for what, call := range map[string]func() error{
		"match: model": func() error { _, err := client.Match(ctx, MatchRequest{Model: bad, TokenIDs: ids}); return err },
		"match: fidelity": func() error {
			_, err := client.Match(ctx, MatchRequest{TokenIDs: ids, Fidelities: []string{"raw", bad}})
			return err
		},
		"lookup":   func() error { _, err := client.Lookup(ctx, LookupRequest{Namespace: bad}); return err },
		"drop":     func() error { _, err := client.Drop(ctx, "good", bad); return err },
		"register": func() error { _, _, err := client.Register(ctx, Registration{Namespace: bad}); return err },
		"fetch":    func() error { _, err := client.Fetch(ctx, FetchRequest{Namespace: bad}); return err },
		"fetch: part kind": func() error {
			_, err := client.Fetch(ctx, FetchRequest{Namespace: "n", PartKinds: []string{bad}})
			return err
		},
		"store: name":  named(func(r *StoreRequest) { r.Namespace = bad }),
		"store: part":  named(func(r *StoreRequest) { r.Parts[0].Kind = bad }),
		"store: codec": named(func(r *StoreRequest) { r.Tensors[0].Layout.Codec = bad }),
		"state: store": func() error {
			_, err := client.StoreState(ctx, "s", 0, StateInfo{Description: bad}, []byte{7}, DurabilityProcess)
			return err
		},
		"state: fetch": func() error { _, err := client.FetchState(ctx, bad, 0); return err },
		"state: drop":  func() error { _, err := client.DropState(ctx, bad, nil); return err },
		"attend: warm": func() error { _, err := client.AttendWarm(ctx, "s", AttendPrefix{Namespace: bad}); return err },
		"attend: rows": func() error {
			_, err := client.AttendStore(ctx, bad, AttendRows{Heads: 1, Rows: 1, HeadDim: 1, K: []float32{1}, V: []float32{1}})
			return err
		},
		"attend: lookup": func() error { _, err := client.AttendLookup(ctx, bad, 0); return err },
		"attend: query":  func() error { _, err := client.AttendQuery(ctx, query); return err },
		"attend: stream": func() error { _, err := stream.Query(query); return err },
		"list": func() error {
			for _, err := range client.List(ctx, bad) {
				return err
			}
			return nil
		},
		"a call of one's own": func() error {
			request := &pionv1.PrefixStoreDropRequest{Namespaces: []string{bad}}
			_, err := pionv1.NewPrefixStoreClient(client.Conn()).Drop(client.Outgoing(ctx, bad), request)
			return err
		},
	} {
		begun := time.Now()
		if err := call(); !errors.Is(err, ReasonInvalid) {
			t.Errorf("%s: %v", what, err)
		}
		if ctx.Err() != nil || time.Since(begun) > 30*time.Second {
			t.Fatalf("%s was waited for", what)
		}
	}
	// The stream goes on: what was refused was not sent.
	query.Session, query.Layer = "s", 5
	if _, err := stream.Query(query); !IsQueryError(err) {
		t.Errorf("%v", err)
	}
}
