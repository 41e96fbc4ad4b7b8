package pion

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"

	"pion-grpc/clients/go/pionv1"
	"pion-grpc/clients/go/wire"
)

// Defaults of Options.
const (
	DefaultTimeout       = 5 * time.Second
	DefaultStallTimeout  = 30 * time.Second
	DefaultFetchBytesMax = 16 << 30
)

const (
	windowBytes     = 16 << 20 // of a stream: what a fast network can have in flight
	bufferBytes     = 256 << 10
	messageBytesMax = 66 << 20 // answers of Attend are as large as its queries
)

// pings find a machine that went without a word, minutes before TCP gives it up. gRPC pings no more often.
func pings(timeout time.Duration) grpc.DialOption {
	return grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: timeout})
}

// Options of a client; the zero value suits a server on this host.
type Options struct {
	// TLS encrypts the connection; nil: plain. TLSFromFiles makes one.
	TLS *tls.Config
	// TLSFiles encrypts the connection instead of TLS, with what is in files whenever one is made: neither
	// a renewed certificate nor another authority needs a restart.
	TLSFiles *TLSFiles
	// Tenant and Password are the credentials; an empty password sends none.
	Tenant   string
	Password string
	// Timeout of a call with one answer whose context has no deadline.
	Timeout time.Duration
	// StallTimeout ends a stream on which nothing moved for so long.
	StallTimeout time.Duration
	// FetchBytesMax refuses a prefix that is larger, before memory is allocated.
	FetchBytesMax uint64
	// DialOptions are passed on to gRPC.
	DialOptions []grpc.DialOption
}

// Client talks to one server, or to a mesh behind one address. It is safe for concurrent use.
type Client struct {
	options  Options
	conn     channel
	prefixes pionv1.PrefixStoreClient
	attend   pionv1.AttendClient
	states   pionv1.SSMStateClient
	stats    pionv1.StatsClient
	routes   routing
	away     *absence
}

// Dial makes a client for "host:port" or "unix:/path", of one server or of a proxy that knows the nodes of a
// mesh. It does not wait for the server: the first call connects.
//
// With "host:port,host:port" it is a client of all nodes of a mesh, each as it is named everywhere: every call
// goes to the node that a proxy would send it to. An address of a proxy has no place in such a list.
func Dial(address string, options Options) (*Client, error) {
	options.Timeout = orDefault(options.Timeout, DefaultTimeout)
	options.StallTimeout = orDefault(options.StallTimeout, DefaultStallTimeout)
	options.FetchBytesMax = orDefault(options.FetchBytesMax, DefaultFetchBytesMax)

	secure, err := options.credentials()
	if err != nil {
		return nil, err
	}
	names := strings.Split(address, ",")
	if strings.HasPrefix(address, "unix:") {
		names = []string{address}
	}
	giveUp := 5 * time.Second
	if len(names) > 1 { // a node that is switched off is not waited for: there are others
		giveUp = time.Second
	}
	dialOptions := []grpc.DialOption{
		grpc.WithTransportCredentials(secure),
		grpc.WithUserAgent("pion-go"),
		grpc.WithInitialWindowSize(windowBytes),
		grpc.WithInitialConnWindowSize(windowBytes),
		grpc.WithReadBufferSize(bufferBytes),
		grpc.WithWriteBufferSize(bufferBytes),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(messageBytesMax)),
		// A server that comes back is found at once: sooner than tries end.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 200 * time.Millisecond,
			},
			MinConnectTimeout: giveUp,
		}),
		// Waiting for a retry policy of a name server would cost its look-up.
		grpc.WithDisableServiceConfig(),
	}
	away := new(absence)
	dialOptions = append(dialOptions, checked(away)...)
	conn, err := connect(names, append(dialOptions, options.DialOptions...))
	if err != nil {
		return nil, err
	}
	routes := newRouting()
	if several, ok := conn.(*nodes); ok {
		routes.everywhere = several.ring(func(string) bool { return false }).Routes()
	}
	return &Client{
		options:  options,
		conn:     conn,
		prefixes: pionv1.NewPrefixStoreClient(conn),
		attend:   pionv1.NewAttendClient(conn),
		states:   pionv1.NewSSMStateClient(conn),
		stats:    pionv1.NewStatsClient(conn),
		routes:   routes,
		away:     away,
	}, nil
}

// connect returns the channel of one address, or of several.
func connect(names []string, options []grpc.DialOption) (channel, error) {
	conns := map[string]*grpc.ClientConn{}
	all := newNodes(names, conns)
	for _, name := range names {
		target, local, err := targetOf(name)
		if err == nil && conns[name] != nil {
			err = fmt.Errorf("%s is named twice", name)
		}
		if err == nil {
			options := options
			if local { // a proxy elsewhere cannot reach this host's loopback
				options = append([]grpc.DialOption{grpc.WithNoProxy()}, options...)
			}
			switch {
			case len(names) > 1:
				options = append([]grpc.DialOption{pings(5 * time.Second)}, options...)
			case !local: // over a slow link, perhaps
				options = append([]grpc.DialOption{pings(20 * time.Second)}, options...)
			}
			conns[name], err = grpc.NewClient(target, options...)
		}
		if err != nil {
			delete(conns, name)
			all.Close()
			return nil, fmt.Errorf("pion: %w", err)
		}
	}
	if len(names) == 1 {
		return conns[names[0]], nil
	}
	return all, nil
}

// Close ends every call and the connection.
func (c *Client) Close() error { return c.conn.Close() }

// Conn returns the connection, for calls that this package has no method for. Such calls take their
// context from Outgoing.
func (c *Client) Conn() grpc.ClientConnInterface { return c.conn }

// Outgoing returns a context with the metadata that every call carries: who asks, and where a proxy
// shall send it. A route is a name, or wire.RouteKey where token ids are known; what is beyond 200
// characters of it does not count.
func (c *Client) Outgoing(ctx context.Context, route string) context.Context {
	pairs := []string{"pion-route", wire.RouteMetadata(cut(route))}
	if c.options.Password != "" {
		pair := c.options.Tenant + ":" + c.options.Password
		pairs = append(pairs, "authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(pair)))
	}
	return metadata.AppendToOutgoingContext(ctx, pairs...)
}

const hostCharacters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._"

// targetOf returns gRPC's name for an address, and whether it can only be this host.
func targetOf(address string) (target string, local bool, err error) {
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		path = strings.TrimPrefix(path, "//")
		if path == "" {
			return "", false, fmt.Errorf("unix: needs a path")
		}
		return "unix:" + path, true, nil
	}
	host, port, err := net.SplitHostPort(address)
	number, bad := strconv.ParseUint(port, 10, 16)
	ip, notIP := netip.ParseAddr(host)
	named := host != "" && strings.Trim(host, hostCharacters) == ""
	if err != nil || bad != nil || number == 0 || (notIP != nil && !named) {
		return "", false, fmt.Errorf("%q is neither host:port nor unix:/path", address)
	}
	local = host == "localhost" || (notIP == nil && ip.IsLoopback())
	return "dns:///" + strings.ReplaceAll(address, "%", "%25"), local, nil // it is a URL; a zone has a %
}

func orDefault[T comparable](value, otherwise T) T {
	if value == *new(T) {
		return otherwise
	}
	return value
}
