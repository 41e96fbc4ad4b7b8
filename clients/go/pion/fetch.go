package pion

import (
	"context"
	"errors"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"

	"pion-grpc/clients/go/pionv1"
	"pion-grpc/clients/go/wire"
)

// FetchRequest says what to bring back.
type FetchRequest struct {
	// Namespace names the prefix, or LeaseID: what Match or Lookup gave.
	Namespace string
	LeaseID   []byte
	// Begin and End are the rows, half-open; an end of 0 is the last row.
	Begin, End uint64
	// Slots are those wanted; none means all.
	Slots []uint32
	// PartKinds are the kinds of parts to bring along. Rows never come without them: where End is 0, they
	// end where Match would say; an End that has not every kind is a miss.
	PartKinds []string
	// Into returns the memory for the rows of a tensor: at least so many bytes. Without it, or where it
	// returns nil, memory is allocated. It is asked for all tensors again if the prefix was replaced on
	// the way. After an error, what is in that memory is of no use.
	Into func(tensor wire.TensorLayout, bytes int) []byte
	// Progress is called with the bytes here and those in all. An error abandons the fetch, which then
	// returns it as it is.
	Progress func(done, total uint64) error
}

// Prefix is what a Fetch brought.
type Prefix struct {
	// Hit tells whether anything did; Reason why not, or why the rows end before the prefix does.
	Hit    bool
	Reason MissReason
	// ShortenedBy is the kind of part that was missing there.
	ShortenedBy string

	Info PrefixInfo
	// Begin and End are the rows that are here.
	Begin, End uint64
	// TokenIDs are those from row 0 to End; none unless all are known.
	TokenIDs []uint32
	// Tensors have their Data, unless they were written to an io.Writer; so do Parts.
	Tensors []Tensor
	Parts   []Part
	// TotalBytes is the size of all rows and parts.
	TotalBytes uint64
}

// Fetch brings a prefix back, whole and with the bits that were stored. A stream that breaks goes on
// where it broke. What was evicted or found damaged a moment ago is a miss.
func (c *Client) Fetch(ctx context.Context, request FetchRequest) (*Prefix, error) {
	return c.fetch(ctx, request, &memory{into: request.Into})
}

// FetchTo writes rows, tensor after tensor, and then parts to a writer while they arrive; it needs
// memory for a few chunks, whatever the size. What has been written when an error is returned is a
// beginning, each byte of it checked. An error of the writer or of begin is returned as it is. If the prefix changes on the way, that is an error
// (ReasonGeneration), as what was written cannot be taken back. Into does not count.
//
// begin, if not nil, is called once before the first byte, with what will come.
func (c *Client) FetchTo(
	ctx context.Context, request FetchRequest, w io.Writer, begin func(*Prefix) error,
) (*Prefix, error) {
	return c.fetch(ctx, request, &writing{w: w, first: begin})
}

func (c *Client) fetch(ctx context.Context, request FetchRequest, to destination) (*Prefix, error) {
	if (request.Namespace == "") == (len(request.LeaseID) == 0) {
		return nil, invalid("namespace", "either a namespace or a lease id is needed")
	}
	if request.Namespace == "" {
		return c.fetchAt(ctx, request, to, c.routes.lease(request.LeaseID))
	}
	var prefix *Prefix
	for _, route := range c.routes.where(request.Namespace) {
		var err error
		if prefix, err = c.fetchAt(ctx, request, to, route); err != nil {
			return nil, err
		}
		if prefix.Hit {
			c.routes.follow(request.Namespace, nil, route)
			break
		}
	}
	return prefix, nil
}

