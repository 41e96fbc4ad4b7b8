package pion

import (
	"context"
	"fmt"
	"net"
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
	ring, err := wire.NewRing([]string{first, second}, func(string) bool { return false })
	if err != nil {
		t.Fatal(err)
	}
	var names []string // of the first
	for i := 0; len(names) < 20; i++ {
		if name := fmt.Sprint(i); ring.Node(name) == first {
			names = append(names, name)
		}
	}
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
