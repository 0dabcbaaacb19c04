package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/control"
	"github.com/millrace/millrace/internal/guard"
	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/spec"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// life is one incarnation: a worker id and what runs under it.
type life struct {
	a   *Agent
	id  task.WorkerID
	log *slog.Logger

	lanes []string // all that it serves, high first
	ctl   *control.Client

	mu       sync.Mutex
	held     map[held]*attempt
	used     int // slots
	draining bool

	lease    lease
	unknown  map[string]bool // entries that Redis counts as ours and we did not know at the last renewal
	linked   map[string]bool // dispatchers that wrote themselves into our meta
	linkedMu sync.Mutex

	freed    chan struct{} // a slot was freed, or the fetch loop has another reason to look
	rung     chan struct{} // a dispatcher rang, or came or went
	kick     chan struct{} // renew now
	resend   chan struct{} // repeat recent outcomes
	asked    sentTimes
	claiming atomic.Bool // a claim is under way: Redis may count tasks as ours that we do not hold yet
	failing  atomic.Bool // renewals through Redis fail
	finishes chan *ending
	fencedCh chan struct{}
	fenced   sync.Once
	runID    string      // of the Redis process that was renewed with
	broken   atomic.Bool // the connection to Redis broke: renew before claiming
}

type held struct {
	id      task.ID
	attempt uint32
}

func newLife(a *Agent, id task.WorkerID) (*life, error) {
	l := &life{
		a: a, id: id, log: a.log.With(logkey.Worker, id), held: map[held]*attempt{}, unknown: map[string]bool{}, linked: map[string]bool{},
		freed: make(chan struct{}, 1), rung: make(chan struct{}, 1), kick: make(chan struct{}, 1), resend: make(chan struct{}, 1),
		finishes: make(chan *ending, maxBatch), fencedCh: make(chan struct{}),
	}
	l.lease.rules = a.cfg.rules()
	for _, p := range store.Priorities {
		for _, q := range a.cfg.Queues {
			l.lanes = append(l.lanes, store.Lane(q, p))
		}
	}
	ctl, err := control.NewClient(control.ClientConfig{
		WorkerID: string(id), AgentVersion: a.version, Queues: a.cfg.Queues,
		Slots: a.cfg.Slots, Token: []byte(a.cfg.Token.Reveal()),
	}, l.callbacks(), control.Deps{Log: a.log, Registry: a.reg})
	if err != nil {
		return nil, err
	}
	l.ctl = ctl
	return l, nil
}