func (c *Client) fetchAt(ctx context.Context, request FetchRequest, to destination, route string) (*Prefix, error) {
	taken := &reception{request: &request, to: to, bytesMax: c.options.FetchBytesMax}
	patient := c.patience(ctx)
	fruitless := 0
	for !taken.ended() {
		before := taken.done
		err := c.receive(ctx, taken, route)
		if own, ok := err.(ofCaller); ok {
			return nil, own.error
		}
		if taken.ended() {
			break // only the end of the stream was lost
		}
		if err == nil {
			err = badAnswer("the stream ended before everything that was announced came")
		}
		if taken.done > before {
			fruitless = 0
		} else {
			fruitless++
		}
		if errors.Is(err, ReasonNotStored) || errors.Is(err, ReasonEvicted) || errors.Is(err, ReasonCorrupt) {
			return &Prefix{Reason: pionv1.MissReason_MISS_REASON_NOT_STORED}, to.missed(err)
		}
		if !taken.resumes(ctx, err, fruitless, patient) {
			return nil, err
		}
	}
	return taken.prefix, nil
}

// receive takes one stream.
func (c *Client) receive(ctx context.Context, taken *reception, route string) error {
	ctx, dog, end := c.watched(ctx)
	defer end()
	stream, err := c.openFrames(ctx, &fetchStream, pionv1.PrefixStore_Fetch_FullMethodName, route)
	if err != nil {
		return errorOf(ctx, err)
	}
	if err := stream.SendMsg(taken.ask()); err != nil && err != io.EOF {
		return errorOf(ctx, err)
	}
	if err := stream.CloseSend(); err != nil {
		return errorOf(ctx, err)
	}
	for {
		var message frame
		dog.wind()
		err := stream.RecvMsg(&message)
		dog.stop()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return errorOf(ctx, err)
		}
		if cause := context.Cause(ctx); cause != nil { // what is buffered would still come
			err = endedBy(cause)
		} else {
			err = taken.take(message.buffer.ReadOnlyData())
		}
		message.buffer.Free()
		if err != nil {
			return err
		}
	}
}

// piece is a tensor or a part, in the order of the stream.
type piece struct {
	isPart   bool
	number   uint64 // among the tensors, or among the parts
	size     uint64
	unit     uint64 // bytes of a row; 1 for a part
	firstRow uint64 // what the first row counts as; 0 for a part
}

// reception is a fetch in progress, over as many streams as it takes. The stream has one order, so where
// it stands is one number, and the same number says what to ask for after a break. A chunk is taken only
// if it is exactly the next one: place and size first, then its checksum, then the copy.
type reception struct {
	request  *FetchRequest
	to       destination
	bytesMax uint64

	prefix *Prefix // what was announced; nil before
	pieces []piece // those that are not complete
	filled uint64  // bytes of the first of them
	done   uint64  // bytes in all
	headed bool    // whether this stream has had its header
}

func (r *reception) ended() bool {
	return r.prefix != nil && (!r.prefix.Hit || len(r.pieces) == 0)
}

// ask returns the request for what is still missing. A header comes first again.
func (r *reception) ask() *pionv1.PrefixStoreFetchRequest {
	r.headed = false
	asked := &pionv1.PrefixStoreFetchRequest{
		Namespace: r.request.Namespace,
		LeaseId:   r.request.LeaseID,
		Slots:     r.request.Slots,
		PartKinds: r.request.PartKinds,
	}
	if r.request.Begin != 0 || r.request.End != 0 {
		asked.Rows = &pionv1.RowRange{Begin: r.request.Begin, End: r.request.End}
	}
	if r.prefix == nil {
		return asked
	}
	asked.Generation = r.prefix.Info.Generation
	// Those announced: a live prefix may have got more meanwhile, under the same generation.
	asked.Rows = &pionv1.RowRange{Begin: r.prefix.Begin, End: r.prefix.End}
	if next := r.pieces[0]; next.isPart {
		asked.ResumePart = uint32(next.number) + 1
		asked.ResumePartOffsetBytes = r.filled
	} else {
		asked.ResumeTensorIndex = uint32(next.number)
		asked.ResumeRow = next.firstRow + r.filled/next.unit
	}
	return asked
}

