// Package segment reads and writes a stored prefix as one file: a safetensors file that says everything
// about itself, as `pion-grpc export` writes and `pion-grpc import` reads it.
//
//	u64     length of the header, little-endian
//	header  JSON, padded with blanks so that the data begins at a multiple of 8
//	data    k.<slot>, v.<slot>   [rows, heads, head_dim]   in order of slots, K before V
//	        part.<i>             U8 [bytes]
//	        token_ids            U32 [tokens]
//	        crc32c               U32 [pages]               of each 256 KiB of the data before it
//
// A header has one form. Its text follows from what it says, so a reader writes it again and compares:
// offsets that lie, numbers in another spelling and a changed bit are all the same refusal. Knows raw
// rows only; a file of lossy ones is refused, never taken for what it is not.
package segment

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"strconv"
	"strings"
	"unicode/utf16"

	"pion-grpc/clients/go/pion"
	"pion-grpc/clients/go/wire"
)

const (
	format         = "pion-segment/1"
	headerBytesMax = 8 << 20
	noChecksum     = "00000000"
	checksumBegin  = len(`{"__metadata__":{"header_crc32c":"`)
)

// ErrDamaged is what Open and Check wrap where a file is not the one that was written.
var ErrDamaged = errors.New("not the file that was written")

// Segment is what a file holds.
type Segment struct {
	Layout    wire.Layout
	Rows      uint64 // in this file, of each tensor
	Tokens    uint64 // ids in this file; 0 if there are none
	Model     string
	Base      uint64 // rows that belong to the parent
	Parent    string
	Parts     []pion.PartInfo
	Namespace string
}

type array struct {
	name, dtype string
	shape       []uint64
	begin, end  uint64
}

func (s *Segment) arrays() []array {
	var arrays []array
	var position uint64
	add := func(name, dtype string, size uint64, shape ...uint64) {
		arrays = append(arrays, array{name, dtype, shape, position, position + size})
		position += size
	}
	for _, t := range s.Layout {
		add(t.Name(), t.DType.String(), s.Rows*uint64(t.RowBytes()), s.Rows, uint64(t.Heads), uint64(t.HeadDim))
	}
	for i, part := range s.Parts {
		add(fmt.Sprintf("part.%d", i), "U8", part.SizeBytes, part.SizeBytes)
	}
	add("token_ids", "U32", 4*s.Tokens, s.Tokens)
	pages := (position + wire.PageBytes - 1) / wire.PageBytes
	add("crc32c", "U32", 4*pages, pages)
	return arrays
}

// header returns everything before the data.
func (s *Segment) header() []byte {
	var text bytes.Buffer
	text.WriteString(`{"__metadata__":{"header_crc32c":"` + noChecksum + `"`)
	for _, pair := range [][2]string{
		{"format", format}, {"model_id", s.Model}, {"layout", s.Layout.String()},
		{"base", strconv.FormatUint(s.Base, 10)}, {"parent", s.Parent}, {"parts", partsText(s.Parts)},
		{"namespace", s.Namespace},
	} {
		fmt.Fprintf(&text, `,"%s":%s`, pair[0], quoted(pair[1]))
	}
	text.WriteString("}")
	for _, a := range s.arrays() {
		shape := strings.ReplaceAll(strings.Trim(fmt.Sprint(a.shape), "[]"), " ", ",")
		fmt.Fprintf(&text, `,"%s":{"dtype":"%s","shape":[%s],"data_offsets":[%d,%d]}`, a.name, a.dtype, shape, a.begin, a.end)
	}
	text.WriteString("}")
	for text.Len()%8 != 0 {
		text.WriteByte(' ')
	}
	checksum := fmt.Sprintf("%08x", crc32.Checksum(text.Bytes(), wire.Castagnoli))
	copy(text.Bytes()[checksumBegin:], checksum)
	return append(binary.LittleEndian.AppendUint64(nil, uint64(text.Len())), text.Bytes()...)
}

func partsText(parts []pion.PartInfo) string {
	texts := make([]string, len(parts))
	for i, p := range parts {
		texts[i] = fmt.Sprintf("[%s, %d, %d, %d, %s]", quoted(p.Kind), p.Slot, p.BoundaryTokens, p.SizeBytes, quoted(p.Description))
	}
	return "[" + strings.Join(texts, ", ") + "]"
}

