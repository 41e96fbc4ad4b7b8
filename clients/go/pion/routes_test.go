package pion

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"pion-grpc/clients/go/wire"
)

// noted is a client's note of where its calls went.
type noted struct {
	mutex sync.Mutex
	went  map[string][]string // by service and method
}

func (n *noted) note(ctx context.Context, method string) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	sent, _ := metadata.FromOutgoingContext(ctx)
	method = method[strings.LastIndex(method, ".")+1:]
	n.went[method] = append(n.went[method], sent.Get("pion-route")...)
}

func (n *noted) options() []grpc.DialOption {
	n.went = map[string][]string{}
	return []grpc.DialOption{
		grpc.WithUnaryInterceptor(func(
			ctx context.Context, method string, request, answer any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker,
			options ...grpc.CallOption,
		) error {
			n.note(ctx, method)
			return invoke(ctx, method, request, answer, conn, options...)
		}),
		grpc.WithStreamInterceptor(func(
			ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, open grpc.Streamer,
			options ...grpc.CallOption,
		) (grpc.ClientStream, error) {
			n.note(ctx, method)
			return open(ctx, desc, conn, method, options...)
		}),
	}
}

func TestAPrefixOfTheSameNameDoesNotMoveASessionsState(t *testing.T) {
	const name = "one name for everything"
	var n noted
	client := dial(t, sharedServer(t), Options{DialOptions: n.options()})
	request := sample(name, wire.F32, 70)
	value := []byte("recurrent")
	if _, err := client.StoreState(t.Context(), name, 0, StateInfo{}, value, DurabilityProcess); err != nil {
		t.Fatal(err)
	}
	rows := AttendRows{Layer: 9, Heads: 1, Rows: 1, HeadDim: 4, K: make([]float32, 4), V: make([]float32, 4)}
	if _, err := client.AttendStore(t.Context(), name, rows); err != nil {
		t.Fatal(err)
	}
	mustStore(t, client, request)
	if match, err := client.Match(t.Context(), MatchRequest{Model: sampleModel, TokenIDs: request.TokenIDs}); err != nil || !match.Hit {
		t.Fatalf("%+v, %v", match, err)
	}
	if found, err := client.Lookup(t.Context(), LookupRequest{Namespace: name, LeaseMS: 1_000}); err != nil || !found.Hit {
		t.Fatalf("%+v, %v", found, err)
	}
	if state, err := client.FetchState(t.Context(), name, 0); err != nil || string(state.Data) != string(value) {
		t.Errorf("%+v, %v", state, err)
	}
	if _, err := client.DropState(t.Context(), name, nil); err != nil {
		t.Error(err)
	}
	if _, err := client.AttendLookup(t.Context(), name, 9); err != nil {
		t.Error(err)
	}
	if _, err := client.AttendWarm(t.Context(), "warmed", AttendPrefix{Namespace: name}); err != nil {
		t.Error(err)
	}
	if _, err := client.AttendLookup(t.Context(), "warmed", 0); err != nil {
		t.Error(err)
	}
	if found, err := client.Lookup(t.Context(), LookupRequest{Namespace: "warmed"}); err != nil || found.Hit {
		t.Errorf("%+v, %v", found, err)
	}
	byName, byTokens := wire.RouteMetadata(name), wire.RouteKey("", sampleModel, request.TokenIDs)
	for method, want := range map[string][]string{
		"SSMState/Store": {byName}, "SSMState/Fetch": {byName}, "SSMState/Drop": {byName},
		"Attend/Store":       {byName, byTokens},
		"Attend/Lookup":      {byName, byTokens},
		"PrefixStore/Store":  {byTokens},
		"PrefixStore/Match":  {byTokens},
		"PrefixStore/Lookup": {byTokens, "warmed"},
	} {
		if got := n.went[method]; fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s went to %q, not %q", method, got, want)
		}
	}
}

func TestNeitherLeasesNorSessionsMakeAClientForgetItsPrefixes(t *testing.T) {
	routes := newRouting()
	routes.follow("kept", nil, "where it is")
	for i := range uint32(routesMax + 1) {
		routes.follow("kept", wire.PackTokenIDs([]uint32{i}), "where it is")
		routes.warmed(fmt.Sprint(i), "kept")
	}
	for i := range 20_000 {
		routes.follow(fmt.Sprint(i), nil, "elsewhere")
	}
	if got := routes.prefix("kept"); got != "where it is" {
		t.Errorf("it is asked for at %q", got)
	}
	if n := len(routes.leases.known); n != routesMax {
		t.Errorf("%d leases are remembered", n)
	}
}

func TestNoNameMakesMetadataThatEndsAConnection(t *testing.T) {
	var n noted
	client := dial(t, sharedServer(t), Options{DialOptions: n.options()})
	for _, name := range []string{strings.Repeat("a", 100_000), strings.Repeat("größer ", 100_000)} {
		if lookup, err := client.Lookup(t.Context(), LookupRequest{Namespace: name}); !errors.Is(err, ReasonInvalid) {
			t.Errorf("%+v, %v", lookup, err)
		}
		if state, err := client.FetchState(t.Context(), name, 0); err == nil && state.Hit {
			t.Errorf("%+v, %v", state, err)
		}
		client.Drop(t.Context(), name)
		for range client.List(t.Context(), name) {
		}
	}
	for method, routes := range n.went {
		for _, route := range routes {
			if len(route) > 9*routeCharactersMax {
				t.Errorf("%s carried a route of %d bytes", method, len(route))
			}
		}
	}
	long := strings.Repeat("ß", routeCharactersMax)
	if cut(long) != long || cut(long+"x") != long || cut(long+"yz") != long {
		t.Error("equal beginnings have different routes")
	}
}
