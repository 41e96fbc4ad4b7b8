package pion

import (
	"context"
	"errors"
	"fmt"
	"io"

	"pion-grpc/clients/go/pionv1"
	"pion-grpc/clients/go/wire"
)

// AttendEntry says where the entry of one layer stands, and its shape unless it is missing.
type AttendEntry struct {
	Layer   uint32
	State   pionv1.AttendState
	Heads   uint32
	Rows    uint64
	HeadDim uint32
}

// Warmed is what making entries resident came to.
type Warmed struct {
	Layers        uint32
	Skipped       uint32 // layers of the prefix that do not have the shape asked for
	ResidentBytes uint64
}

// AttendRows are K and V of one layer, head-major: [heads][rows][head dim].
type AttendRows struct {
	Layer   uint32
	Heads   uint32
	Rows    uint64
	HeadDim uint32
	K, V    []float32
}

// AttendPrefix names a stored prefix to make resident; zero fields take the stored layout's.
type AttendPrefix struct {
	Namespace string
	Heads     uint32
	HeadDim   uint32
	Layers    []uint32 // none means all
	// Generation that the rows must be of; 0 takes any.
	Generation uint64
	// Rows from the first one; layers with fewer are skipped. 0 takes all there are.
	Rows uint64
}

// AttendKind is which attention a query asks for: Dense, Fused, Sparse, SparseAuto or SparseAutoFused.
type AttendKind interface {
	set(*pionv1.AttendQueryRequest)
}

// Dense is attention over all rows.
type Dense struct{ Queries uint32 }

// Fused is attention over all rows and a causal suffix: [kv heads][suffix rows][head dim].
type Fused struct {
	Queries    uint32
	SuffixRows uint32
	K, V       []float32
}

// Sparse is attention over rows that the caller chooses; one query per head.
type Sparse struct {
	Indices        []int32  // [heads][IndicesPerHead]
	Counts         []uint32 // [heads]: how many of each head's indices count
	IndicesPerHead uint32
}

// SparseAuto is attention over the blocks that rank highest; one query per head.
type SparseAuto struct {
	BlockRows uint32
	Blocks    uint32
	Quest     bool // rank by the bounds of the keys instead of by their mean
}

// SparseAutoFused is SparseAuto with the whole suffix visible.
type SparseAutoFused struct {
	Choice     SparseAuto
	SuffixRows uint32
	K, V       []float32
}

// AttendQuery is one query: Q is [heads][queries][head dim].
type AttendQuery struct {
	Session    string
	Layer      uint32
	Heads      uint32
	HeadDim    uint32
	HeadMap    []byte   // the K/V head of each query head; none: h / (heads / kv heads)
	WindowRows *uint64  // only the last so many rows are visible; nil: the server's default
	Scale      *float32 // nil: 1/sqrt(head dim)
	Warm       bool     // make a cold entry resident first
	LogSumExp  bool     // also return it
	Kind       AttendKind
	Q          []float32
}

// AttendAnswer is what a query returns.
type AttendAnswer struct {
	// Out is [heads][queries][head dim].
	Out []float32
	// LogSumExp is [heads][queries] of the scaled scores, if asked for.
	LogSumExp []float32
}

// AttendStore makes rows resident.
func (c *Client) AttendStore(ctx context.Context, session string, rows AttendRows) (Warmed, error) {
	size := uint64(rows.Heads) * rows.Rows * uint64(rows.HeadDim)
	if uint64(len(rows.K)) != size || uint64(len(rows.V)) != size {
		return Warmed{}, invalid("k", "%d and %d values are not %d heads of %d rows of %d",
			len(rows.K), len(rows.V), rows.Heads, rows.Rows, rows.HeadDim)
	}
	header := &pionv1.AttendStoreHeader{Session: session, Source: &pionv1.AttendStoreHeader_Rows{
		Rows: &pionv1.AttendRows{Layer: rows.Layer, Heads: rows.Heads, Rows: rows.Rows, HeadDim: rows.HeadDim},
	}}
	return whole(c, ctx, func() (Warmed, error) { return c.warm(ctx, header, rows.K, rows.V) })
}