// quoted returns a JSON text in ASCII.
func quoted(text string) string {
	var out strings.Builder
	out.WriteByte('"')
	for _, char := range text {
		if short := strings.IndexRune("\"\\\b\f\n\r\t", char); short >= 0 {
			out.WriteByte('\\')
			out.WriteByte("\"\\bfnrt"[short])
		} else if char >= ' ' && char <= '~' {
			out.WriteRune(char)
		} else {
			for _, unit := range utf16.Encode([]rune{char}) {
				fmt.Fprintf(&out, `\u%04x`, unit)
			}
		}
	}
	out.WriteByte('"')
	return out.String()
}

// Writer writes one file, front to back.
type Writer struct {
	w        io.Writer
	segment  *Segment
	missing  uint64 // bytes of rows and parts
	page     uint32
	filled   int
	finished []uint32
}

// NewWriter writes the header. Rows and then parts follow by Write.
func NewWriter(w io.Writer, segment *Segment) (*Writer, error) {
	arrays := segment.arrays()
	if _, err := w.Write(segment.header()); err != nil {
		return nil, err
	}
	return &Writer{w: w, segment: segment, missing: arrays[len(arrays)-2].begin}, nil
}

// Write takes the next bytes of the data.
func (w *Writer) Write(data []byte) (int, error) {
	if uint64(len(data)) > w.missing {
		return 0, fmt.Errorf("%d bytes more than the header says", uint64(len(data))-w.missing)
	}
	w.missing -= uint64(len(data))
	return w.write(data)
}

func (w *Writer) write(data []byte) (int, error) {
	for rest := data; len(rest) > 0; {
		piece := rest[:min(len(rest), wire.PageBytes-w.filled)]
		w.page = crc32.Update(w.page, wire.Castagnoli, piece)
		if w.filled += len(piece); w.filled == wire.PageBytes {
			w.closePage()
		}
		rest = rest[len(piece):]
	}
	return w.w.Write(data)
}

func (w *Writer) closePage() {
	w.finished = append(w.finished, w.page)
	w.page, w.filled = 0, 0
}

// Finish writes token ids and checksums.
func (w *Writer) Finish(tokenIDs []uint32) error {
	if w.missing != 0 || uint64(len(tokenIDs)) != w.segment.Tokens {
		return fmt.Errorf("%d bytes are missing, %d of %d token ids are here", w.missing, len(tokenIDs), w.segment.Tokens)
	}
	if _, err := w.write(wire.PackTokenIDs(tokenIDs)); err != nil {
		return err
	}
	if w.filled > 0 {
		w.closePage()
	}
	_, err := w.w.Write(wire.PackTokenIDs(w.finished))
	return err
}

// Reader is an open file whose header is sound.
type Reader struct {
	Segment
	from   io.ReaderAt
	data   int64 // where the data begins
	arrays map[string]array
}

// Open reads the header of a file of this size.
func Open(from io.ReaderAt, size int64) (*Reader, error) {
	var length [8]byte
	if _, err := from.ReadAt(length[:], 0); err != nil {
		return nil, damaged("shorter than a header")
	}
	headerBytes := binary.LittleEndian.Uint64(length[:])
	if headerBytes < 2 || headerBytes > headerBytesMax || int64(headerBytes)+8 > size {
		return nil, damaged("a header of %d bytes is absurd", headerBytes)
	}
	text := make([]byte, headerBytes)
	if _, err := from.ReadAt(text, 8); err != nil && err != io.EOF {
		return nil, err
	}
	segment, err := parse(text)
	if err != nil {
		return nil, err
	}
	reader := &Reader{*segment, from, int64(headerBytes) + 8, map[string]array{}}
	end := uint64(0)
	for _, a := range segment.arrays() {
		reader.arrays[a.name], end = a, a.end
	}
	if want := reader.data + int64(end); want != size {
		return nil, damaged("%d bytes long, its header says %d", size, want)
	}
	return reader, nil
}

// Check reads every page.
func (r *Reader) Check() error {
	table := r.arrays["crc32c"]
	checksums := make([]byte, table.end-table.begin)
	if err := r.read(checksums, table.begin); err != nil {
		return err
	}
	page := make([]byte, wire.PageBytes)
	for i := range uint64(len(checksums) / 4) {
		begin := i * wire.PageBytes
		data := page[:min(wire.PageBytes, table.begin-begin)]
		if err := r.read(data, begin); err != nil {
			return err
		}
		if crc32.Checksum(data, wire.Castagnoli) != binary.LittleEndian.Uint32(checksums[4*i:]) {
			return damaged("page %d has another checksum than it was written with", i)
		}
	}
	return nil
}

