package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"pion-grpc/clients/go/internal/realserver"
	"pion-grpc/clients/go/internal/segment"
	"pion-grpc/clients/go/pion"
	"pion-grpc/clients/go/wire"
)

// random is noise from a generator of its own, so that every run stores the same.
func random(size int, number byte) []byte {
	data, state := make([]byte, size), uint32(number)+1
	for i := range data {
		state ^= state << 13
		state ^= state >> 17
		state ^= state << 5
		data[i] = byte(state)
	}
	return data
}

func prefix(name string, tokens int, dtype wire.DType) pion.StoreRequest {
	request := pion.StoreRequest{Namespace: name, Model: "modèle \"é\" 🙂\x7f", TokenIDs: make([]uint32, tokens)}
	for i := range request.TokenIDs {
		request.TokenIDs[i] = uint32(i * 3)
	}
	for slot := range uint32(3) {
		for _, side := range []wire.Side{wire.K, wire.V} {
			layout := wire.TensorLayout{Slot: slot, Side: side, Heads: 2, HeadDim: 64, DType: dtype}
			data := random(tokens*layout.RowBytes(), byte(2*slot)+byte(side))
			request.Tensors = append(request.Tensors, pion.Tensor{Layout: layout, Data: data})
		}
	}
	info := pion.PartInfo{Kind: "state", Slot: 1, BoundaryTokens: uint64(tokens), Description: "tab\t{\"shape\": [1]}"}
	request.Parts = []pion.Part{{PartInfo: info, Data: random(700_000, 99)}}
	return request
}

type shell struct {
	t       *testing.T
	address string
}

func (s shell) pionctl(arguments ...string) (string, error) {
	s.t.Helper()
	var out, notes bytes.Buffer
	err := run(s.t.Context(), append([]string{"-address", s.address}, arguments...), &out, &notes)
	return out.String() + notes.String(), err
}

func (s shell) must(arguments ...string) string {
	s.t.Helper()
	out, err := s.pionctl(arguments...)
	if err != nil {
		s.t.Fatalf("pionctl %v: %v\n%s", arguments, err, out)
	}
	return out
}

func (s shell) pionGRPC(arguments ...string) {
	s.t.Helper()
	command := exec.Command(realserver.Tool(s.t, "pion-grpc"), append(arguments, "--address", s.address)...)
	if output, err := command.CombinedOutput(); err != nil {
		s.t.Fatalf("pion-grpc %v: %v\n%s", arguments, err, output)
	}
}

