package pion

import (
	"context"
	"iter"
	"slices"
	"strings"

	"pion-grpc/clients/go/pionv1"
	"pion-grpc/clients/go/wire"
)

// MatchRequest asks for the longest stored prefix of a token sequence.
type MatchRequest struct {
	Model    string
	TokenIDs []uint32
	// Fidelities that may answer; none means "raw", what was stored without loss.
	Fidelities []string
	// MinTokens makes a shorter match a miss.
	MinTokens uint64
	// LeaseMS is how long it stays readable: nil means 10,000, 0 not at all, at most 60,000.
	LeaseMS *uint32
	// PartKinds are needed at the boundary.
	PartKinds []string
}

// Match is the longest match.
type Match struct {
	// Hit tells whether there is one; Reason why not, or why it is shorter than the prompt.
	Hit    bool
	Reason MissReason
	// Prefix is the one to fetch; with a miss the nearest stored one, if any.
	Prefix *PrefixInfo
	// RequestedTokens were asked for, MatchedTokens are in common, ServedTokens may be fetched.
	RequestedTokens uint64
	MatchedTokens   uint64
	ServedTokens    uint64
	// ShortenedBy is the kind of part that made ServedTokens fewer.
	ShortenedBy string
	// LongestNamespace has the most tokens in common, LongestTokens, whatever parts it has, with a hit or
	// without; empty if there is none. A Store of the prompt with it as Parent keeps none of these rows twice.
	LongestNamespace string
	LongestTokens    uint64
	LeaseID          []byte
}

// Match finds the longest stored prefix of a token sequence.
func (c *Client) Match(ctx context.Context, request MatchRequest) (*Match, error) {
	if len(request.TokenIDs) == 0 || len(request.TokenIDs) > wire.TokensMax {
		return nil, invalid("token_ids", "%d of them; 1 to %d", len(request.TokenIDs), wire.TokensMax)
	}
	route := wire.RouteKey(c.options.Tenant, request.Model, request.TokenIDs)
	answer, err := ask(c, ctx, route, c.prefixes.Match, &pionv1.PrefixStoreMatchRequest{
		ModelId:    request.Model,
		TokenIds:   wire.PackTokenIDs(request.TokenIDs),
		Fidelities: request.Fidelities,
		MinTokens:  request.MinTokens,
		LeaseMs:    request.LeaseMS,
		PartKinds:  request.PartKinds,
	})
	if err != nil {
		return nil, err
	}
	match := &Match{
		Hit:              answer.GetHit(),
		Reason:           answer.GetReason(),
		RequestedTokens:  answer.GetRequestedTokens(),
		MatchedTokens:    answer.GetMatchedTokens(),
		ServedTokens:     answer.GetServedTokens(),
		ShortenedBy:      answer.GetShortenedBy(),
		LongestNamespace: answer.GetLongestNamespace(),
		LongestTokens:    answer.GetLongestTokens(),
		LeaseID:          answer.GetLeaseId(),
	}
	if match.Prefix, err = someInfo(answer.GetPrefix()); err != nil {
		return nil, err
	}
	if match.Hit {
		if match.Prefix == nil {
			return nil, badAnswer("a hit names no prefix")
		}
		c.routes.follow(match.Prefix.Namespace, match.LeaseID, route)
	}
	if match.LongestNamespace != "" {
		c.routes.follow(match.LongestNamespace, nil, route)
	}
	return match, nil
}

// LookupRequest asks what is stored under a name, and whether it is what is expected.
type LookupRequest struct {
	Namespace string
	// Model, TokenIDs and Layout are what is expected, as far as given; else it is a miss.
	Model    string
	TokenIDs []uint32
	Layout   wire.Layout
	// LeaseMS is how long a hit stays readable, at most 60,000.
	LeaseMS uint32
}

// Lookup is what was found under a name.
type Lookup struct {
	// Hit tells whether it is what was expected; Reason why not.
	Hit    bool
	Reason MissReason
	// Prefix is what is stored there; nil if nothing is.
	Prefix *PrefixInfo
	// FirstDifference is the index of the first token that differs, where they do.
	FirstDifference uint64
	LeaseID         []byte
}

// Lookup says what is stored under a name.
func (c *Client) Lookup(ctx context.Context, request LookupRequest) (*Lookup, error) {
	query := &pionv1.PrefixStoreLookupRequest_Query{
		Namespace: request.Namespace,
		ModelId:   request.Model,
		TokenIds:  wire.PackTokenIDs(request.TokenIDs),
	}
	if request.Layout != nil {
		query.Layout = layoutMessage(request.Layout)
	}
	routes := c.routes.where(request.Namespace)
	if request.Model != "" && len(request.TokenIDs) > 0 {
		routes = []string{wire.RouteKey(c.options.Tenant, request.Model, request.TokenIDs)}
	}
	var lookup *Lookup
	for _, route := range routes {
		var err error
		if lookup, err = c.lookUp(ctx, query, request.LeaseMS, route); err != nil {
			return nil, err
		}
		if lookup.Hit {
			c.routes.follow(request.Namespace, lookup.LeaseID, route)
		}
		if lookup.Hit || lookup.Prefix != nil {
			break
		}
	}
	return lookup, nil
}

