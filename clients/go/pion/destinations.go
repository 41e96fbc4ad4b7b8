package pion

import (
	"hash/crc32"
	"io"

	"pion-grpc/clients/go/wire"
)

// destination is where the bytes of a fetch go, in the order of the stream.
type destination interface {
	// begin is called before the first byte of a prefix, after everything announced has been checked.
	begin(announced *Prefix) error
	// write takes bytes of one piece that begin at an offset in it.
	write(to piece, offset uint64, data []byte) error
	// restarts tells whether begin may be called again, for another prefix.
	restarts() bool
	// missed returns err if a miss comes too late to be one.
	missed(err error) error
}

// memory is the caller's buffers, or own ones.
type memory struct {
	into   func(tensor wire.TensorLayout, bytes int) []byte
	prefix *Prefix
}

func (m *memory) begin(announced *Prefix) error {
	for i := range announced.Tensors {
		tensor := &announced.Tensors[i]
		room, err := m.room(tensor.Layout, int(tensor.Bytes))
		if err != nil {
			return err
		}
		tensor.Data = room
	}
	for i := range announced.Parts {
		part := &announced.Parts[i]
		part.Data = make([]byte, part.SizeBytes)
	}
	m.prefix = announced
	return nil
}

func (m *memory) room(tensor wire.TensorLayout, bytes int) ([]byte, error) {
	if m.into != nil {
		if room := m.into(tensor, bytes); room != nil {
			if len(room) < bytes {
				return nil, invalid("into", "%s needs %d bytes, not %d", tensor.Name(), bytes, len(room))
			}
			return room[:bytes], nil
		}
	}
	return make([]byte, bytes), nil
}

func (m *memory) write(to piece, offset uint64, data []byte) error {
	if to.isPart {
		copy(m.prefix.Parts[to.number].Data[offset:], data)
	} else {
		copy(m.prefix.Tensors[to.number].Data[offset:], data)
	}
	return nil
}

func (m *memory) restarts() bool     { return true }
func (m *memory) missed(error) error { return nil }

// writing is a writer: what is gone is gone.
type writing struct {
	w     io.Writer
	first func(*Prefix) error
	begun bool
}

func (w *writing) begin(announced *Prefix) error {
	w.begun = true
	if w.first != nil {
		return w.first(announced)
	}
	return nil
}

func (w *writing) write(_ piece, _ uint64, data []byte) error {
	n, err := w.w.Write(data)
	if err == nil && n < len(data) {
		err = io.ErrShortWrite
	}
	return err
}

func (w *writing) restarts() bool { return !w.begun }

func (w *writing) missed(err error) error {
	if w.begun {
		return err
	}
	return nil
}

func crcOf(data []byte) uint32 { return crc32.Checksum(data, wire.Castagnoli) }
