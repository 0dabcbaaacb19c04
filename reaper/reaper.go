// Package reaper finds workers that are dead and gives their tasks to others, and repairs what disagrees with the
// tasks' records. Any number may run, and one may die anywhere: every step is a guarded move or harmless when repeated.
//
// It is used by cmd. It never runs tasks, and the age of an entry never makes it take one: tasks may run for weeks.
package reaper

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/ops"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
)

// Deps of a Reaper.
type Deps struct {
	Store    *store.Store
	Log      *slog.Logger
	Registry prometheus.Registerer
	Status   *ops.Status
}

// Reaper is one reaper.
type Reaper struct {
	cfg    Config
	id     string
	st     *store.Store
	log    *slog.Logger
	errs   *logkey.Limiter
	met    *metrics
	status *ops.Status
	kick   chan struct{} // scan now

	watch  watch // who is missing, since when
	audits audits
}

// New checks the configuration and builds a reaper. It starts nothing.
func New(cfg Config, deps Deps) (*Reaper, error) {
	if err := cfg.Timing.Validate(); err != nil {
		return nil, err
	}
	if deps.Log == nil {
		deps.Log = slog.New(slog.DiscardHandler)
	}
	if deps.Status == nil {
		deps.Status = ops.NewStatus()
	}
	var b [5]byte
	_, _ = rand.Read(b[:])
	r := &Reaper{
		cfg: cfg, id: "reaper-" + hex.EncodeToString(b[:]), st: deps.Store, status: deps.Status, met: newMetrics(deps.Registry),
		kick: make(chan struct{}, 1), watch: newWatch(cfg),
	}
	r.log = deps.Log.With(logkey.Component, "reaper")
	r.errs = logkey.NewLimiter(r.log)
	return r, nil
}

// Run works until ctx ends and returns after everything that it started has ended.
func (r *Reaper) Run(ctx context.Context) error {
	r.log.Info("reaper started", "id", r.id)
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { r.scanLoop(gctx); return nil })
	g.Go(func() error { r.auditLoop(gctx); return nil })
	g.Go(func() error { r.listen(gctx); return nil })
	g.Go(func() error { r.listenHints(gctx); return nil })
	err := g.Wait()
	r.log.Info("reaper stopped", "id", r.id)
	return err
}

// listen takes expired heartbeats as a reason to scan now. They come late under load, or never: scanning is the truth.
func (r *Reaper) listen(ctx context.Context) {
	loop := r.status.Loop("reaper.events")
	for tries := 0; ctx.Err() == nil; tries++ {
		err := r.st.Expired(ctx, func() { loop.Success("subscribed"); r.scanSoon() }, func(key string) {
			if strings.HasPrefix(key, "worker:") && strings.HasSuffix(key, ":hb") {
				loop.Success("heard " + key)
				r.met.events.Inc()
				r.scanSoon()
			}
		})
		loop.Failure(err)
		if !store.Backoff(ctx, tries) {
			return
		}
	}
}

func (r *Reaper) listenHints(ctx context.Context) {
	for tries := 0; ctx.Err() == nil; tries++ {
		_ = r.st.Hints(ctx, func() {}, func(words string) {
			if strings.HasPrefix(words, store.HintDead+" ") {
				r.scanSoon()
			}
		})
		if !store.Backoff(ctx, tries) {
			return
		}
	}
}

func (r *Reaper) scanSoon() {
	select {
	case r.kick <- struct{}{}:
	default: // a scan is on its way already
	}
}

func (r *Reaper) scanLoop(ctx context.Context) {
	loop := r.status.Loop("reaper.scan")
	loop.Expect(6 * r.cfg.ScanInterval)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for tries := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-r.kick:
		case <-timer.C:
		}
		res, err := r.scanOnce(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			loop.Failure(err)
			r.watch.disconnected()
			r.errs.Error(ctx, "scan", "scan failed, tries again", err)
			if !store.Backoff(ctx, tries) {
				return
			}
			tries++
			timer.Reset(0)
			continue
		}
		tries = 0
		loop.Success(res.String())
		if res.any() {
			r.log.Info("scan", "declared", res.declared, "lost", res.lost, "buried", res.buried, "ghosts", res.ghosts)
		}
		next := r.cfg.ScanInterval
		if res.unsettled {
			next = min(next, minPause)
		}
		timer.Reset(next)
	}
}