// Request returns what to store; its rows and parts are read from the file while they are sent.
func (r *Reader) Request() (pion.StoreRequest, error) {
	if r.Tokens == 0 || r.Base > r.Tokens || (len(r.Layout) > 0 && r.Rows != r.Tokens-r.Base) {
		return pion.StoreRequest{}, errors.New("it does not have one token id for each row")
	}
	ids := r.arrays["token_ids"]
	packed := make([]byte, ids.end-ids.begin)
	if err := r.read(packed, ids.begin); err != nil {
		return pion.StoreRequest{}, err
	}
	tokenIDs, err := wire.UnpackTokenIDs(packed)
	request := pion.StoreRequest{
		Namespace: r.Namespace, Model: r.Model, TokenIDs: tokenIDs, Parent: r.Parent, Base: r.Base,
	}
	for _, layout := range r.Layout {
		from := r.section(layout.Name())
		request.Tensors = append(request.Tensors, pion.Tensor{Layout: layout, From: from, Bytes: from.Size()})
	}
	for i, info := range r.Parts {
		part := pion.Part{PartInfo: info, From: r.section(fmt.Sprintf("part.%d", i))}
		request.Parts = append(request.Parts, part)
	}
	return request, err
}

func (r *Reader) section(name string) *io.SectionReader {
	a := r.arrays[name]
	return io.NewSectionReader(r.from, r.data+int64(a.begin), int64(a.end-a.begin))
}

func (r *Reader) read(into []byte, at uint64) error {
	n, err := r.from.ReadAt(into, r.data+int64(at))
	if n == len(into) {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrDamaged, err)
}

func parse(text []byte) (*Segment, error) {
	var table map[string]json.RawMessage
	var metadata map[string]string
	if json.Unmarshal(text, &table) != nil || json.Unmarshal(table["__metadata__"], &metadata) != nil {
		return nil, damaged("its header is no JSON of a segment")
	}
	if metadata["format"] != format {
		return nil, damaged("format %q is not %q: another release wrote it", metadata["format"], format)
	}
	layout, err := wire.ParseLayout(metadata["layout"])
	if err != nil {
		return nil, damaged("%v", err)
	}
	if layout.Fidelity() != wire.RawFidelity {
		return nil, fmt.Errorf("its rows are stored with loss (%s): `pion-grpc import` takes them", layout.Fidelity())
	}
	s := &Segment{
		Layout: layout, Model: metadata["model_id"], Parent: metadata["parent"], Namespace: metadata["namespace"],
	}
	if s.Base, err = strconv.ParseUint(metadata["base"], 10, 32); err != nil || s.Base > wire.TokensMax {
		return nil, damaged("base %q", metadata["base"])
	}
	if s.Parts, err = parseParts(metadata["parts"]); err != nil {
		return nil, err
	}
	if s.Tokens, err = firstOfShape(table["token_ids"]); err != nil {
		return nil, err
	}
	if len(layout) > 0 {
		if s.Rows, err = firstOfShape(table[layout[0].Name()]); err != nil {
			return nil, err
		}
	}
	if !bytes.Equal(s.header()[8:], text) {
		return nil, damaged("the header is not what was written: it has changed")
	}
	return s, nil
}

func parseParts(text string) ([]pion.PartInfo, error) {
	var rows [][5]json.RawMessage
	if json.Unmarshal([]byte(text), &rows) != nil || len(rows) > wire.PartsMax {
		return nil, damaged("its parts are not valid")
	}
	parts := make([]pion.PartInfo, len(rows))
	for i, row := range rows {
		p := &parts[i]
		for j, field := range []any{&p.Kind, &p.Slot, &p.BoundaryTokens, &p.SizeBytes, &p.Description} {
			if json.Unmarshal(row[j], field) != nil {
				return nil, damaged("its part %d is not valid", i)
			}
		}
		if p.SizeBytes > wire.PartBytesMax {
			return nil, damaged("a part of %d bytes", p.SizeBytes)
		}
	}
	return parts, nil
}

func firstOfShape(text json.RawMessage) (uint64, error) {
	var entry struct{ Shape []uint64 }
	if json.Unmarshal(text, &entry) != nil || len(entry.Shape) == 0 || entry.Shape[0] > wire.TokensMax {
		return 0, damaged("an array without its shape")
	}
	return entry.Shape[0], nil
}

func damaged(format string, values ...any) error {
	return fmt.Errorf("%w: %s", ErrDamaged, fmt.Sprintf(format, values...))
}
