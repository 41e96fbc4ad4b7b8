package wire

import (
	"fmt"
	"slices"
	"sort"
	"strconv"

	"github.com/cespare/xxhash/v2"
)

// RingPoints is how many points each of a ring's nodes has; shares then differ by about a sixteenth.
const RingPoints = 256

// Ring is a circle of nodes, the same in every client and in the proxies of a mesh: a route belongs to the
// first point at or after its XXH64.
type Ring struct{ points []ringPoint }

type ringPoint struct {
	hash uint64
	node string
}

// NewRing makes a ring of all nodes of a mesh, by name. Those that are down have no place on it; if that is
// all of them, they all have.
func NewRing(nodes []string, down func(node string) bool) (*Ring, error) {
	var up []string
	for i, node := range nodes {
		if slices.Contains(nodes[:i], node) {
			return nil, fmt.Errorf("the node %s is named twice", node)
		}
		if !down(node) {
			up = append(up, node)
		}
	}
	if len(nodes) == 0 {
		return nil, fmt.Errorf("a ring needs nodes")
	}
	if len(up) == 0 {
		up = nodes
	}
	each := (RingPoints*len(nodes) + len(up) - 1) / len(up)
	ring := &Ring{make([]ringPoint, 0, each*len(up))}
	for _, node := range up {
		for i := range each {
			ring.points = append(ring.points, ringPoint{xxhash.Sum64String(node + "_" + strconv.Itoa(i)), node})
		}
	}
	sort.Slice(ring.points, func(i, j int) bool { return ring.points[i].hash < ring.points[j].hash })
	return ring, nil
}

// Routes returns a route to each node that is up: some text that belongs to it.
func (r *Ring) Routes() []string {
	left := map[string]bool{}
	for _, point := range r.points {
		left[point.node] = true
	}
	var routes []string
	for i := 0; len(left) > 0; i++ {
		if node := r.Node(strconv.Itoa(i)); left[node] {
			delete(left, node)
			routes = append(routes, strconv.Itoa(i))
		}
	}
	return routes
}

// Node returns the node of a route, as it stands in the metadata `pion-route`.
func (r *Ring) Node(route string) string {
	hash := xxhash.Sum64String(route)
	at := sort.Search(len(r.points), func(i int) bool { return r.points[i].hash >= hash })
	return r.points[at%len(r.points)].node
}
