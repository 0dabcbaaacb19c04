package reaper

import (
	"fmt"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
)

// watch decides when a worker whose heartbeat is gone may be declared dead. It counts on this process' monotonic
// clock only.
//
// A heartbeat can be gone although its worker lives and holds on to its tasks: because Redis was away and the time
// ran on, or because the worker relies on a dispatcher that told it that Redis is gone for all.
type watch struct {
	cfg Config

	mu       sync.Mutex
	missing  map[task.WorkerID]time.Time // since when, counted anew after every pause
	beating  map[task.WorkerID]bool      // at the last look
	runID    string
	started  bool
	lastAt   time.Time     // of the last look, here
	lastBy   time.Time     // of the last look, by Redis' clock
	pausedTo time.Time     // nobody is declared before
	why      string        // of the pause
	lost     bool          // we could not reach Redis
	jump     time.Duration // of Redis' clock that counts as a step
}

func newWatch(cfg Config) watch {
	return watch{cfg: cfg, missing: map[task.WorkerID]time.Time{}, beating: map[task.WorkerID]bool{}, jump: cfg.HeartbeatTTL / 3}
}

// disconnected notes that we could not look: others may have been unable to renew as well.
func (w *watch) disconnected() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lost = true
}

// look takes the state of all workers in, and returns why nobody may be declared dead now, or nothing.
func (w *watch) look(workers []store.WorkerMeta, server *store.Server, serverNow time.Time) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	switch {
	case w.lost:
		w.pause(now, "this reaper could not reach Redis")
	case server != nil && w.runID != "" && server.RunID != w.runID:
		w.pause(now, "Redis was restarted or failed over")
	case server != nil && w.runID == "" && !server.Started.IsZero() && now.Sub(server.Started) < w.cfg.HeartbeatTTL:
		w.pause(now, "Redis has just started")
	case !w.lastAt.IsZero() && serverNow.Sub(w.lastBy)-now.Sub(w.lastAt) > w.jump:
		w.pause(now, "Redis' clock stepped forward")
	}
	w.lost = false
	if server != nil {
		w.runID = server.RunID
	}
	w.lastAt, w.lastBy = now, serverNow
	if n, all := w.vanished(workers); w.started && n >= 5 && 2*n > all {
		w.pause(now, fmt.Sprintf("%d of %d workers vanished at once", n, all))
	}
	w.started = true
	w.note(workers, now)
	if now.Before(w.pausedTo) {
		return w.why
	}
	return ""
}

// pause gives the living one heartbeat lifetime to renew first, and counts all absences anew.
func (w *watch) pause(now time.Time, why string) {
	w.pausedTo, w.why = now.Add(w.cfg.HeartbeatTTL), why
	clear(w.missing)
}

// vanished counts the workers that beat at the last look and do not now.
func (w *watch) vanished(workers []store.WorkerMeta) (n, all int) {
	for _, m := range workers {
		if w.beating[m.ID] {
			all++
			if !m.Beating && !m.Dead {
				n++
			}
		}
	}
	return n, all
}

func (w *watch) note(workers []store.WorkerMeta, now time.Time) {
	clear(w.beating)
	known := map[task.WorkerID]bool{}
	for _, m := range workers {
		known[m.ID] = true
		if m.Beating {
			w.beating[m.ID] = true
			delete(w.missing, m.ID)
		} else if _, ok := w.missing[m.ID]; !ok {
			since := now
			if now.Before(w.pausedTo) {
				since = w.pausedTo
			}
			w.missing[m.ID] = since
		}
	}
	for id := range w.missing {
		if !known[id] {
			delete(w.missing, id)
		}
	}
}

// mayDeclare: at once when every dispatcher that could vouch for the worker lives and so can reach Redis; otherwise
// only after the hold limit, for the worker may be holding together with a dispatcher that is cut off too.
func (w *watch) mayDeclare(m store.WorkerMeta, alive map[string]string) bool {
	all := true
	for _, d := range m.Dispatchers {
		if _, ok := alive[d]; !ok {
			all = false
		}
	}
	if all || w.cfg.HoldLimit <= 0 {
		return true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	since, ok := w.missing[m.ID]
	return ok && time.Since(since) > w.cfg.HoldLimit
}

func (w *watch) forget(id task.WorkerID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.missing, id)
}

func (w *watch) isPaused() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return time.Now().Before(w.pausedTo)
}
