package wire

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"hash/crc32"
	"os"
	"path/filepath"
	"testing"
)

func vectors(t *testing.T, name string, into any) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "tests", "vectors", name))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, into); err != nil {
		t.Fatal(err)
	}
}

func unhex(t *testing.T, text string) []byte {
	t.Helper()
	data, err := hex.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestTheSharedHashesAndNamesHold(t *testing.T) {
	var known struct {
		Roots []struct {
			Tenant, Fidelity, Root string
			Model                  string `json:"model_id"`
		}
		Sequences []struct {
			Tenant      string
			Model       string                              `json:"model_id"`
			Tokens      struct{ First, Step, Count uint32 } `json:"tokens"`
			BlockHashes []string                            `json:"block_hashes"`
			Namespace   string                              `json:"derived_namespace"`
			Route       string                              `json:"route_key"`
		}
		Namespaces []struct {
			Parts     []string
			Namespace string
		}
		Routes []struct{ Route, Metadata string }
	}
	vectors(t, "blocks.json", &known)
	if len(known.Roots) == 0 || len(known.Sequences) == 0 || len(known.Namespaces) == 0 || len(known.Routes) == 0 {
		t.Fatal("a section is missing")
	}
	for _, v := range known.Roots {
		if got := RootHash(v.Tenant, v.Model, v.Fidelity).String(); got != v.Root {
			t.Errorf("root of %q %q %q: %s", v.Tenant, v.Model, v.Fidelity, got)
		}
	}
	for _, v := range known.Sequences {
		ids := make([]uint32, v.Tokens.Count)
		for i := range ids {
			ids[i] = v.Tokens.First + v.Tokens.Step*uint32(i)
		}
		root := RootHash(v.Tenant, v.Model, RawFidelity)
		hashes := BlockHashes(root, ids)
		if len(hashes) != len(v.BlockHashes) {
			t.Fatalf("%d tokens have %d hashes", len(ids), len(hashes))
		}
		for i, hash := range hashes {
			if hash.String() != v.BlockHashes[i] {
				t.Errorf("block %d of %d tokens: %s", i, len(ids), hash)
			}
		}
		if got := DerivedNamespace(root, ids); got != v.Namespace {
			t.Errorf("namespace of %d tokens: %s", len(ids), got)
		}
		if got := RouteKey(v.Tenant, v.Model, ids); got != v.Route {
			t.Errorf("route of %d tokens: %s", len(ids), got)
		}
		if back, err := UnpackTokenIDs(PackTokenIDs(ids)); err != nil || len(back) != len(ids) || back[len(ids)-1] != ids[len(ids)-1] {
			t.Errorf("token ids do not come back: %v", err)
		}
	}
	for _, v := range known.Namespaces {
		if got := MakeNamespace(v.Parts...); got != v.Namespace {
			t.Errorf("namespace of %q: %s", v.Parts, got)
		}
	}
	if got := MakeNamespace("m", "t", "fp16"); got != "61a226ee7dc6bcf4203f91316777d237" {
		t.Errorf("MakeNamespace: %s", got)
	}
	for _, v := range known.Routes {
		if got := RouteMetadata(v.Route); got != v.Metadata {
			t.Errorf("route %q: %s", v.Route, got)
		}
	}
}

func TestTheSharedLayoutsHold(t *testing.T) {
	var known struct {
		Layouts []struct {
			Text, Fidelity string
			RowBytes       []int `json:"row_bytes"`
			Names          []string
		}
		Refused []struct{ Text, Why string }
	}
	vectors(t, "layouts.json", &known)
	if len(known.Layouts) == 0 || len(known.Refused) == 0 {
		t.Fatal("a section is missing")
	}
	for _, v := range known.Layouts {
		layout, err := ParseLayout(v.Text)
		if err != nil {
			t.Errorf("%s: %v", v.Text, err)
			continue
		}
		if layout.String() != v.Text || layout.Fidelity() != v.Fidelity {
			t.Errorf("%s became %s, %s", v.Text, layout, layout.Fidelity())
		}
		total := 0
		for i, tensor := range layout {
			if tensor.Name() != v.Names[i] || tensor.RowBytes() != v.RowBytes[i] {
				t.Errorf("%s: %s of %d bytes", v.Text, tensor.Name(), tensor.RowBytes())
			}
			total += v.RowBytes[i]
		}
		if layout.RowBytes() != total {
			t.Errorf("%s: rows of %d bytes", v.Text, layout.RowBytes())
		}
	}
	for _, v := range known.Refused {
		if layout, err := ParseLayout(v.Text); err == nil {
			t.Errorf("%s became %v; %s", v.Text, layout, v.Why)
		}
	}
}

func TestTheSharedFramesHold(t *testing.T) {
	var known struct {
		Messages []struct {
			Kind, Data, Message string
			TensorIndex         uint64 `json:"tensor_index"`
			ArrayIndex          uint64 `json:"array_index"`
			FirstRow            uint64 `json:"first_row"`
			RowCount            uint64 `json:"row_count"`
			PartIndex           uint64 `json:"part_index"`
			OffsetBytes         uint64 `json:"offset_bytes"`
			CRC32C              uint32 `json:"crc32c"`
		}
		Refused []struct{ Message, Why string }
	}
	vectors(t, "framing.json", &known)
	if len(known.Messages) == 0 || len(known.Refused) == 0 {
		t.Fatal("a section is missing")
	}
	for _, v := range known.Messages {
		data, message := unhex(t, v.Data), unhex(t, v.Message)
		parsed, err := ParseMessage(message)
		if err != nil {
			t.Errorf("%s: %v", v.Message, err)
			continue
		}
		var framed []byte
		switch v.Kind {
		case "rows":
			framed = AppendRows(nil, v.TensorIndex, v.ArrayIndex, v.FirstRow, v.RowCount, data)
			got := parsed.Rows
			want := RowChunk{v.TensorIndex, v.ArrayIndex, v.FirstRow, v.RowCount, v.CRC32C, nil}
			if !bytes.Equal(got.Data, data) || crc32.Checksum(got.Data, Castagnoli) != v.CRC32C {
				t.Errorf("%s: data %x", v.Message, got.Data)
			}
			if got.Data = nil; got.TensorIndex != want.TensorIndex || got.ArrayIndex != want.ArrayIndex ||
				got.FirstRow != want.FirstRow || got.RowCount != want.RowCount || got.CRC32C != want.CRC32C {
				t.Errorf("%s: %+v", v.Message, got)
			}
		case "part":
			framed = AppendPart(nil, v.PartIndex, v.OffsetBytes, data)
			got := parsed.Part
			if !bytes.Equal(got.Data, data) || got.PartIndex != v.PartIndex || got.OffsetBytes != v.OffsetBytes ||
				got.CRC32C != v.CRC32C {
				t.Errorf("%s: %+v", v.Message, got)
			}
		case "header":
			framed = AppendHeader(nil, data)
			if !bytes.Equal(parsed.Header, data) {
				t.Errorf("%s: header %x", v.Message, parsed.Header)
			}
		}
		if !bytes.Equal(framed, message) {
			t.Errorf("%s: framed as %x", v.Message, framed)
		}
		if len(framed) > len(data)+FrameBytesMax {
			t.Errorf("%s: a frame takes %d bytes", v.Message, len(framed)-len(data))
		}
	}
	for _, v := range known.Refused {
		if got, err := ParseMessage(unhex(t, v.Message)); !errors.Is(err, ErrFrame) {
			t.Errorf("%s (%s) became %+v, %v", v.Message, v.Why, got, err)
		}
	}
}

func FuzzWhateverArrivesIsAMessageOrRefused(f *testing.F) {
	f.Add(AppendRows(nil, 1, 2, 3, 4, []byte("rows")))
	f.Add(AppendPart(nil, 1, 2, []byte("part")))
	f.Add(AppendHeader(nil, []byte("header")))
	f.Fuzz(func(t *testing.T, message []byte) {
		parsed, err := ParseMessage(message)
		if (err == nil) == (parsed.Header == nil && parsed.Rows == nil && parsed.Part == nil) {
			t.Fatalf("%+v, %v", parsed, err)
		}
	})
}