// minPause is how soon a scan is repeated that had to leave entries alone for now.
const minPause = 500 * time.Millisecond

// result of one scan.
type result struct {
	workers, declared, lost, buried, ghosts int
	unsettled                               bool // something has to be looked at again soon
	paused                                  string
}

func (s result) any() bool { return s.declared+s.lost+s.buried+s.ghosts > 0 }

func (s result) String() string {
	t := fmt.Sprintf("%d workers, %d declared dead, %d attempts lost, %d buried", s.workers, s.declared, s.lost, s.buried)
	if s.paused != "" {
		t += "; declares nobody: " + s.paused
	}
	return t
}

// scanOnce declares who is dead, moves their tasks on and buries them.
func (r *Reaper) scanOnce(ctx context.Context) (result, error) {
	var res result
	if err := r.st.Ping(ctx); err != nil { // a new connection tells whether this is another Redis
		return res, err
	}
	workers, err := r.st.Workers(ctx)
	if err != nil {
		return res, err
	}
	alive, err := r.st.DispatcherAddrs(ctx)
	if err != nil {
		return res, err
	}
	res.workers = len(workers)
	res.paused = r.watch.look(workers, r.st.Server(), r.st.Now())
	var dead []task.WorkerID
	for _, w := range workers {
		if w.Dead {
			dead = append(dead, w.ID)
			continue
		}
		if w.Beating || !r.watch.mayDeclare(w, alive) {
			continue
		}
		now, err := r.st.Declare(ctx, w.ID, false)
		if err != nil {
			return res, err
		}
		if now {
			res.declared++
			r.met.declared.Inc()
			r.log.Warn("worker declared dead: its heartbeat is gone", logkey.Worker, w.ID, "host", w.Host)
			dead = append(dead, w.ID)
		}
	}
	if len(dead) == 0 {
		return res, nil
	}
	return res, r.recoverAll(ctx, dead, &res)
}

// recoverAll moves on every task of dead workers and buries those that have none left.
func (r *Reaper) recoverAll(ctx context.Context, dead []task.WorkerID, res *result) error {
	lanes, err := r.st.Lanes(ctx)
	if err != nil {
		return err
	}
	isDead := map[task.WorkerID]bool{}
	for _, w := range dead {
		isDead[w] = true
		if err := r.recoverEntries(ctx, w, lanes, res); err != nil {
			return err
		}
	}
	// Tasks whose entry was lost are only in the index of running tasks.
	if err := r.recoverRunning(ctx, func(o task.WorkerID) bool { return isDead[o] }, res); err != nil {
		return err
	}
	for _, w := range dead {
		gone, err := r.st.Bury(ctx, w, lanes)
		if err != nil {
			return err
		}
		if gone {
			res.buried++
			r.met.buried.Inc()
			r.watch.forget(w)
			r.log.Info("worker buried", logkey.Worker, w)
		} else {
			res.unsettled = true
		}
	}
	return nil
}

// page is how many entries or records are handled in one go: a script of that size holds Redis for about a millisecond.
const page = 100

func (r *Reaper) recoverEntries(ctx context.Context, w task.WorkerID, lanes []string, res *result) error {
	for _, lane := range lanes {
		for after := ""; ; {
			orphans, next, err := r.st.Adopt(ctx, w, r.id, lane, after, page)
			if err != nil {
				return err
			}
			if err := r.loseEntries(ctx, w, lane, orphans, res); err != nil {
				return err
			}
			if after = next; next == "" {
				break
			}
		}
	}
	return nil
}

