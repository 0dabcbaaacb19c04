package reaper

import (
	"fmt"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/hold"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
)

// watch decides when a worker whose heartbeat is gone may be declared dead. It counts on this process' monotonic
// clock only; the decisions are package hold's.
//
// A heartbeat can be gone although its worker lives and holds on to its tasks: because Redis was away and the time
// ran on, or because the worker relies on a dispatcher that told it that Redis is gone for all.
type watch struct {
	rules hold.Rules
	zero  time.Time // of the clock that package hold is asked on

	mu      sync.Mutex
	me      hold.Reaper
	absent  map[task.WorkerID]*hold.Absence
	beating map[task.WorkerID]bool // at the last look
	runID   string
	lastAt  time.Time    // of the last look, here
	lastBy  time.Time    // of the last look, by Redis' clock
	until   hold.Instant // of the pause
	why     string       // of the pause
	lost    bool         // we could not reach Redis
}

func newWatch(cfg Config) watch {
	return watch{
		rules: hold.Rules{TTL: cfg.HeartbeatTTL, Interval: cfg.HeartbeatInterval, Limit: cfg.HoldLimit, Vouch: hold.Vouch},
		zero:  time.Now(), absent: map[task.WorkerID]*hold.Absence{}, beating: map[task.WorkerID]bool{},
	}
}

func (w *watch) now() hold.Instant { return time.Since(w.zero) }

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
	at := time.Now()
	if why := w.disturbance(server, at, serverNow); why != "" {
		w.pause(why)
	}
	w.lost = false
	if server != nil {
		w.runID = server.RunID
	}
	w.lastAt, w.lastBy = at, serverNow
	if n, all := w.vanished(workers); w.me.Scanned(w.rules, w.now(), n, all) {
		w.until, w.why = w.now()+w.rules.TTL, fmt.Sprintf("%d of %d workers vanished at once", n, all)
	}
	w.note(workers)
	if w.now() < w.until {
		return w.why
	}
	return ""
}

// disturbance is what may have kept the living from renewing, or us from seeing that they did.
func (w *watch) disturbance(server *store.Server, at, serverNow time.Time) string {
	step := w.rules.TTL / 3 // of Redis' clock beside ours
	switch {
	case w.lost:
		return "this reaper could not reach Redis"
	case server != nil && w.runID != "" && server.RunID != w.runID:
		return "Redis was restarted or failed over"
	case server != nil && w.runID == "" && !server.Started.IsZero() && at.Sub(server.Started) < w.rules.TTL:
		return "Redis has just started"
	case !w.lastAt.IsZero() && serverNow.Sub(w.lastBy)-at.Sub(w.lastAt) > step:
		return "Redis' clock stepped forward"
	default:
		return ""
	}
}

func (w *watch) pause(why string) {
	w.me.Pause(w.rules, w.now())
	w.until, w.why = w.now()+w.rules.TTL, why
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

func (w *watch) note(workers []store.WorkerMeta) {
	clear(w.beating)
	known := map[task.WorkerID]bool{}
	for _, m := range workers {
		known[m.ID] = true
		if m.Beating {
			w.beating[m.ID] = true
			delete(w.absent, m.ID)
		}
	}
	for id := range w.absent {
		if !known[id] {
			delete(w.absent, id)
		}
	}
}

// mayDeclare is asked at every look about each worker whose heartbeat is gone.
func (w *watch) mayDeclare(m store.WorkerMeta, alive map[string]string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	a := w.absent[m.ID]
	if a == nil {
		a = &hold.Absence{}
		w.absent[m.ID] = a
	}
	all := true
	for _, d := range m.Dispatchers {
		if _, ok := alive[d]; !ok {
			all = false
		}
	}
	return w.me.MayDeclare(w.rules, w.now(), a, all)
}

func (w *watch) forget(id task.WorkerID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.absent, id)
}

func (w *watch) isPaused() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.now() < w.until
}