// AttendWarm makes a stored prefix resident. Reading it takes the server its time: Options.StallTimeout
// bounds it, besides the context.
func (c *Client) AttendWarm(ctx context.Context, session string, prefix AttendPrefix) (Warmed, error) {
	c.routes.warmed(session, prefix.Namespace) // to the node that holds it
	header := &pionv1.AttendStoreHeader{Session: session, Source: &pionv1.AttendStoreHeader_FromPrefix{
		FromPrefix: &pionv1.AttendFromPrefix{
			Namespace: prefix.Namespace, Heads: prefix.Heads, HeadDim: prefix.HeadDim, Layers: prefix.Layers,
			Generation: prefix.Generation, Rows: prefix.Rows,
		},
	}}
	return whole(c, ctx, func() (Warmed, error) { return c.warm(ctx, header) })
}

// warm makes one attempt.
func (c *Client) warm(
	ctx context.Context, header *pionv1.AttendStoreHeader, sides ...[]float32,
) (Warmed, error) {
	ctx, dog, end := c.watched(ctx)
	defer end()
	stream, err := c.attend.Store(c.Outgoing(ctx, c.routes.session(header.GetSession())))
	if err != nil {
		return Warmed{}, errorOf(ctx, err)
	}
	err = stream.Send(&pionv1.AttendStoreRequest{
		Message: &pionv1.AttendStoreRequest_Header{Header: header},
	})
	for i, side := range sides {
		for chunk := range chunks(wire.Bytes(side), uint32(i)) {
			if err != nil {
				break
			}
			dog.wind()
			err = stream.Send(&pionv1.AttendStoreRequest{
				Message: &pionv1.AttendStoreRequest_Bytes{Bytes: chunk},
			})
		}
	}
	if err != nil && err != io.EOF {
		return Warmed{}, errorOf(ctx, err)
	}
	dog.wind()
	answer, err := stream.CloseAndRecv()
	if err != nil {
		return Warmed{}, errorOf(ctx, err)
	}
	return Warmed{answer.GetLayerCount(), answer.GetSkippedCount(), answer.GetResidentBytes()}, nil
}

// AttendLookup says where entries stand, in the order of the layers.
func (c *Client) AttendLookup(ctx context.Context, session string, layers ...uint32) ([]AttendEntry, error) {
	request := &pionv1.AttendLookupRequest{Session: session, Layers: layers}
	answer, err := ask(c, ctx, c.routes.session(session), c.attend.Lookup, request)
	if err != nil {
		return nil, err
	}
	if len(answer.GetEntries()) != len(layers) {
		return nil, badAnswer("%d answers about %d layers", len(answer.GetEntries()), len(layers))
	}
	entries := make([]AttendEntry, len(layers))
	for i, entry := range answer.GetEntries() {
		entries[i] = AttendEntry{
			entry.GetLayer(), entry.GetState(), entry.GetHeads(), entry.GetRows(), entry.GetHeadDim(),
		}
	}
	return entries, nil
}

// AttendDrop forgets one layer of a session, or all with a nil layer. Returns how many there were.
func (c *Client) AttendDrop(ctx context.Context, session string, layer *uint32) (uint32, error) {
	request := &pionv1.AttendDropRequest{Session: session, Layer: layer}
	answer, err := once(c, ctx, c.routes.session(session), c.attend.Drop, request)
	return answer.GetDroppedCount(), err
}

// AttendQuery answers one query, as a call of its own. Whoever asks many opens an AttendStream.
func (c *Client) AttendQuery(ctx context.Context, query AttendQuery) (*AttendAnswer, error) {
	message, err := query.message()
	if err != nil {
		return nil, err
	}
	answer, err := ask(c, ctx, c.routes.session(query.Session), c.attend.Query, message)
	if err != nil {
		return nil, err
	}
	return answerOf(message, answer)
}

