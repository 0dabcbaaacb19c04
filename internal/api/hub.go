package api

import (
	"context"
	"sync"

	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// tailer follows the stream of results, as the store does.
type tailer interface {
	// Tail shows every result from now on until ctx ends, and calls gap whenever some may have been missed.
	Tail(ctx context.Context, gap func(), each func(*millracev1.Result)) error
}

// Hub wakes those who wait for a task to end. One reader of `results` serves them all. A wake-up is only a hint to
// look at the record: a waiter looks once after Watch and again after each wake-up, and so misses nothing.
type Hub struct {
	tail tailer

	mu      sync.Mutex
	watches map[task.ID]map[*Watch]struct{}
}

func newHub(t tailer) *Hub {
	return &Hub{tail: t, watches: map[task.ID]map[*Watch]struct{}{}}
}

// Watch is one waiter.
type Watch struct {
	// C receives when the task may have ended. It holds one value: more would say nothing new.
	C <-chan struct{}

	c   chan struct{}
	hub *Hub
	id  task.ID
}

// Watch registers a waiter. The caller must Stop it.
func (h *Hub) Watch(id task.ID) *Watch {
	w := &Watch{c: make(chan struct{}, 1), hub: h, id: id}
	w.C = w.c
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.watches[id] == nil {
		h.watches[id] = map[*Watch]struct{}{}
	}
	h.watches[id][w] = struct{}{}
	return w
}

// Stop forgets the waiter.
func (w *Watch) Stop() {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	set := w.hub.watches[w.id]
	delete(set, w)
	if len(set) == 0 {
		delete(w.hub.watches, w.id)
	}
}

func (w *Watch) wake() {
	select {
	case w.c <- struct{}{}:
	default: // it has one already and has not looked yet
	}
}

// Run follows the results until ctx ends. After a gap, when results may have been missed, everybody looks.
func (h *Hub) Run(ctx context.Context) error {
	return h.tail.Tail(ctx, h.wakeAll, func(r *millracev1.Result) { h.wakeOne(task.ID(r.GetId())) })
}

func (h *Hub) wakeOne(id task.ID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watches[id] {
		w.wake()
	}
}

func (h *Hub) wakeAll() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, set := range h.watches {
		for w := range set {
			w.wake()
		}
	}
}