func (r *Reaper) loseEntries(ctx context.Context, w task.WorkerID, lane string, orphans []store.Orphan, res *result) error {
	var ids []task.ID
	var live []store.Orphan
	for _, o := range orphans {
		if o.IsGhost {
			res.ghosts++
			r.met.ghosts.Inc()
			continue
		}
		live, ids = append(live, o), append(ids, o.Task.ID)
	}
	recs, err := r.st.Records(ctx, ids)
	if err != nil {
		return err
	}
	var changes []*store.Change
	var about []store.Orphan
	for i, rec := range recs {
		o := live[i]
		if rec == nil {
			e := store.Entry{Stream: r.st.Keys().Dispatch(lane), ID: o.Entry, Fields: map[string]any{"i": string(o.Task.ID), "a": fmt.Sprint(o.Task.Attempt)}}
			if err := r.st.Reject(ctx, store.GroupAgents, e, "record_missing", "the dispatch entry of a dead worker names a task that has no record", string(o.Task.ID)); err != nil {
				return err
			}
			continue
		}
		changes, about = append(changes, r.loss(rec, o.Task.Attempt, w)), append(about, o)
	}
	out, err := r.st.Do(ctx, changes)
	if err != nil {
		return err
	}
	for i, o := range out {
		switch {
		case o.Done:
			r.noteLoss(changes[i], o, res)
		case o.Err != nil:
			r.errs.Error(ctx, "lose", "a lost attempt could not be moved on, tries again", o.Err, logkey.Task, changes[i].ID)
			res.unsettled = true
		case o.Now.Entry == about[i].Entry && !o.Now.State.Final():
			res.unsettled = true // its owner is not known to be dead (yet)
		default:
			if err := r.st.Ack(ctx, r.st.Keys().Dispatch(lane), store.GroupAgents, []string{about[i].Entry}); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *Reaper) noteLoss(c *store.Change, o store.Outcome, res *result) {
	res.lost++
	r.met.lost.Inc()
	r.log.Warn("attempt lost with its worker", logkey.Task, c.ID, logkey.Attempt, c.In.Attempt, logkey.Worker, c.In.Worker, logkey.State, o.Now.State.String())
}

// recoverRunning walks the index of running tasks and moves on those whose owner is dead.
func (r *Reaper) recoverRunning(ctx context.Context, dead func(task.WorkerID) bool, res *result) error {
	for start := int64(0); ; {
		ids, err := r.st.Listed(ctx, store.IndexRunning, start, 10*page, false)
		if err != nil || len(ids) == 0 {
			return err
		}
		snaps, err := r.st.Snapshots(ctx, ids)
		if err != nil {
			return err
		}
		var lost, stale []task.ID
		for i, sn := range snaps {
			switch {
			case sn.State != task.Running:
				stale = append(stale, ids[i])
			case dead(sn.Owner):
				lost = append(lost, ids[i])
			}
		}
		if err := r.st.ForgetUnless(ctx, store.IndexRunning, task.Running, stale...); err != nil {
			return err
		}
		moved, err := r.loseIDs(ctx, lost, time.Time{}, res)
		if err != nil {
			return err
		}
		// What was taken out of the index moved the rest forward.
		start += int64(len(ids) - len(stale) - moved)
	}
}

// loseIDs moves running tasks on; with late set also those of living workers whose lease ended before then.
func (r *Reaper) loseIDs(ctx context.Context, ids []task.ID, late time.Time, res *result) (moved int, err error) {
	for len(ids) > 0 {
		n := min(len(ids), page)
		recs, err := r.st.Records(ctx, ids[:n])
		if err != nil {
			return moved, err
		}
		var changes []*store.Change
		for _, rec := range recs {
			if rec == nil || rec.State != task.Running {
				continue
			}
			c := r.loss(rec, rec.Attempt, rec.Owner)
			c.LateBefore = late
			changes = append(changes, c)
		}
		out, err := r.st.Do(ctx, changes)
		if err != nil {
			return moved, err
		}
		for i, o := range out {
			if o.Done {
				moved++
				r.noteLoss(changes[i], o, res)
			} else if o.Err != nil {
				r.errs.Error(ctx, "lose", "a lost attempt could not be moved on, tries again", o.Err, logkey.Task, changes[i].ID)
			}
		}
		ids = ids[n:]
	}
	return moved, nil
}

// auditLoop compares what should agree and repairs it.
func (r *Reaper) auditLoop(ctx context.Context) {
	loop := r.status.Loop("reaper.audit")
	for tries := 0; ; {
		err := r.auditOnce(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			loop.Failure(err)
			r.errs.Error(ctx, "audit", "audit failed, tries again", err)
			tries++
		default:
			loop.Success("")
			tries = 0
		}
		if err != nil && !errors.Is(err, context.Canceled) {
			if !store.Backoff(ctx, tries) {
				return
			}
			continue
		}
		t := time.NewTimer(time.Second)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
	}
}