func (c *Client) lookUp(
	ctx context.Context, query *pionv1.PrefixStoreLookupRequest_Query, leaseMS uint32, route string,
) (*Lookup, error) {
	answer, err := ask(c, ctx, route, c.prefixes.Lookup, &pionv1.PrefixStoreLookupRequest{
		Queries: []*pionv1.PrefixStoreLookupRequest_Query{query},
		LeaseMs: leaseMS,
	})
	if err != nil {
		return nil, err
	}
	if n := len(answer.GetResults()); n != 1 {
		return nil, badAnswer("%d answers to one query", n)
	}
	result := answer.GetResults()[0]
	lookup := &Lookup{
		Hit:             result.GetHit(),
		Reason:          result.GetReason(),
		FirstDifference: result.GetFirstDifference(),
		LeaseID:         result.GetLeaseId(),
	}
	lookup.Prefix, err = someInfo(result.GetPrefix())
	return lookup, err
}

// Drop takes names away, and tells for each whether anything was stored under it.
func (c *Client) Drop(ctx context.Context, namespaces ...string) ([]bool, error) {
	if len(namespaces) == 0 {
		return nil, nil
	}
	request := &pionv1.PrefixStoreDropRequest{Namespaces: namespaces}
	dropped := make([]bool, len(namespaces))
	for _, route := range c.routes.all(c.routes.prefix(namespaces[0])) {
		answer, err := once(c, ctx, route, c.prefixes.Drop, request)
		if err != nil {
			return nil, err
		}
		if len(answer.GetResults()) != len(namespaces) {
			return nil, badAnswer("%d answers about %d names", len(answer.GetResults()), len(namespaces))
		}
		for i, result := range answer.GetResults() {
			dropped[i] = dropped[i] || result.GetDropped()
		}
	}
	return dropped, nil
}

// List yields what is visible, ordered by name: names that begin with a prefix, or all. It asks for a
// page when it is needed, and ends with the first error. What several nodes hold is listed once.
func (c *Client) List(ctx context.Context, prefix string) iter.Seq2[PrefixInfo, error] {
	routes := c.routes.all(prefix)
	if len(routes) == 1 {
		return c.listed(ctx, prefix, routes[0])
	}
	return func(yield func(PrefixInfo, error) bool) {
		type listing struct {
			info PrefixInfo
			err  error
			next func() (PrefixInfo, error, bool)
		}
		var listings []*listing // each with its next one
		for _, route := range routes {
			next, stop := iter.Pull2(c.listed(ctx, prefix, route))
			defer stop()
			if info, err, ok := next(); ok {
				listings = append(listings, &listing{info, err, next})
			}
		}
		for last, any := "", false; len(listings) > 0; {
			first := slices.MinFunc(listings, func(a, b *listing) int { // errors have no name: they come first
				return strings.Compare(a.info.Namespace, b.info.Namespace)
			})
			again := any && first.err == nil && first.info.Namespace == last
			if !again && (!yield(first.info, first.err) || first.err != nil) {
				return
			}
			last, any = first.info.Namespace, true
			var ok bool
			if first.info, first.err, ok = first.next(); !ok {
				listings = slices.DeleteFunc(listings, func(l *listing) bool { return l == first })
			}
		}
	}
}

func (c *Client) listed(ctx context.Context, prefix, route string) iter.Seq2[PrefixInfo, error] {
	return func(yield func(PrefixInfo, error) bool) {
		request := &pionv1.PrefixStoreListRequest{PageSize: wire.NamesMax, NamespacePrefix: prefix}
		for {
			page, err := ask(c, ctx, route, c.prefixes.List, request)
			if err != nil {
				yield(PrefixInfo{}, err)
				return
			}
			for _, message := range page.GetPrefixes() {
				info, err := infoOf(message)
				if !yield(info, err) || err != nil {
					return
				}
			}
			if page.GetNextPageToken() == "" {
				return
			}
			request.PageToken = page.GetNextPageToken()
		}
	}
}

// Registration declares a prefix before there are rows.
type Registration struct {
	Namespace string
	Layout    wire.Layout
	Model     string
	Table     *BlockTable
	PrefillMS float64
	// TokenIDs are those that will be stored, of the same model, or at least their first 64. They are not
	// sent: they say which node of a mesh Store will go to. Without them the node is the name's, and what
	// is declared there binds nothing that is stored elsewhere.
	TokenIDs []uint32
}

// Register declares layout, table and prefill time of a prefix; says where it stands, and its generation.
func (c *Client) Register(ctx context.Context, registration Registration) (State, uint64, error) {
	if len(registration.TokenIDs) > 0 {
		route := wire.RouteKey(c.options.Tenant, registration.Model, registration.TokenIDs)
		c.routes.follow(registration.Namespace, nil, route)
	}
	route := c.routes.prefix(registration.Namespace)
	answer, err := once(c, ctx, route, c.prefixes.Register, &pionv1.PrefixStoreRegisterRequest{
		Namespace: registration.Namespace,
		Layout:    layoutMessage(registration.Layout),
		ModelId:   registration.Model,
		Table:     registration.Table.message(),
		PrefillMs: registration.PrefillMS,
	})
	return answer.GetState(), answer.GetGeneration(), err
}

// Sync returns when everything acknowledged before is on stable storage, on every node.
func (c *Client) Sync(ctx context.Context) error {
	for _, ctx := range c.each(ctx) {
		if _, err := ask(c, ctx, "", c.prefixes.Sync, &pionv1.PrefixStoreSyncRequest{}); err != nil {
			return err
		}
	}
	return nil
}

func someInfo(message *pionv1.PrefixInfo) (*PrefixInfo, error) {
	if message == nil {
		return nil, nil
	}
	info, err := infoOf(message)
	return &info, err
}
