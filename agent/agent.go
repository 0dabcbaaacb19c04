// Package agent pulls tasks and runs them, as processes or as Go handlers, proves to Redis that it lives, ships what
// they print and reports how they end.
//
// It is used by cmd and by programs that embed it with handlers of their own. What an agent runs is its as long as
// Redis says so: it stops a task before anybody else may start it. It never decides that another worker is dead,
// except for its own predecessor on the same state directory.
package agent

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sort"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/internal/guard"
	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/logship"
	"github.com/millrace/millrace/internal/ops"
	"github.com/millrace/millrace/internal/proc"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
)

// Deps of an Agent.
type Deps struct {
	// Store to use; nil opens one as the configuration says, for the time of Run. It may be shared.
	Store    *store.Store
	Log      *slog.Logger
	Registry prometheus.Registerer
	Status   *ops.Status
	// Guard is the dead-man's switch; nil for an agent embedded in another program, which then runs handlers only.
	Guard *guard.Link
	// NoGuard lets an agent without a guard run processes all the same: what they start may outlive a killed agent.
	NoGuard bool
	// Hurry, when closed, ends a drain: what still runs is cancelled with its grace.
	Hurry <-chan struct{}
	// Version of the program, for people.
	Version string
}

// Agent runs tasks in up to cfg.Slots slots.
type Agent struct {
	cfg      Config
	st       *store.Store
	log      *slog.Logger
	errs     *logkey.Limiter
	met      *metrics
	status   *ops.Status
	guard    *guard.Link
	procs    bool // may run processes
	hurry    <-chan struct{}
	version  string
	handlers map[string]HandlerFunc
	reg      prometheus.Registerer

	home *home
	ship *logship.Shipper

	ownStore  bool
	ready     chan struct{} // closed at the first registration
	readyOnce sync.Once
}

// New checks the configuration and builds an agent. It starts nothing.
func New(cfg Config, deps Deps, opts ...Option) (*Agent, error) {
	cfg = cfg.filled()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if deps.Log == nil {
		deps.Log = slog.New(slog.DiscardHandler)
	}
	if deps.Status == nil {
		deps.Status = ops.NewStatus()
	}
	a := &Agent{
		cfg: cfg, st: deps.Store, status: deps.Status, guard: deps.Guard, procs: deps.Guard != nil || deps.NoGuard,
		hurry: deps.Hurry, version: deps.Version, handlers: map[string]HandlerFunc{}, reg: deps.Registry, ready: make(chan struct{}), met: newMetrics(deps.Registry),
	}
	a.log = deps.Log.With(logkey.Component, "agent")
	a.errs = logkey.NewLimiter(a.log)
	for _, o := range opts {
		o(a)
	}
	if a.st == nil {
		st, err := store.New(store.Options{URL: cfg.URL, Namespace: cfg.Namespace, Name: "millrace-agent"}, a.log)
		if err != nil {
			return nil, err
		}
		a.st, a.ownStore = st, true
	}
	for name, fn := range a.handlers {
		if name == "" || fn == nil {
			return nil, fmt.Errorf("handler %q: needs a name and a function", name)
		}
	}
	return a, nil
}

// Run works until ctx ends, then drains, and returns after everything that it started has ended. The error is nil
// when it stopped in order. Call it once.
func (a *Agent) Run(ctx context.Context) error {
	if a.ownStore {
		defer func() { _ = a.st.Close() }()
		if err := a.st.Wait(ctx, a.cfg.WaitRedis); err != nil {
			return err
		}
		warnings, err := a.st.Check(ctx, a.cfg.Strict)
		for _, w := range warnings {
			a.log.Warn("redis can lose tasks as it is set", logkey.Reason, w)
		}
		if err != nil {
			return err
		}
	}
	h, err := openHome(a.cfg.StateDir, a.cfg.Name)
	if err != nil {
		return err
	}
	defer h.close()
	a.home = h
	if err := h.share(a.guard); err != nil {
		return err
	}
	if a.procs {
		if err := proc.BecomeSubreaper(); err != nil {
			return fmt.Errorf("adopt orphans of tasks: %w", err)
		}
	}
	if a.ship, err = logship.New(logship.Config{
		SpoolDir: filepath.Join(a.cfg.StateDir, "spool"), LimitBytes: uint64(a.cfg.LogLimit),
		SpoolLimit: a.cfg.SpoolLimit, Compress: true,
	},
		logship.Deps{Appender: a.st, Shards: a.st.LogShards, Logger: a.log, Registerer: a.reg}); err != nil {
		return err
	}
	shipCtx, stopShip := context.WithCancel(context.WithoutCancel(ctx))
	shipped := make(chan error, 1)
	go func() { shipped <- a.ship.Run(shipCtx) }() // ends with stopShip below
	swept := make(chan struct{})
	go func() { defer close(swept); a.sweepLeftovers(shipCtx) }() // ends with stopShip below
	err = a.lives(ctx)
	stopShip()
	<-swept
	if serr := <-shipped; err == nil && serr != nil && !errors.Is(serr, context.Canceled) {
		err = serr
	}
	return err
}