// run is the whole incarnation. It returns store.ErrFenced when the worker was declared dead, nil after a drain.
func (l *life) run(ctx context.Context, guardLost <-chan struct{}) error {
	if err := l.register(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	l.log.Info("agent started", "slots", l.a.cfg.Slots, "queues", l.a.cfg.Queues)

	// The loops outlive ctx: while draining the worker still renews and reports.
	base, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	fetchCtx, stopFetch := context.WithCancel(ctx)
	defer stopFetch()
	var g errgroup.Group
	g.Go(func() error { l.renewLoop(base); return nil })
	g.Go(func() error { l.finishLoop(base); return nil })
	g.Go(func() error { return l.ctl.Run(base) })
	g.Go(func() error { l.discover(base); return nil })
	fetched := make(chan struct{})
	go func() { defer close(fetched); l.fetchLoop(fetchCtx) }() // ends with stopFetch

	var err error
	select {
	case <-ctx.Done():
	case <-l.fencedCh:
		err = store.ErrFenced
	case <-guardLost:
		err = errors.New("the guard process died: the tasks were stopped, because nobody would stop them if this agent hung")
	}
	stopFetch()
	<-fetched
	if err == nil {
		err = l.drain(base, guardLost)
	} else {
		l.stopAll(stopLost)
		l.waitIdle(base, nil)
	}
	stop()
	gerr := g.Wait()
	l.a.guard.Disarm()
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
	defer cancel()
	if err == nil {
		l.leave(last)
	}
	l.log.Info("agent stopped")
	return errors.Join(err, gerr)
}

// register makes the worker known. It tries until ctx ends: an agent outlives any outage of Redis.
func (l *life) register(ctx context.Context) error {
	host, _ := os.Hostname()
	loop := l.a.status.Loop("agent.register")
	for tries := 0; ; tries++ {
		sent := guard.Now()
		err := l.a.st.Register(ctx, l.a.meta(l.id, host, os.Getpid()), l.a.cfg.HeartbeatTTL)
		if err == nil {
			l.lease.renewed(sent)
			l.a.met.slots.Set(float64(l.a.cfg.Slots))
			loop.Success("registered")
			l.a.readyOnce.Do(func() { close(l.a.ready) })
			return nil
		}
		loop.Failure(err)
		l.a.errs.Error(ctx, "register", "cannot register, tries again", err)
		if !store.Backoff(ctx, tries) {
			return ctx.Err()
		}
	}
}

// drain lets running tasks go on for a while, then gives them back. What was claimed and did not start goes back at once.
func (l *life) drain(ctx context.Context, guardLost <-chan struct{}) error {
	l.mu.Lock()
	l.draining = true
	n := len(l.held)
	l.mu.Unlock()
	if err := l.a.st.SetDraining(ctx, l.id, true); err != nil {
		l.log.Info("draining is not shown in Redis", logkey.Err, err)
	}
	l.a.status.SetNotReady("draining", "this agent stops")
	if n > 0 {
		l.log.Info("draining", "running", n, "for", l.a.cfg.DrainTimeout)
	}
	timer := time.NewTimer(l.a.cfg.DrainTimeout)
	defer timer.Stop()
	early := make(chan struct{})
	var err error
	go func() { // ends with the first of its cases; fencedCh or idle come at the latest
		defer close(early)
		select {
		case <-timer.C:
		case <-l.a.hurry:
		case <-l.fencedCh:
		case <-guardLost:
		case <-l.idle():
		}
	}()
	<-early
	select {
	case <-l.fencedCh:
		err = store.ErrFenced
		l.stopAll(stopLost)
	case <-guardLost:
		l.stopAll(stopLost)
	default:
		l.stopAll(stopPreempted)
	}
	bounded, cancel := context.WithTimeout(ctx, l.longestGrace()+handlerPatience)
	defer cancel()
	l.waitIdle(bounded, l.fencedCh)
	if n := len(l.all()); n > 0 {
		return fmt.Errorf("%d tasks did not end although they were told to: a handler must return when its context ends; they are taken over once this worker's heartbeat is gone", n)
	}
	if errors.Is(err, store.ErrFenced) {
		return nil // we stop anyway
	}
	return err
}

// handlerPatience is for what the grace of a task does not bound: Go handlers, and reporting to a Redis that is slow.
const handlerPatience = 15 * time.Second

func (l *life) longestGrace() (d time.Duration) {
	for _, a := range l.all() {
		d = max(d, spec.Grace(a.t))
	}
	return d
}

// idle is closed when nothing is held any more.
func (l *life) idle() <-chan struct{} {
	ch := make(chan struct{})
	go func() { // ends when the last attempt has
		defer close(ch)
		l.waitIdle(context.Background(), nil)
	}()
	return ch
}

// waitIdle returns when nothing is held. When fenced closes meanwhile, outcomes do not count any more and what waits to
// be reported is dropped.
func (l *life) waitIdle(ctx context.Context, fenced <-chan struct{}) {
	for {
		l.mu.Lock()
		var one *attempt
		for _, a := range l.held {
			one = a
			break
		}
		l.mu.Unlock()
		if one == nil {
			return
		}
		select {
		case <-one.gone:
		case <-fenced:
			l.stopAll(stopLost)
			fenced = nil
		case <-ctx.Done():
			return
		}
	}
}

func (l *life) stopAll(why stopWhy) {
	for _, a := range l.all() {
		a.stop(why, -1)
	}
}

func (l *life) all() []*attempt {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]*attempt, 0, len(l.held))
	for _, a := range l.held {
		out = append(out, a)
	}
	return out
}

// leave takes the worker out of Redis; it holds nothing any more.
func (l *life) leave(ctx context.Context) {
	err := l.a.st.Leave(ctx, l.id, l.lanes)
	if err == nil {
		err = l.a.home.forget()
	}
	if err != nil {
		l.log.Info("not taken out of Redis; a reaper does that", logkey.Err, err)
	}
}

func (l *life) fence() { l.fenced.Do(func() { close(l.fencedCh) }) }

func (l *life) isFenced() bool {
	select {
	case <-l.fencedCh:
		return true
	default:
		return false
	}
}