// AttendStream is an open stream of queries of one session. One goroutine may send while another
// receives; answers come in the order of the queries.
type AttendStream struct {
	ctx    context.Context
	end    context.CancelFunc
	stream pionv1.Attend_StreamClient
	sent   chan *pionv1.AttendStreamRequest // asked and not answered yet
	lastID uint64
	dog    *watchdog
}

// attendInFlightMax is how many queries may wait for their answers on one stream; Send then waits.
const attendInFlightMax = 1_024

// OpenAttendStream opens a stream of queries. It lives until Close, or as long as the context; the
// server cuts off one that nothing is asked on for its stall time.
func (c *Client) OpenAttendStream(ctx context.Context, session string) (*AttendStream, error) {
	ctx, dog, end := c.watched(ctx)
	dog.stop()
	stream, err := c.attend.Stream(c.Outgoing(ctx, c.routes.session(session)))
	if err != nil {
		end()
		return nil, errorOf(ctx, err)
	}
	sent := make(chan *pionv1.AttendStreamRequest, attendInFlightMax)
	return &AttendStream{ctx: ctx, end: end, stream: stream, sent: sent, dog: dog}, nil
}

// Close ends the stream.
func (s *AttendStream) Close() { s.end() }

// Send asks a query without waiting for its answer; returns the number that the answer will have.
func (s *AttendStream) Send(query AttendQuery) (uint64, error) {
	message, err := query.message()
	if err != nil {
		return 0, err
	}
	s.lastID++
	request := &pionv1.AttendStreamRequest{Id: s.lastID, Query: message}
	select {
	case s.sent <- request:
	case <-s.ctx.Done():
		return 0, endedBy(context.Cause(s.ctx))
	}
	if err := s.stream.Send(request); err != nil && err != io.EOF { // EOF: Recv says why
		return 0, errorOf(s.ctx, err)
	}
	return request.GetId(), nil
}

// Recv waits for the next answer; its number comes first. A *QueryError is about that query alone, and
// the stream goes on; any other ends it.
func (s *AttendStream) Recv() (uint64, *AttendAnswer, error) {
	s.dog.wind()
	response, err := s.stream.Recv()
	s.dog.stop()
	if err == io.EOF {
		return 0, nil, &Error{Reason: ReasonUnavailable, Message: "the server ended the stream", FromTransport: true}
	}
	if err != nil {
		return 0, nil, errorOf(s.ctx, err)
	}
	select {
	case asked := <-s.sent:
		if asked.GetId() != response.GetId() {
			s.end()
			return 0, nil, badAnswer("query %d was answered as %d", asked.GetId(), response.GetId())
		}
		if failed := response.GetError(); failed != nil {
			return asked.GetId(), nil, &QueryError{
				asked.GetId(), &Error{Reason: Reason(failed.GetReason()), Message: failed.GetMessage()},
			}
		}
		answer, err := answerOf(asked.GetQuery(), response.GetAnswer())
		return asked.GetId(), answer, err
	default:
		s.end()
		return 0, nil, badAnswer("an answer came to no question")
	}
}

// Query asks one query and waits for its answer. Not to be mixed with Send and Recv in flight.
func (s *AttendStream) Query(query AttendQuery) (*AttendAnswer, error) {
	if _, err := s.Send(query); err != nil {
		return nil, err
	}
	_, answer, err := s.Recv()
	return answer, err
}

// QueryError is what one query of a stream failed with; the stream goes on.
type QueryError struct {
	ID  uint64
	Err *Error
}

// Error returns the error's text with the number of the query.
func (q *QueryError) Error() string { return fmt.Sprintf("query %d: %v", q.ID, q.Err) }

// Unwrap returns the error.
func (q *QueryError) Unwrap() error { return q.Err }

// IsQueryError tells whether an error of Recv or Query is about one query, and the stream goes on.
func IsQueryError(err error) bool {
	var failed *QueryError
	return errors.As(err, &failed)
}