// resumes gets ready to ask for the rest, if there is a point in it.
func (r *reception) resumes(ctx context.Context, err error, fruitless int, patient *patience) bool {
	switch {
	case errors.Is(err, ReasonGeneration) && r.prefix != nil && r.to.restarts():
		// Another prefix has taken the name meanwhile: that one, then.
		*r = reception{request: r.request, to: r.to, bytesMax: r.bytesMax}
		return fruitless < triesMax
	case errors.Is(err, errDamaged):
		return fruitless < triesMax
	}
	return pause(ctx, err, fruitless, patient)
}

const goneMessage = "the stream broke, and where it was to go on the prefix is not: it is gone, or this is another node"

// errDamaged marks a chunk that arrived damaged: it is asked for again.
var errDamaged = errors.New("a chunk arrived with another checksum than it was sent with")

// take takes the next message of a stream.
func (r *reception) take(data []byte) error {
	message, err := wire.ParseMessage(data)
	switch {
	case err != nil:
		return badAnswer("%v", err)
	case message.Header != nil:
		return r.takeHeader(message.Header)
	case !r.headed || len(r.pieces) == 0:
		return badAnswer("a chunk came that was not announced")
	case message.Rows != nil:
		rows := message.Rows
		return r.takeChunk(place{false, rows.TensorIndex, rows.ArrayIndex, rows.FirstRow, rows.RowCount}, rows.Data, rows.CRC32C)
	}
	part := message.Part
	return r.takeChunk(place{true, part.PartIndex, 0, part.OffsetBytes, uint64(len(part.Data))}, part.Data, part.CRC32C)
}

func (r *reception) takeHeader(text []byte) error {
	if r.headed {
		return badAnswer("a second header came")
	}
	r.headed = true
	header := new(pionv1.PrefixStoreFetchHeader)
	if err := proto.Unmarshal(text, header); err != nil {
		return badAnswer("the header is not a message: %v", err)
	}
	if !header.GetFound() {
		if r.prefix != nil && !r.to.restarts() { // dropped between two streams
			return &Error{Reason: ReasonGeneration, Message: goneMessage}
		}
		r.prefix, r.pieces = &Prefix{Reason: header.GetReason(), ShortenedBy: header.GetShortenedBy()}, nil
		return nil
	}
	announced, err := announcedBy(header)
	if err != nil {
		return err
	}
	if r.prefix != nil {
		return sameAgain(announced, r.prefix)
	}
	if err := check(announced, header.GetTotalBytes(), r.bytesMax); err != nil {
		return err
	}
	if err := r.to.begin(announced); err != nil {
		return fromCaller(err)
	}
	r.prefix, r.pieces = announced, piecesOf(announced)
	return nil
}

// place is where a chunk belongs: the first row, or offset in the part, and how many.
type place struct {
	isPart               bool
	number, array, first uint64
	count                uint64
}

func (r *reception) takeChunk(got place, data []byte, checksum uint32) error {
	next := &r.pieces[0]
	size := uint64(len(data))
	if size == 0 || size > next.size-r.filled {
		return badAnswer("%d bytes came where %d are missing", size, next.size-r.filled)
	}
	want := place{next.isPart, next.number, 0, next.firstRow + r.filled/next.unit, size / next.unit}
	if got != want || size%next.unit != 0 {
		return badAnswer("%d bytes of %+v came where %+v was to be next", size, got, want)
	}
	if crcOf(data) != checksum {
		return &Error{Reason: ReasonChecksum, Message: errDamaged.Error(), cause: errDamaged}
	}
	if err := r.to.write(*next, r.filled, data); err != nil {
		return fromCaller(err)
	}
	r.filled += size
	r.done += size
	if r.filled == next.size {
		r.pieces, r.filled = r.pieces[1:], 0
	}
	if r.request.Progress != nil {
		return fromCaller(r.request.Progress(r.done, r.prefix.TotalBytes))
	}
	return nil
}

