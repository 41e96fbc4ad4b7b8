package wire

import (
	"slices"
	"testing"
)

func TestNobodyLooksForARouteInAnotherPlace(t *testing.T) {
	var known struct {
		Rings []struct {
			Nodes, Down []string
			Routes      map[string]string
		}
	}
	vectors(t, "ring.json", &known)
	if len(known.Rings) == 0 {
		t.Fatal("no rings")
	}
	for _, v := range known.Rings {
		ring, err := NewRing(v.Nodes, func(node string) bool { return slices.Contains(v.Down, node) })
		if err != nil {
			t.Fatal(err)
		}
		for route, node := range v.Routes {
			if got := ring.Node(route); got != node {
				t.Errorf("%q is at %s, not %s", route, got, node)
			}
		}
	}
	for _, nodes := range [][]string{nil, {"a", "a"}} {
		if _, err := NewRing(nodes, func(string) bool { return false }); err == nil {
			t.Errorf("%v were taken", nodes)
		}
	}
}
