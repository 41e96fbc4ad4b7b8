package pion

import (
	"container/list"
	"sync"
)

const routesMax = 1_000

// routes remembers which node of a mesh was asked about a name or a lease, so that the same one is
// asked again; the newest thousand of them.
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
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if known, ok := r.known[key]; ok {
		return known.Value.(route).route
	}
	return key
}
