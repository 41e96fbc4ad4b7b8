package pion

import (
	"context"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"

	"pion-grpc/clients/go/pionv1"
	"pion-grpc/clients/go/wire"
)

// lookingUp is a server that counts.
type lookingUp struct {
	asked  atomic.Int64
	server *grpc.Server
}

func (l *lookingUp) start(t *testing.T, address string) string {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	l.server = grpc.NewServer()
	pionv1.RegisterPrefixStoreServer(l.server, &scripted{
		lookup: func(context.Context, int) (*pionv1.PrefixStoreLookupResponse, error) {
			l.asked.Add(1)
			return &pionv1.PrefixStoreLookupResponse{Results: []*pionv1.PrefixStoreLookupResponse_Result{{Hit: true}}}, nil
		},
		store: func(_ int, stream pionv1.PrefixStore_StoreServer) error {
			l.asked.Add(1)
			return stream.SendAndClose(&pionv1.PrefixStoreStoreResponse{Namespace: "n"})
		},
	})
	go l.server.Serve(listener)
	t.Cleanup(l.server.Stop)
	return listener.Addr().String()
}

func TestANodeThatDiesFailsNoCallAndIsAskedAgainWhenItIsBack(t *testing.T) {
	var one, two lookingUp
	first, second := one.start(t, "127.0.0.1:0"), two.start(t, "127.0.0.1:0")
	client := dial(t, first+","+second, Options{})
	names := namesOf(t, first, first, second)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	lookUp := func(name string) {
		t.Helper()
		if _, err := client.Lookup(ctx, LookupRequest{Namespace: name}); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	for _, name := range names {
		lookUp(name)
	}
	if one.asked.Load() != 20 || two.asked.Load() != 0 {
		t.Fatalf("%d and %d were asked", one.asked.Load(), two.asked.Load())
	}
	one.server.Stop()
	for _, name := range names {
		lookUp(name)
	}
	if two.asked.Load() != 20 {
		t.Errorf("%d were asked of the other", two.asked.Load())
	}
	for i := range 10 { // streams find the other one as well
		request := sample("n", wire.F16, 10)
		request.TokenIDs[0] = uint32(100 + i)
		mustStore(t, client, request)
	}
	one.start(t, first)
	for before := one.asked.Load(); one.asked.Load() == before; {
		lookUp(names[0])
	}
	before := two.asked.Load()
	for _, name := range names {
		lookUp(name)
	}
	if n := two.asked.Load() - before; n != 0 {
		t.Errorf("%d calls still go to the other", n)
	}
}

func namesOf(t *testing.T, node string, nodes ...string) (names []string) {
	t.Helper()
	ring, err := wire.NewRing(nodes, func(string) bool { return false })
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; len(names) < 20; i++ {
		if name := fmt.Sprint(i); ring.Node(name) == node {
			names = append(names, name)
		}
	}
	return names
}

func TestANodeThatSaysNothingIsNotWaitedFor(t *testing.T) {
	var one, two lookingUp
	mute := startLink(t, one.start(t, "127.0.0.1:0"), new(link))
	mute.silent.Store(true)
	second := two.start(t, "127.0.0.1:0")
	client := dial(t, mute.address+","+second, Options{})
	for _, name := range namesOf(t, mute.address, mute.address, second) {
		if _, err := client.Lookup(t.Context(), LookupRequest{Namespace: name}); err != nil {
			t.Fatal(err)
		}
	}
	if two.asked.Load() != 20 {
		t.Errorf("%d were asked of the other", two.asked.Load())
	}
}

// TestANodeThatFallsSilentIsLeftOut runs with PION_LONG_TESTS=1: gRPC pings no sooner than after ten seconds.
func TestANodeThatFallsSilentIsLeftOut(t *testing.T) {
	if os.Getenv("PION_LONG_TESTS") == "" {
		t.Skip("PION_LONG_TESTS is not set")
	}
	var one, two lookingUp
	falling := startLink(t, one.start(t, "127.0.0.1:0"), new(link))
	second := two.start(t, "127.0.0.1:0")
	client := dial(t, falling.address+","+second, Options{})
	name := namesOf(t, falling.address, falling.address, second)[0]
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, asked := range []int64{0, 1} {
		if _, err := client.Lookup(ctx, LookupRequest{Namespace: name}); err != nil {
			t.Fatal(err)
		}
		if n := two.asked.Load(); n != asked {
			t.Errorf("%d were asked of the other", n)
		}
		falling.silent.Store(true)
	}
}

func TestACallThatOnlyItsCallerEndedSaysNothingAboutANode(t *testing.T) {
	var one, two lookingUp
	first, second := one.start(t, "127.0.0.1:0"), two.start(t, "127.0.0.1:0")
	client := dial(t, first+","+second, Options{})
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for i := range 20 {
		client.Lookup(ended, LookupRequest{Namespace: fmt.Sprint(i)})
		client.Lookup(t.Context(), LookupRequest{Namespace: "no\xff"})
	}
	if down := client.conn.(*nodes).down; len(down) > 0 {
		t.Errorf("%d are left out", len(down))
	}
}