func announcedBy(header *pionv1.PrefixStoreFetchHeader) (*Prefix, error) {
	info, err := infoOf(header.GetPrefix())
	if err != nil {
		return nil, err
	}
	layout, err := layoutOf(header.GetLayout())
	if err != nil {
		return nil, err
	}
	tokenIDs, err := wire.UnpackTokenIDs(header.GetTokenIds())
	if err != nil {
		return nil, badAnswer("%v", err)
	}
	prefix := &Prefix{
		Hit:         true,
		Reason:      header.GetReason(),
		ShortenedBy: header.GetShortenedBy(),
		Info:        info,
		Begin:       header.GetRows().GetBegin(),
		End:         header.GetRows().GetEnd(),
		TokenIDs:    tokenIDs,
		TotalBytes:  header.GetTotalBytes(),
		Tensors:     make([]Tensor, len(layout)),
	}
	for i, tensor := range layout {
		prefix.Tensors[i] = Tensor{Layout: tensor, Bytes: int64(prefix.rows()) * int64(tensor.RowBytes())}
	}
	for _, part := range partInfosOf(header.GetParts()) {
		prefix.Parts = append(prefix.Parts, Part{PartInfo: part})
	}
	return prefix, nil
}

func (p *Prefix) rows() uint64 { return p.End - p.Begin }

// check refuses what contradicts itself, or is more than the caller wants. Nothing is allocated before.
func check(announced *Prefix, totalBytes, bytesMax uint64) error {
	if announced.Begin > announced.End || announced.End > wire.TokensMax {
		return badAnswer("rows %d to %d were announced", announced.Begin, announced.End)
	}
	if n := uint64(len(announced.TokenIDs)); n != 0 && n != announced.End {
		return badAnswer("%d token ids were announced for %d rows", n, announced.End)
	}
	if len(announced.Parts) > wire.PartsMax {
		return badAnswer("%d parts were announced", len(announced.Parts))
	}
	var total uint64
	for _, tensor := range announced.Tensors {
		if tensor.Layout.CodecName() != wire.RawCodec {
			return &Error{
				Reason:  ReasonUnsupported,
				Message: fmt.Sprintf("%s comes as %s, which is not decoded here", tensor.Layout.Name(), tensor.Layout.Codec),
			}
		}
		total += uint64(tensor.Bytes)
	}
	for _, part := range announced.Parts {
		if part.SizeBytes > wire.PartBytesMax {
			return badAnswer("a part of %d bytes was announced", part.SizeBytes)
		}
		total += part.SizeBytes
	}
	if total != totalBytes {
		return badAnswer("%d bytes were announced, the layout makes %d", totalBytes, total)
	}
	if total > bytesMax {
		return badAnswer("%d bytes were announced; FetchBytesMax is %d", total, bytesMax)
	}
	return nil
}

func sameAgain(announced, before *Prefix) error {
	same := announced.Info.Generation == before.Info.Generation && announced.TotalBytes == before.TotalBytes &&
		announced.Begin == before.Begin && announced.End == before.End &&
		len(announced.Tensors) == len(before.Tensors) && len(announced.Parts) == len(before.Parts)
	for i := 0; same && i < len(before.Tensors); i++ {
		same = announced.Tensors[i].Layout == before.Tensors[i].Layout
	}
	for i := 0; same && i < len(before.Parts); i++ {
		same = announced.Parts[i].PartInfo == before.Parts[i].PartInfo
	}
	if !same {
		return badAnswer("a resumed stream announces something else")
	}
	return nil
}

// piecesOf returns what has bytes to come, in the order of the stream.
func piecesOf(announced *Prefix) []piece {
	var pieces []piece
	for i, tensor := range announced.Tensors {
		if tensor.Bytes > 0 {
			unit := uint64(tensor.Layout.RowBytes())
			pieces = append(pieces, piece{false, uint64(i), uint64(tensor.Bytes), unit, announced.Begin})
		}
	}
	for i, part := range announced.Parts {
		if part.SizeBytes > 0 {
			pieces = append(pieces, piece{true, uint64(i), part.SizeBytes, 1, 0})
		}
	}
	return pieces
}