func TestAFileIsTheSameWhoeverWritesItAndWhoeverReadsIt(t *testing.T) {
	s := shell{t, realserver.Start(t)}
	client, err := pion.Dial(s.address, pion.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	request := prefix("größe|🙂", 3000, wire.BF16)
	if _, err := client.Store(t.Context(), request); err != nil {
		t.Fatal(err)
	}
	directory := t.TempDir()
	ours, theirs := filepath.Join(directory, "ours.safetensors"), filepath.Join(directory, "theirs.safetensors")
	s.must("get", "größe|🙂", ours)
	s.pionGRPC("export", "größe|🙂", theirs)
	one, err := os.ReadFile(ours)
	if err != nil {
		t.Fatal(err)
	}
	if two, err := os.ReadFile(theirs); err != nil || !bytes.Equal(one, two) {
		t.Fatalf("the files differ: %v", err)
	}
	if out, err := s.pionctl("get", "größe|🙂", ours); err == nil {
		t.Errorf("the file was replaced: %s", out)
	}
	s.must("-replace", "get", "größe|🙂", ours)

	// Into a server by one, out of it by the other.
	s.must("put", theirs, "by-pionctl")
	s.pionGRPC("import", ours, "--namespace", "by-pion-grpc")
	for _, name := range []string{"by-pionctl", "by-pion-grpc"} {
		back, err := client.Fetch(t.Context(), pion.FetchRequest{Namespace: name, PartKinds: []string{"state"}})
		if err != nil || !back.Hit || back.Info.Model != request.Model {
			t.Fatalf("%s: %+v, %v", name, back, err)
		}
		for i, tensor := range back.Tensors {
			if !bytes.Equal(tensor.Data, request.Tensors[i].Data) {
				t.Errorf("%s of %s has other bytes", tensor.Layout.Name(), name)
			}
		}
		if !bytes.Equal(back.Parts[0].Data, request.Parts[0].Data) {
			t.Errorf("the part of %s has other bytes", name)
		}
	}
	if out := s.must("put", ours, "by-pionctl"); !strings.Contains(out, "was stored already") {
		t.Error(out)
	}
	if out := s.must("ls", "by-"); strings.Count(out, "\n") != 3 || !strings.Contains(out, "3000") {
		t.Error(out)
	}
	if out := s.must("stat", "by-pionctl"); !strings.Contains(out, "2 x 64 BF16, raw") || !strings.Contains(out, "700000 bytes at 3000 tokens") {
		t.Error(out)
	}
	if out := s.must("time", "by-pionctl", "3"); strings.Count(out, "\"bytes\": ") != 3 {
		t.Error(out)
	}
	if out := s.must("stat"); !strings.Contains(out, "prefixes") || !strings.Contains(out, "tokens served") {
		t.Error(out)
	}
}

func TestATenantIsNotShownTheReceipt(t *testing.T) {
	t.Setenv("PION_PASSWORD", "of the owner")
	s := shell{t, realserver.Start(t, "--tenant", "acme=secret")}
	if out, err := s.pionctl("-tenant", "nobody", "stat"); err == nil {
		t.Error(out)
	}
	if out := s.must("stat"); !strings.Contains(out, "tokens served") {
		t.Error(out)
	}
	if out, err := s.pionctl("-tls-key", "client.key", "stat"); err == nil { // not in plain text without a word
		t.Error(out)
	}
	t.Setenv("PION_PASSWORD", "secret")
	if out := s.must("-tenant", "acme", "stat"); !strings.Contains(out, "version") || strings.Contains(out, "tokens served") {
		t.Error(out)
	}
}

func TestNoNodeIsAskedAndNotAnother(t *testing.T) {
	one, two := realserver.Start(t), realserver.Start(t)
	for name, address := range map[string]string{"on-one": one, "on-two": two} {
		client, err := pion.Dial(address, pion.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		if _, err := client.Store(t.Context(), prefix(name, 70, wire.F16)); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := (shell{t, one}).pionctl("stat", "on-two"); err == nil || !strings.Contains(err.Error(), "node that was asked") {
		t.Errorf("%v: %s", err, out)
	}
	s := shell{t, one + "," + two}
	if out := s.must("ls", "on-"); strings.Count(out, "\n") != 3 {
		t.Error(out)
	}
	for _, name := range []string{"on-one", "on-two"} {
		file := filepath.Join(t.TempDir(), name)
		s.must("stat", name)
		s.must("time", name, "1")
		s.must("get", name, file)
		s.must("put", file, "put again") // the second time it is there, wherever that is
	}
	here, _ := (shell{t, one}).pionctl("ls", "put again")
	there, _ := (shell{t, two}).pionctl("ls", "put again")
	if strings.Count(here+there, "put again") != 1 {
		t.Errorf("one node has it, and not another:\n%s\n%s", here, there)
	}
	if out := s.must("stat"); strings.Count(out, "version") != 2 {
		t.Error(out)
	}
	if out, err := s.pionctl("get", "on-three", filepath.Join(t.TempDir(), "x")); err == nil || !strings.Contains(err.Error(), "none of the 2 nodes") {
		t.Errorf("%v: %s", err, out)
	}
}

func TestAChainIsWrittenAsOneFile(t *testing.T) {
	s := shell{t, realserver.Start(t)}
	client, err := pion.Dial(s.address, pion.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	root, child := prefix("root", 100, wire.F32), prefix("child", 150, wire.F32)
	child.Parent, child.Base = "root", 100
	for i := range child.Tensors {
		tensor := &child.Tensors[i]
		tensor.Data = tensor.Data[100*tensor.Layout.RowBytes():]
	}
	for _, request := range []pion.StoreRequest{root, child} {
		if _, err := client.Store(t.Context(), request); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(t.TempDir(), "child.safetensors")
	if out := s.must("get", "child", file); !strings.Contains(out, "at 100 tokens is left out") {
		t.Error(out)
	}
	if _, err := client.Drop(t.Context(), "child", "root"); err != nil {
		t.Fatal(err)
	}
	s.must("put", file)
	back, err := client.Fetch(t.Context(), pion.FetchRequest{Namespace: "child"})
	if err != nil || back.Info.Base != 0 || back.End != 150 {
		t.Fatalf("%+v, %v", back, err)
	}
	for i, tensor := range back.Tensors {
		want := append(bytes.Clone(root.Tensors[i].Data), child.Tensors[i].Data...)
		if !bytes.Equal(tensor.Data, want) {
			t.Errorf("%s has other bytes", tensor.Layout.Name())
		}
	}
}

func TestAFileThatHasChangedIsNotStored(t *testing.T) {
	s := shell{t, realserver.Start(t)}
	var whole bytes.Buffer
	layout := wire.Layout{{Side: wire.K, Heads: 1, HeadDim: 8, DType: wire.F16}}
	writer, err := segment.NewWriter(&whole, &segment.Segment{Layout: layout, Rows: 40, Tokens: 40, Model: "m", Namespace: "n"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := writer.Write(random(640, 1)); err != nil {
		t.Fatal(err)
	}
	if err := writer.Finish(make([]uint32, 40)); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "file.safetensors")
	good := whole.Bytes()
	for at := range good { // every byte of it
		changed := bytes.Clone(good)
		changed[at] ^= 1
		if at >= 16 && at < len(good)-4 && at%5 != 0 {
			continue // some are enough
		}
		reader, err := segment.Open(bytes.NewReader(changed), int64(len(changed)))
		if err == nil {
			err = reader.Check()
		}
		if !errors.Is(err, segment.ErrDamaged) {
			t.Fatalf("byte %d has changed, and %v", at, err)
		}
	}
	for name, data := range map[string][]byte{
		"cut": good[:len(good)-1], "longer": append(bytes.Clone(good), 0), "empty": nil, "damaged": append(bytes.Clone(good[:len(good)-300]), make([]byte, 300)...),
	} {
		if err := os.WriteFile(file, data, 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := s.pionctl("put", file); err == nil {
			t.Errorf("%s: %s", name, out)
		}
	}
	if out, err := s.pionctl("get", "n", filepath.Join(t.TempDir(), "x")); err == nil {
		t.Error(out)
	}
	if err := os.WriteFile(file, good, 0o600); err != nil {
		t.Fatal(err)
	}
	s.must("put", file)
	if out, err := s.pionctl("fly"); err == nil {
		t.Error(out)
	}
}