func (q AttendQuery) message() (*pionv1.AttendQueryRequest, error) {
	if q.Kind == nil {
		return nil, invalid("kind", "is missing")
	}
	message := &pionv1.AttendQueryRequest{
		Session:    q.Session,
		Layer:      q.Layer,
		Heads:      q.Heads,
		HeadDim:    q.HeadDim,
		HeadMap:    q.HeadMap,
		WindowRows: q.WindowRows,
		Scale:      q.Scale,
		Warm:       q.Warm,
		LogSumExp:  q.LogSumExp,
		Data:       wire.Bytes(q.Q),
	}
	q.Kind.set(message)
	return message, checkText(message.ProtoReflect())
}

func answerOf(asked *pionv1.AttendQueryRequest, answer *pionv1.AttendQueryResponse) (*AttendAnswer, error) {
	if len(answer.GetData()) != len(asked.GetData()) {
		return nil, badAnswer("%d bytes answer %d", len(answer.GetData()), len(asked.GetData()))
	}
	wanted := 0
	if asked.GetLogSumExp() && asked.GetHeadDim() > 0 {
		wanted = len(asked.GetData()) / int(asked.GetHeadDim())
	}
	if len(answer.GetLogSumExp()) != wanted {
		return nil, badAnswer("%d bytes of log-sum-exp, not %d", len(answer.GetLogSumExp()), wanted)
	}
	out, err := wire.View[float32](answer.GetData())
	if err != nil {
		return nil, badAnswer("%v", err)
	}
	lse, err := wire.View[float32](answer.GetLogSumExp())
	if err != nil {
		return nil, badAnswer("%v", err)
	}
	return &AttendAnswer{out, lse}, nil
}

func (k Dense) set(q *pionv1.AttendQueryRequest) {
	q.Kind = &pionv1.AttendQueryRequest_Dense{Dense: &pionv1.AttendDense{Queries: k.Queries}}
}

func (k Fused) set(q *pionv1.AttendQueryRequest) {
	q.Kind = &pionv1.AttendQueryRequest_Fused{Fused: &pionv1.AttendFused{
		Queries: k.Queries, SuffixRows: k.SuffixRows, SuffixK: wire.Bytes(k.K), SuffixV: wire.Bytes(k.V),
	}}
}

func (k Sparse) set(q *pionv1.AttendQueryRequest) {
	q.Kind = &pionv1.AttendQueryRequest_Sparse{Sparse: &pionv1.AttendSparse{
		Indices: packed(k.Indices), Counts: packed(k.Counts), IndicesPerHead: k.IndicesPerHead,
	}}
}

func (k SparseAuto) set(q *pionv1.AttendQueryRequest) {
	q.Kind = &pionv1.AttendQueryRequest_SparseAuto{SparseAuto: k.choice()}
}

func (k SparseAutoFused) set(q *pionv1.AttendQueryRequest) {
	q.Kind = &pionv1.AttendQueryRequest_SparseAutoFused{SparseAutoFused: &pionv1.AttendSparseAutoFused{
		Choice: k.Choice.choice(), SuffixRows: k.SuffixRows, SuffixK: wire.Bytes(k.K), SuffixV: wire.Bytes(k.V),
	}}
}

func (k SparseAuto) choice() *pionv1.AttendSparseAuto {
	selector := pionv1.AttendSelector_ATTEND_SELECTOR_MEAN
	if k.Quest {
		selector = pionv1.AttendSelector_ATTEND_SELECTOR_QUEST
	}
	return &pionv1.AttendSparseAuto{BlockRows: k.BlockRows, Blocks: k.Blocks, Selector: selector}
}

func packed[T int32 | uint32](numbers []T) []byte {
	unsigned := make([]uint32, len(numbers))
	for i, number := range numbers {
		unsigned[i] = uint32(number)
	}
	return wire.PackTokenIDs(unsigned)
}
