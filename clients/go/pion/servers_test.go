package pion

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"pion-grpc/clients/go/pionv1"
	"pion-grpc/clients/go/wire"
)

// twoNodes are two real servers, and a client of both.
func twoNodes(t *testing.T) (all *Client, each []*Client) {
	t.Helper()
	first := startServer(t, "--disk-budget", "1GiB", "--attend", "off")
	second := startServer(t, "--disk-budget", "2GiB", "--attend", "numpy", "--no-export")
	return dial(t, first+","+second, Options{}), []*Client{dial(t, first, Options{}), dial(t, second, Options{})}
}

func TestWhatIsAskedAboutAllNodesIsNotAnsweredByOne(t *testing.T) {
	all, each := twoNodes(t)
	for i := range 20 {
		request := sample(fmt.Sprint("n", i), wire.F16, 70)
		request.TokenIDs[0] = uint32(1_000 + i)
		mustStore(t, all, request)
		mustFetch(t, all, FetchRequest{Namespace: request.Namespace})
		if match, err := all.Match(t.Context(), MatchRequest{Model: sampleModel, TokenIDs: request.TokenIDs}); err != nil || !match.Hit {
			t.Fatalf("%+v, %v", match, err)
		}
	}
	described := func(client *Client) *pionv1.PrefixStoreDescribeResponse {
		t.Helper()
		description, err := client.Describe(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return description
	}
	together, first, second := described(all), described(each[0]), described(each[1])
	if first.PrefixCount == 0 || second.PrefixCount == 0 {
		t.Fatalf("%d and %d: one node has everything", first.PrefixCount, second.PrefixCount)
	}
	if together.PrefixCount != 20 || together.DiskBudgetBytes != 3<<30 || together.RowCount != 20*70 {
		t.Errorf("%d prefixes, %d rows, %d bytes", together.PrefixCount, together.RowCount, together.DiskBudgetBytes)
	}
	if together.AttendBackend != "" || second.AttendBackend == "" || together.ExportEnabled || together.Version != first.Version {
		t.Errorf("%q, %v, %q: not all of them can", together.AttendBackend, together.ExportEnabled, together.Version)
	}
	if !slices.Equal(together.Codecs, first.Codecs) || len(together.Limits) != len(first.Limits) {
		t.Error("codecs or limits that both have are left out")
	}
	if err := all.Sync(t.Context()); err != nil {
		t.Error(err)
	}
	for i, ask := range []func(*Client) (*pionv1.Receipt, error){
		func(c *Client) (*pionv1.Receipt, error) { return c.Stats(t.Context()) },
		func(c *Client) (*pionv1.Receipt, error) { return c.ResetStats(t.Context()) },
		func(c *Client) (*pionv1.Receipt, error) { return c.Stats(t.Context()) },
	} {
		receipt, err := ask(all)
		if err != nil {
			t.Fatal(err)
		}
		if hits := []uint64{20, 20, 0}[i]; receipt.Hits != hits || receipt.TokensServed != 70*hits {
			t.Errorf("%d: %d hits, %d tokens", i, receipt.Hits, receipt.TokensServed)
		}
	}
	for i, client := range each {
		if receipt, err := client.Stats(t.Context()); err != nil || receipt.Hits != 0 {
			t.Errorf("node %d has not been reset: %d hits, %v", i, receipt.GetHits(), err)
		}
	}
}

// A node that stood in for another one keeps what it was given.
func TestWhatTwoNodesHoldIsListedOnce(t *testing.T) {
	all, each := twoNodes(t)
	for _, client := range each {
		mustStore(t, client, sample("both", wire.F16, 70))
	}
	mustStore(t, each[0], sample("a", wire.F16, 70))
	mustStore(t, each[1], sample("c", wire.F16, 70))
	var listed []string
	for info, err := range all.List(t.Context(), "") {
		if err != nil {
			t.Fatal(err)
		}
		listed = append(listed, info.Namespace)
	}
	if !slices.Equal(listed, []string{"a", "both", "c"}) {
		t.Errorf("%q", listed)
	}
}

func TestNobodyAnswersForANodeThatIsAway(t *testing.T) {
	all := impatient(t, "127.0.0.1:1,"+startServer(t, "--attend", "off"), Options{})
	for range 2 { // also when it is known to be away
		if description, err := all.Describe(t.Context()); !errors.Is(err, ReasonUnavailable) {
			t.Errorf("%+v, %v", description, err)
		}
		if receipt, err := all.Stats(t.Context()); !errors.Is(err, ReasonUnavailable) {
			t.Errorf("%+v, %v", receipt, err)
		}
		if err := all.Sync(t.Context()); !errors.Is(err, ReasonUnavailable) {
			t.Errorf("what it has may not be on disk: %v", err)
		}
	}
}

func TestWhatDiffersBetweenNodesIsNotHidden(t *testing.T) {
	limit := func(name string, value uint64) *pionv1.PrefixStoreDescribeResponse_Limit {
		return &pionv1.PrefixStoreDescribeResponse_Limit{Name: name, Value: value}
	}
	all := &pionv1.PrefixStoreDescribeResponse{
		Version: "1", AttendBackend: "mlx", Codecs: []string{"raw", "fp16", "int8"}, TenantBudgetBytes: 5,
		Limits: []*pionv1.PrefixStoreDescribeResponse_Limit{limit("a", 3), limit("b", 4)},
	}
	addDescription(all, &pionv1.PrefixStoreDescribeResponse{
		Version: "2", AttendBackend: "numpy", Codecs: []string{"raw", "int8"}, TenantBudgetBytes: 6,
		Limits: []*pionv1.PrefixStoreDescribeResponse_Limit{limit("b", 2)},
	})
	if all.Version != "1, 2" || all.AttendBackend != "mlx, numpy" || all.TenantBudgetBytes != 11 {
		t.Errorf("%q, %q, %d", all.Version, all.AttendBackend, all.TenantBudgetBytes)
	}
	if !slices.Equal(all.Codecs, []string{"raw", "int8"}) || all.Limits[0].Value != 3 || all.Limits[1].Value != 2 {
		t.Errorf("%q, %v", all.Codecs, all.Limits)
	}
	addDescription(all, &pionv1.PrefixStoreDescribeResponse{Version: "2"})
	if all.Version != "1, 2" || all.TenantBudgetBytes != 0 {
		t.Errorf("%q, %d: one has no quota", all.Version, all.TenantBudgetBytes)
	}
}
