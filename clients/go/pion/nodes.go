package pion

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"pion-grpc/clients/go/wire"
)

// downFirst is how long a node is left alone after a call that did not reach it; doubled as long as none
// does.
const downFirst, downMax = time.Second, 16 * time.Second

// ringsMax is how many rings are kept, one for each set of nodes that are down.
const ringsMax = 32

// channel is what calls are made on.
type channel interface {
	grpc.ClientConnInterface
	Close() error
}

// nodes are several servers as one channel: each call goes to the node that its route belongs to, which is
// where a proxy would send it. Whether a call is made again is its caller's business.
type nodes struct {
	names []string
	conns map[string]*grpc.ClientConn

	mutex sync.Mutex
	down  map[string]*pausing
	rings map[string]*wire.Ring // by those that are left out
}

// pausing is a node that is left alone.
type pausing struct {
	again time.Time // when it is tried
	pause time.Duration
	tried bool // a call is on its way to it, to see
}

func newNodes(names []string, conns map[string]*grpc.ClientConn) *nodes {
	return &nodes{names: names, conns: conns, down: map[string]*pausing{}, rings: map[string]*wire.Ring{}}
}

// Close ends every call, to every node.
func (n *nodes) Close() error {
	var failed []error
	for _, conn := range n.conns {
		failed = append(failed, conn.Close())
	}
	return errors.Join(failed...)
}

// node returns the node of a route, of those that are up; now and then one that may be up again. It is one
// of its own calls that a node is tried with: all others keep to the ring without it until it has answered,
// or they would go back and forth between two rings.
func (n *nodes) node(route string) string {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	now := time.Now()
	waits := func(name string) bool { return n.down[name] != nil && now.Before(n.down[name].again) }
	if name := n.ring(waits).Node(route); n.down[name] != nil && !waits(name) {
		n.down[name].again, n.down[name].tried = now.Add(downMax), true
		return name
	}
	return n.ring(func(name string) bool { return n.down[name] != nil }).Node(route)
}

func (n *nodes) ring(down func(name string) bool) *wire.Ring {
	var key strings.Builder
	for _, name := range n.names {
		if down(name) {
			key.WriteString(name + ",")
		}
	}
	ring, ok := n.rings[key.String()]
	if !ok {
		if len(n.rings) >= ringsMax {
			clear(n.rings)
		}
		ring, _ = wire.NewRing(n.names, down) // Dial has checked the names
		n.rings[key.String()] = ring
	}
	return ring
}

// note notes how a call to a node ended.
func (n *nodes) note(name string, err error) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	known := n.down[name]
	switch code := status.Code(err); {
	case errors.Is(err, ReasonInvalid), code == codes.Canceled, code == codes.DeadlineExceeded:
		// What our own side says: whether there is a node at the other end remains open.
	case code != codes.Unavailable:
		delete(n.down, name)
	case known == nil:
		n.down[name] = &pausing{again: time.Now().Add(downFirst), pause: downFirst}
	case known.tried: // else a call that was on its way when the first one failed
		pause := min(2*known.pause, downMax)
		n.down[name] = &pausing{again: time.Now().Add(pause), pause: pause}
	}
}

// toNode is the key of a context's value: the node that its calls go to, whatever their route.
type toNode struct{}

// each returns a context for each node, as it is named, whether it is up or not: for what is asked about nodes, and
// of which no other can stand in. Of one server, or of a proxy whose nodes are not known, there is one.
func (c *Client) each(ctx context.Context) []context.Context {
	several, ok := c.conn.(*nodes)
	if !ok {
		return []context.Context{ctx}
	}
	var each []context.Context
	for _, name := range several.names {
		each = append(each, context.WithValue(ctx, toNode{}, name))
	}
	return each
}

func (n *nodes) of(ctx context.Context) string {
	if name, ok := ctx.Value(toNode{}).(string); ok {
		return name
	}
	sent, _ := metadata.FromOutgoingContext(ctx)
	return n.node(strings.Join(sent.Get("pion-route"), ""))
}

// Invoke makes a call with one answer.
func (n *nodes) Invoke(ctx context.Context, method string, request, answer any, options ...grpc.CallOption) error {
	name := n.of(ctx)
	err := n.conns[name].Invoke(ctx, method, request, answer, options...)
	n.note(name, err)
	return err
}

// NewStream opens a stream.
func (n *nodes) NewStream(
	ctx context.Context, desc *grpc.StreamDesc, method string, options ...grpc.CallOption,
) (grpc.ClientStream, error) {
	name := n.of(ctx)
	stream, err := n.conns[name].NewStream(ctx, desc, method, options...)
	if err != nil {
		n.note(name, err)
		return nil, err
	}
	return notedStream{stream, n, name}, nil
}

// notedStream is a stream whose end is noted.
type notedStream struct {
	grpc.ClientStream
	nodes *nodes
	name  string
}

func (s notedStream) RecvMsg(message any) error {
	err := s.ClientStream.RecvMsg(message)
	if err == io.EOF {
		s.nodes.note(s.name, nil)
	} else {
		s.nodes.note(s.name, err)
	}
	return err
}
