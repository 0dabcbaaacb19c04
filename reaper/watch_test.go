package reaper

import (
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
)

func zscore(member string, at time.Time) redis.Z {
	return redis.Z{Score: float64(at.UnixMilli()), Member: member}
}

func workers(n int, beating bool) []store.WorkerMeta {
	var out []store.WorkerMeta
	for i := range n {
		out = append(out, store.WorkerMeta{ID: task.WorkerID(fmt.Sprintf("w%d", i)), Slots: 1, Beating: beating})
	}
	return out
}

func TestWatchPauses(t *testing.T) {
	t.Parallel()
	one := &store.Server{RunID: "one", Started: time.Now().Add(-time.Hour)}
	tests := map[string]func(w *watch) string{
		"nothing happened": func(w *watch) string { return w.look(workers(3, true), one, time.Now()) },
		"redis restarted": func(w *watch) string {
			return w.look(workers(3, true), &store.Server{RunID: "two", Started: time.Now().Add(-time.Hour)}, time.Now())
		},
		"we were disconnected": func(w *watch) string { w.disconnected(); return w.look(workers(3, true), one, time.Now()) },
		"the clock stepped":    func(w *watch) string { return w.look(workers(3, true), one, time.Now().Add(time.Hour)) },
	}
	for name, event := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWatch(testConfig())
			if why := w.look(workers(3, true), one, time.Now()); why != "" {
				t.Fatalf("paused at once: %s", why)
			}
			why := event(&w)
			if want := name != "nothing happened"; (why != "") != want {
				t.Errorf("pause %q, want one: %v", why, want)
			}
			if why != "" && w.mayDeclare(store.WorkerMeta{ID: "w9"}, nil) {
				t.Error("declares during the pause")
			}
		})
	}
}

func TestWatchPausesWhenMostVanish(t *testing.T) {
	t.Parallel()
	sv := &store.Server{RunID: "one", Started: time.Now().Add(-time.Hour)}
	w := newWatch(testConfig())
	if why := w.look(workers(6, true), sv, time.Now()); why != "" {
		t.Fatal(why)
	}
	if why := w.look(workers(6, false), sv, time.Now()); why == "" {
		t.Error("six of six vanished at once and it was believed")
	}
	few := newWatch(testConfig())
	few.look(workers(4, true), sv, time.Now())
	if why := few.look(workers(4, false), sv, time.Now()); why != "" {
		t.Errorf("four are too few to doubt: %s", why)
	}
}

// While a dispatcher that is recorded for a worker cannot be seen, the worker may be holding together with it.
func TestWatchWaitsForTheHoldLimit(t *testing.T) {
	t.Parallel()
	cfg := testConfig()
	w := newWatch(cfg)
	sv := &store.Server{RunID: "one", Started: time.Now().Add(-time.Hour)}
	w.look(workers(1, false), sv, time.Now())
	m := store.WorkerMeta{ID: "w0", Dispatchers: []string{"d"}}
	if !w.mayDeclare(m, map[string]string{"d": "addr"}) {
		t.Error("not declared although its dispatcher lives")
	}
	begin := time.Now()
	for !w.mayDeclare(m, nil) {
		w.look(workers(1, false), sv, time.Now())
		time.Sleep(10 * time.Millisecond)
		if time.Since(begin) > time.Minute {
			t.Fatal("never declared")
		}
	}
	if d := time.Since(begin); d < cfg.HoldLimit/2 {
		t.Errorf("declared after %v although its dispatcher is gone and the hold limit is %v", d, cfg.HoldLimit)
	}
}
