package pion

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"pion-grpc/clients/go/wire"
)

// TestNothingIsLostBehindAProxy runs where PION_TEST_MESH is the address of a proxy of several nodes, and
// PION_TEST_TLS the directory of a client's certificates: tests/go starts both.
func TestNothingIsLostBehindAProxy(t *testing.T) {
	loseNothing(t, os.Getenv("PION_TEST_MESH"), "go")
}

// TestNothingIsLostWithoutAProxy needs the nodes themselves besides, in PION_TEST_NODES, and looks for what it
// stored through the proxy.
func TestNothingIsLostWithoutAProxy(t *testing.T) {
	client := loseNothing(t, os.Getenv("PION_TEST_NODES"), "hashing")
	proxy := meshClient(t, os.Getenv("PION_TEST_MESH"))
	stranger := meshClient(t, os.Getenv("PION_TEST_NODES")) // knows names alone
	for i := range 24 {
		request := meshSample("hashing", i)
		if i%2 == 0 {
			same(t, mustFetch(t, stranger, FetchRequest{Namespace: request.Namespace, PartKinds: []string{"state"}}), request)
		} else if found, err := stranger.Lookup(t.Context(), LookupRequest{Namespace: request.Namespace}); err != nil || !found.Hit {
			t.Errorf("%s: %+v, %v", request.Namespace, found, err)
		}
	}
	var listed []string
	for info, err := range stranger.List(t.Context(), "hashing-") {
		if err != nil {
			t.Fatal(err)
		}
		listed = append(listed, info.Namespace)
	}
	if len(listed) != 24 || !slices.IsSorted(listed) {
		t.Errorf("%d are listed: %q", len(listed), listed)
	}
	mustStore(t, client, meshSample("dropped by name", 0))
	for _, expected := range []bool{true, false} {
		dropped, err := stranger.Drop(t.Context(), "nobody's", "dropped by name-0")
		if err != nil || dropped[0] || dropped[1] != expected {
			t.Errorf("%v, %v", dropped, err)
		}
	}
	for _, other := range []*Client{proxy, client} {
		for i := range 24 {
			request := meshSample("hashing", i)
			match, err := other.Match(t.Context(), MatchRequest{Model: sampleModel, TokenIDs: request.TokenIDs})
			if err != nil || !match.Hit {
				t.Fatalf("%s: %+v, %v", request.Namespace, match, err)
			}
			same(t, mustFetch(t, other, FetchRequest{LeaseID: match.LeaseID, PartKinds: []string{"state"}}), request)
			if state, err := other.FetchState(t.Context(), request.Namespace, 0); err != nil || !state.Hit {
				t.Errorf("the state of %s: %+v, %v", request.Namespace, state, err)
			}
		}
	}
}

func meshSample(kind string, number int) StoreRequest {
	request := sample(fmt.Sprintf("%s-%d", kind, number), wire.F16, 130)
	request.TokenIDs[0] = uint32(1_000*len(kind) + number)
	return request
}

func meshClient(t *testing.T, address string) *Client {
	own := os.Getenv("PION_TEST_TLS")
	if address == "" {
		t.Skip("PION_TEST_MESH and PION_TEST_NODES are not set")
	}
	config, err := TLSFromFiles(own+"/ca.pem", own+"/client.pem", own+"/client.key")
	if err != nil {
		t.Fatal(err)
	}
	return dial(t, address, Options{TLS: config, Password: os.Getenv("PION_PASSWORD")})
}

func loseNothing(t *testing.T, address, kind string) *Client {
	client := meshClient(t, address)
	requests := make([]StoreRequest, 24)
	for i := range requests { // each with a session of recurrent states that is called like it
		requests[i] = meshSample(kind, i)
		name := requests[i].Namespace
		if _, err := client.StoreState(t.Context(), name, 0, StateInfo{}, noise(name, "state", 500), DurabilityProcess); err != nil {
			t.Fatal(err)
		}
		mustStore(t, client, requests[i])
	}
	for _, request := range requests {
		match, err := client.Match(t.Context(), MatchRequest{Model: sampleModel, TokenIDs: request.TokenIDs})
		if err != nil || !match.Hit {
			t.Fatalf("%s: %+v, %v", request.Namespace, match, err)
		}
		same(t, mustFetch(t, client, FetchRequest{Namespace: request.Namespace, PartKinds: []string{"state"}}), request)
		state, err := client.FetchState(t.Context(), request.Namespace, 0)
		if err != nil || string(state.Data) != string(noise(request.Namespace, "state", 500)) {
			t.Errorf("the state of %s is lost: %v", request.Namespace, err)
		}
	}
	// What is declared with the tokens binds the store that follows, wherever the name leads.
	for i := range 6 {
		request := meshSample("declared by "+kind, i)
		name := request.Namespace
		layout := wire.Layout{{Side: wire.K, Heads: 1, HeadDim: 4, DType: wire.F32}}
		declared := Registration{Namespace: name, Layout: layout, Model: sampleModel, TokenIDs: request.TokenIDs}
		if _, _, err := client.Register(t.Context(), declared); err != nil {
			t.Fatal(err)
		}
		if stored, err := client.Store(t.Context(), request); !errors.Is(err, ReasonLayout) {
			t.Errorf("%s was declared with another layout: %+v, %v", name, stored, err)
		}
	}
	// Neither ends the connection that the calls after it use.
	if found, err := client.Lookup(t.Context(), LookupRequest{Namespace: strings.Repeat("ö", 50_000)}); err == nil {
		t.Errorf("%+v", found)
	}
	if prefix := mustFetch(t, client, FetchRequest{Namespace: kind + "-0"}); !prefix.Hit {
		t.Error("it is not found any more")
	}
	return client
}
