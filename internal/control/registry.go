package control

import (
	"container/list"
	"slices"
	"strings"
	"sync"
)

// peer is one authenticated connection of a worker.
type peer struct {
	conn *conn
	info WorkerInfo
	gone chan struct{} // closed after Disconnected, and after that of every older connection of the worker

	welcomed bool // guarded by registry.mu: may be sent to
}

// registry holds the newest connection of each worker.
type registry struct {
	mu    sync.Mutex
	peers map[string]*peer
}

func newRegistry() *registry { return &registry{peers: make(map[string]*peer)} }

// claim makes p the connection of its worker and returns the one before, if any. The caller closes that one and waits
// until it is gone.
func (r *registry) claim(p *peer) *peer {
	r.mu.Lock()
	defer r.mu.Unlock()
	before := r.peers[p.info.ID]
	r.peers[p.info.ID] = p
	return before
}

// current reports whether p is still the connection of its worker.
func (r *registry) current(p *peer) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.peers[p.info.ID] == p
}

// welcome opens p for messages, behind first, and reports whether it is still the connection of its worker.
func (r *registry) welcome(p *peer, first Message) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.peers[p.info.ID] != p {
		return false
	}
	p.welcomed = p.conn.send(first)
	return p.welcomed
}

// release forgets p, if it is not forgotten yet.
func (r *registry) release(p *peer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p.welcomed = false
	if r.peers[p.info.ID] == p {
		delete(r.peers, p.info.ID)
	}
}

// ready returns the connection of a worker when it may be sent to, else nil.
func (r *registry) ready(workerID string) *peer {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.peers[workerID]; p != nil && p.welcomed {
		return p
	}
	return nil
}

func (r *registry) infos() []WorkerInfo {
	r.mu.Lock()
	infos := make([]WorkerInfo, 0, len(r.peers))
	for _, p := range r.peers {
		if p.welcomed {
			infos = append(infos, p.info)
		}
	}
	r.mu.Unlock()
	slices.SortFunc(infos, func(a, b WorkerInfo) int { return strings.Compare(a.ID, b.ID) })
	return infos
}

// lobby holds the connections that have not shown a good HELLO yet. When it is full the oldest has to go: an honest
// handshake takes milliseconds, so the oldest is the one most likely to be only standing there.
type lobby struct {
	mu   sync.Mutex
	max  int
	line *list.List // of *guest
}

// guest is a connection in the lobby.
type guest struct {
	conn    *conn
	evicted bool // guarded by lobby.mu
}

func newLobby(limit int) *lobby { return &lobby{max: limit, line: list.New()} }

func (l *lobby) enter(c *conn) *list.Element {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.line.Len() >= l.max {
		if oldest, ok := l.line.Remove(l.line.Front()).(*guest); ok {
			oldest.evicted = true
			oldest.conn.abort()
		}
	}
	return l.line.PushBack(&guest{conn: c})
}

// leave reports whether the connection had been turned out before.
func (l *lobby) leave(e *list.Element) (evicted bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.line.Remove(e) // does nothing when it is out already
	g, _ := e.Value.(*guest)
	return g.evicted
}
