package pion

import (
	"container/list"
	"encoding/hex"
	"sync"
)

const (
	// routesMax is how many names are remembered, some 300 bytes each. A store that is listed name by name
	// must not make its client forget where the first ones are.
	routesMax = 50_000
	// routeCharactersMax: what is longer is no name, and metadata of its size would end the connection of
	// everybody behind the same proxy. The server is the one to refuse it.
	routeCharactersMax = 200
)

// routing says which node of a mesh is asked about what. Prefixes are where their token ids lead, so that
// a Match finds them: of a name, this is remembered. What else has a name may have the same one as a prefix,
// and is nevertheless not where that is: recurrent states are where their session's name leads, always, and
// attend sessions where the prefix is that they were made resident from, else where their name leads.
type routing struct {
	prefixes *routes // by namespace
	leases   *routes // short-lived, and never at the cost of names
	sessions *routes // of Attend, by session
	// everywhere is a route to each node; none where a proxy knows them, or there is one server.
	everywhere []string
}

func newRouting() routing {
	return routing{prefixes: newRoutes(), leases: newRoutes(), sessions: newRoutes()}
}

// prefix returns the route of calls about a namespace; lease, about a lease of Match or Lookup.
func (r routing) prefix(namespace string) string { return r.prefixes.of(namespace) }
func (r routing) lease(id []byte) string         { return r.leases.of(hex.EncodeToString(id)) }

// where returns the routes to try for a namespace, one after the other: all nodes, if it is not known.
func (r routing) where(namespace string) []string {
	route, known := r.prefixes.find(namespace)
	if known {
		return []string{route}
	}
	return append([]string{route}, r.everywhere...)
}

// all returns a route to each node, or the one that leads somewhere if there is no choice.
func (r routing) all(otherwise string) []string {
	if len(r.everywhere) > 0 {
		return r.everywhere
	}
	return []string{otherwise}
}

// session returns the route of an Attend session; state, of a session of recurrent states.
func (r routing) session(name string) string  { return r.sessions.of(name) }
func (r routing) state(session string) string { return session }

// follow has later calls about a name or a lease go where this one went.
func (r routing) follow(namespace string, leaseID []byte, route string) {
	r.prefixes.remember(namespace, route)
	if len(leaseID) > 0 {
		r.leases.remember(hex.EncodeToString(leaseID), route)
	}
}

// warmed has later calls about an Attend session go where the prefix is.
func (r routing) warmed(session, namespace string) {
	r.sessions.remember(session, r.prefix(namespace))
}

// cut returns a route that metadata has room for, whatever it was made of.
func cut(route string) string {
	characters := 0
	for at := range route {
		if characters++; characters > routeCharactersMax {
			return route[:at]
		}
	}
	return route
}

// routes are the newest of what was asked for.
type routes struct {
	mutex sync.Mutex
	known map[string]*list.Element
	order *list.List // of route; the newest in front
}

type route struct{ key, route string }

func newRoutes() *routes {
	return &routes{known: make(map[string]*list.Element), order: list.New()}
}

func (r *routes) remember(key, to string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if known, ok := r.known[key]; ok {
		known.Value = route{key, to}
		r.order.MoveToFront(known)
		return
	}
	r.known[key] = r.order.PushFront(route{key, to})
	if r.order.Len() > routesMax {
		oldest := r.order.Remove(r.order.Back()).(route)
		delete(r.known, oldest.key)
	}
}

// of returns the route; of what is not known, the name itself.
func (r *routes) of(key string) string {
	route, _ := r.find(key)
	return route
}

// find also tells whether it is known.
func (r *routes) find(key string) (string, bool) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if known, ok := r.known[key]; ok {
		return known.Value.(route).route, true
	}
	return key, false
}