// add puts a claimed task among the held ones; drop takes it out and frees its slots.
func (l *life) add(a *attempt) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.held) == 0 {
		// Before anything runs; the renewals move it from here on.
		l.a.guard.Extend(l.lease.until().Add(l.a.cfg.margin() / 2))
	}
	l.held[held{a.c.ID, a.c.Attempt}] = a
	l.used += a.slots
}

func (l *life) drop(a *attempt) {
	l.mu.Lock()
	k := held{a.c.ID, a.c.Attempt}
	if l.held[k] == a {
		delete(l.held, k)
		l.used -= a.slots
	}
	l.mu.Unlock()
	a.once.Do(func() { close(a.gone) })
	poke(l.freed)
}

func (l *life) find(id task.ID, attempt uint32) *attempt {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.held[held{id, attempt}]
}

// free is how many more tasks may be claimed.
func (l *life) free() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.draining {
		return 0
	}
	return max(l.a.cfg.Slots-l.used, 0)
}

func poke(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default: // it is poked already
	}
}

// callbacks are what the control channel does here. They run on its reading goroutines and never block.
func (l *life) callbacks() control.Callbacks {
	return control.Callbacks{
		State:          l.heartbeat,
		OnConnected:    func(d string, _ *millracev1.ControlWelcome) { l.link(d, true); l.lease.connected(d); poke(l.rung) },
		OnDisconnected: func(d string) { l.lease.disconnected(d); poke(l.rung) },
		OnHeartbeatAck: l.onAck,
		OnRing:         func(string, string) { poke(l.rung) },
		OnCancel: func(_ string, m *millracev1.ControlCancel) {
			if a := l.find(task.ID(m.GetTaskId()), m.GetAttempt()); a != nil {
				a.stop(stopCancelled, -1)
			}
		},
		OnKill: func(_ string, m *millracev1.ControlKill) {
			if a := l.find(task.ID(m.GetTaskId()), m.GetAttempt()); a != nil {
				a.stop(stopCancelled, 0)
			}
		},
		OnSignal: func(_ string, m *millracev1.ControlSignal) {
			if a := l.find(task.ID(m.GetTaskId()), m.GetAttempt()); a != nil {
				a.signal(m.GetSignal(), m.GetTree())
			}
		},
		OnDrain:  func(string, *millracev1.ControlDrain) { l.setDraining(true) },
		OnResume: func(string) { l.setDraining(false) },
	}
}

func (l *life) setDraining(on bool) {
	l.mu.Lock()
	l.draining = on
	l.mu.Unlock()
	poke(l.freed)
}

func (l *life) link(dispatcher string, on bool) {
	l.linkedMu.Lock()
	defer l.linkedMu.Unlock()
	if on {
		l.linked[dispatcher] = true
	} else {
		delete(l.linked, dispatcher)
	}
}

// discover keeps the control channel dialling every dispatcher that is registered, and takes dispatchers that are
// gone out of our meta, so that the reapers do not wait for them.
func (l *life) discover(ctx context.Context) {
	loop := l.a.status.Loop("agent.discover")
	for {
		addrs, err := l.a.st.DispatcherAddrs(ctx)
		if err != nil {
			loop.Failure(err)
		} else {
			loop.Success("")
			l.ctl.SetTargets(l.withConnected(addrs))
			l.unlink(ctx, addrs)
		}
		pause := 5 * time.Second
		if len(l.ctl.Connected()) == 0 {
			pause = 300 * time.Millisecond
		}
		t := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
	}
}

// withConnected keeps a connection that works although the registration is gone, as after an outage of Redis: it may
// be what lets the worker hold.
func (l *life) withConnected(addrs map[string]string) map[string]string {
	l.linkedMu.Lock()
	defer l.linkedMu.Unlock()
	out := make(map[string]string, len(addrs))
	maps.Copy(out, addrs)
	for _, d := range l.ctl.Connected() {
		if _, ok := out[d]; !ok {
			out[d] = l.lease.addr(d)
		}
	}
	l.lease.noteAddrs(addrs)
	return out
}

func (l *life) unlink(ctx context.Context, addrs map[string]string) {
	connected := map[string]bool{}
	for _, d := range l.ctl.Connected() {
		connected[d] = true
	}
	l.linkedMu.Lock()
	var gone []string
	for d := range l.linked {
		if _, ok := addrs[d]; !ok && !connected[d] {
			gone = append(gone, d)
		}
	}
	l.linkedMu.Unlock()
	for _, d := range gone {
		if l.a.st.Link(ctx, l.id, d, false) == nil {
			l.link(d, false)
		}
	}
}