// leftoversEvery is how often directories of tasks that ended long ago are looked for.
const leftoversEvery = time.Hour

// sweepLeftovers removes directories that were kept for people. The state directory may be shared: only a task that has
// ended, by its record, or has none any more, is swept.
func (a *Agent) sweepLeftovers(ctx context.Context) {
	t := time.NewTicker(leftoversEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if err := a.sweepLeftoversOnce(ctx); err != nil && ctx.Err() == nil {
			a.log.Warn("old working directories not removed, tries again later", logkey.Err, err)
		}
	}
}

func (a *Agent) sweepLeftoversOnce(ctx context.Context) error {
	names, err := a.home.stale(a.cfg.KeepWork)
	if err != nil || len(names) == 0 {
		return err
	}
	ids := make([]task.ID, len(names))
	for i, n := range names {
		ids[i] = task.ID(n)
	}
	snaps, err := a.st.Snapshots(ctx, ids)
	if err != nil {
		return err
	}
	var errs []error
	for i, sn := range snaps {
		if sn.State == task.None || sn.State.Final() {
			errs = append(errs, a.home.remove(names[i]))
		}
	}
	return errors.Join(errs...)
}

// lives runs one incarnation after another: a worker that was declared dead goes on under a new id.
func (a *Agent) lives(ctx context.Context) error {
	guardLost := a.guard.Lost()
	for ctx.Err() == nil {
		l, err := a.newLife(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		err = l.run(ctx, guardLost)
		switch {
		case errors.Is(err, store.ErrFenced):
			a.met.fenced.Inc()
			a.log.Warn("this worker was declared dead; its tasks were stopped, going on under a new id", logkey.Worker, l.id)
		case err != nil:
			return err
		}
	}
	return nil
}

// newLife prepares an incarnation: whatever its predecessor on this state directory left is killed and declared dead
// first, which the lock on the directory makes certain.
func (a *Agent) newLife(ctx context.Context) (*life, error) {
	for tries := 0; ; tries++ {
		err := a.succeed(ctx)
		if err == nil {
			break
		}
		a.status.SetNotReady("redis", "Redis cannot be reached")
		a.errs.Error(ctx, "start", "cannot start yet, tries again", err)
		if !store.Backoff(ctx, tries) {
			return nil, ctx.Err()
		}
	}
	a.status.SetReady("redis")
	var b [5]byte
	_, _ = rand.Read(b[:])
	id := task.WorkerID(a.cfg.Name + "-" + hex.EncodeToString(b[:]))
	if err := a.home.remember(string(id)); err != nil {
		return nil, err
	}
	if err := a.guard.Announce(markerPrefix(id)); err != nil {
		return nil, err
	}
	return newLife(a, id)
}

// succeed settles what the previous holder of the state directory was.
func (a *Agent) succeed(ctx context.Context) error {
	old := a.home.predecessors()
	if len(old) == 0 {
		return nil
	}
	prefixes := make([]string, len(old))
	for i, w := range old {
		prefixes[i] = markerPrefix(task.WorkerID(w))
	}
	if err := a.sweep(prefixes); err != nil {
		return err
	}
	for _, w := range old {
		if _, err := a.st.Declare(ctx, task.WorkerID(w), true); err != nil {
			return err
		}
		if err := a.st.Hint(ctx, store.HintDead+" "+w); err != nil {
			return err
		}
	}
	return a.home.forget()
}

func (a *Agent) sweep(prefixes []string) error {
	if !a.procs {
		return nil
	}
	killed, err := proc.Sweep(func(marker string) bool {
		for _, p := range prefixes {
			if len(marker) > len(p) && marker[:len(p)] == p {
				return true
			}
		}
		return false
	})
	if err != nil {
		return fmt.Errorf("kill what a former agent left: %w", err)
	}
	for _, k := range killed {
		a.log.Warn("killed a process that a former agent left", logkey.PID, k.PID, "comm", k.Comm)
	}
	return nil
}

// markerPrefix begins the marker of every process tree of a worker.
func markerPrefix(w task.WorkerID) string { return string(w) + "/" }

func (a *Agent) handlerNames() []string {
	names := make([]string, 0, len(a.handlers))
	for n := range a.handlers {
		names = append(names, n)
	}
	sort.Strings(names)
	return names
}

func (a *Agent) meta(id task.WorkerID, host string, pid int) store.WorkerMeta {
	return store.WorkerMeta{
		ID: id, Slots: a.cfg.Slots, Queues: a.cfg.Queues, Handlers: a.handlerNames(), Host: host, PID: pid,
		Version: a.version, Started: time.Now(),
	}
}

// Queues that the agent serves.
func (a *Agent) Queues() []string { return a.cfg.Queues }

// Ready waits until the agent has made itself and its queues known in Redis for the first time.
func (a *Agent) Ready(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-a.ready:
		return nil
	}
}
