package agent

import (
	"context"
	"errors"
	"maps"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/millrace/millrace/internal/guard"
	"github.com/millrace/millrace/internal/hold"
	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// lease is what this worker knows of its own life in Redis, on a clock that counts sleep and that nobody sets. The
// decisions are package hold's.
type lease struct {
	mu    sync.Mutex
	rules hold.Rules
	me    hold.Agent
	peers map[string]*hold.Peer // by dispatcher; a new connection begins a new one
	addrs map[string]string
}

// instant is the clock that package hold is asked on.
func instant(i guard.Instant) hold.Instant { return hold.Instant(i) }

// renewed notes a renewal by the time at which it was sent: what lies between sending and arriving is not ours.
func (e *lease) renewed(sent guard.Instant) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.me.Renewed(instant(sent))
}

// connected begins anew with a dispatcher.
func (e *lease) connected(dispatcher string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.peers == nil {
		e.peers = map[string]*hold.Peer{}
	}
	e.peers[dispatcher] = &hold.Peer{}
}

// disconnected forgets what a dispatcher said.
func (e *lease) disconnected(dispatcher string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.peers, dispatcher)
}

// vouched notes that a dispatcher which counts for us could not reach Redis either.
func (e *lease) vouched(dispatcher string, sent guard.Instant) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if p := e.peers[dispatcher]; p != nil {
		e.me.Vouched(e.rules, p, instant(sent))
	}
}

// until is when tasks have to be stopped.
func (e *lease) until() guard.Instant {
	e.mu.Lock()
	defer e.mu.Unlock()
	return guard.Instant(e.me.Until(e.rules))
}

// sure reports whether the lease itself is valid: only then may new work begin.
func (e *lease) sure() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return instant(guard.Now()) < e.me.Sure(e.rules)
}

func (e *lease) addr(dispatcher string) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.addrs[dispatcher]
}

func (e *lease) noteAddrs(addrs map[string]string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.addrs == nil {
		e.addrs = map[string]string{}
	}
	maps.Copy(e.addrs, addrs)
}

// retryRenew is the pause between tries while renewals fail. It is well below the 3 s for which a dispatcher vouches.
const retryRenew = 500 * time.Millisecond

// renewTimeout bounds one try, so that a Redis that hangs does not use up the time there is: a dispatcher's word counts
// only when it was asked soon after the last good renewal.
func (c Config) renewTimeout() time.Duration { return min(time.Second, c.HeartbeatInterval/4) }

// renewLoop proves to Redis that worker and tasks live, and stops the tasks before anybody may think that they do not.
func (l *life) renewLoop(ctx context.Context) {
	loop := l.a.status.Loop("agent.renew")
	loop.Expect(l.a.cfg.HeartbeatTTL)
	defer loop.Expect(0)
	timer := time.NewTimer(0)
	defer timer.Stop()
	fails := 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.kick:
		case <-timer.C:
		}
		if fails > 0 {
			l.askDispatchers() // they shall answer while we wait for a Redis that hangs
		}
		at := guard.Now()
		err := l.renewOnce(ctx, at)
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, store.ErrFenced):
			loop.Failure(err)
			l.fence()
			return
		case err != nil:
			fails++
			loop.Failure(err)
			l.a.met.renewals.WithLabelValues("failed").Inc()
			l.a.errs.Warn(ctx, "renew", "renewal failed, asks the dispatchers and tries again", err)
			if fails == 1 {
				l.askDispatchers()
			}
		default:
			if fails > 0 {
				l.log.Info("redis is back", "failed_renewals", fails)
			}
			fails = 0
			l.broken.Store(false)
			l.noteServer()
			l.a.met.renewals.WithLabelValues("redis").Inc()
			loop.Success("")
			poke(l.freed)
		}
		l.failing.Store(fails > 0)
		l.guardUntil()
		timer.Reset(l.pause(fails))
	}
}

// disarmIdle switches the guard off while nothing runs that could run twice, in one step with looking: see add.
func (l *life) disarmIdle() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.held) > 0 {
		return false
	}
	l.a.guard.Disarm()
	return true
}

// noteServer has recent outcomes repeated when this is not the Redis process that it was.
func (l *life) noteServer() {
	sv := l.a.st.Server()
	if sv == nil || sv.RunID == l.runID {
		return
	}
	if l.runID != "" {
		poke(l.resend)
	}
	l.runID = sv.RunID
}

// pause until the next renewal: short while they fail, and while there is no control channel to bring cancels.
func (l *life) pause(fails int) time.Duration {
	d := l.a.cfg.HeartbeatInterval
	if fails > 0 {
		return min(d, retryRenew)
	}
	if len(l.ctl.Connected()) == 0 && len(l.all()) > 0 {
		d = min(d, time.Second)
	}
	return d
}

// guardUntil moves the dead-man's switch, or fences: what runs is stopped when the time is over.
func (l *life) guardUntil() {
	if l.disarmIdle() {
		return
	}
	until := l.lease.until()
	if !l.failing.Load() || guard.Now() < until {
		// The guard comes after us: it acts only when we do not.
		l.a.guard.Extend(until.Add(l.a.cfg.margin() / 2))
		return
	}
	n := 0
	for _, a := range l.all() {
		if a.keep() {
			continue
		}
		n++
		if a.stopped() < stopIsolated {
			a.stop(stopIsolated, 0)
			l.log.Warn("cut off from Redis: stopped a task before anybody else may start it", logkey.Task, a.c.ID, logkey.Attempt, a.c.Attempt)
		}
	}
	if n == 0 {
		l.a.guard.Disarm() // nothing runs that could run twice
	}
}

func (l *life) renewOnce(ctx context.Context, at guard.Instant) error {
	attempts := l.all()
	hs := make([]store.Held, len(attempts))
	for i, a := range attempts {
		hs[i] = store.Held{ID: a.c.ID, Attempt: a.c.Attempt}
	}
	short, cancel := context.WithTimeout(ctx, l.a.cfg.renewTimeout())
	defer cancel()
	got, err := l.a.st.Renew(short, store.RenewFor{
		Worker: l.id, Beat: l.a.cfg.Name, TTL: l.a.cfg.HeartbeatTTL, Lease: l.a.cfg.LeaseTTL,
		Held: hs, Lanes: l.lanes,
	})
	if err != nil {
		return err
	}
	l.lease.renewed(at)
	for i, st := range got.Status {
		switch st {
		case store.OursCancel:
			attempts[i].stop(stopCancelled, -1)
		case store.NotOurs:
			if !attempts[i].reporting() {
				l.log.Warn("attempt is no longer ours, stopping it", logkey.Task, attempts[i].c.ID, logkey.Attempt, attempts[i].c.Attempt)
				attempts[i].stop(stopLost, 0)
			}
		case store.Ours:
		}
	}
	return l.disown(ctx, attempts, got.Pending)
}

// disown gives back what Redis counts as ours and we did not know at two renewals in a row: claimed by a call whose
// answer got lost. What was known before or after the renewal is not unknown.
//
// While a claim is under way nothing can be said: what Redis lists may be in an answer that is about to arrive, and two
// renewals can be milliseconds apart. The next renewal looks again.
func (l *life) disown(ctx context.Context, before []*attempt, pending [][]string) error {
	if l.claiming.Load() { // must be asked before all is: what the claim brought is held when it is over
		l.unknown = nil
		return nil
	}
	known := map[string]bool{}
	for _, a := range append(before, l.all()...) {
		known[a.c.At.Lane+"/"+a.c.At.Entry] = true
	}
	unknown := map[string]bool{}
	for i, ids := range pending {
		for _, id := range ids {
			k := l.lanes[i] + "/" + id
			if known[k] {
				continue
			}
			if !l.unknown[k] {
				unknown[k] = true
				poke(l.kick) // look again soon
				continue
			}
			if err := l.giveBack(ctx, l.lanes[i], id); err != nil {
				return err
			}
		}
	}
	l.unknown = unknown
	return nil
}

func (l *life) giveBack(ctx context.Context, lane, entry string) error {
	h, ok, err := l.a.st.EntryTask(ctx, lane, entry)
	if err != nil || !ok {
		return err
	}
	now := timestamppb.New(l.a.st.Now())
	l.log.Warn("giving back a task that was claimed by a call whose answer got lost", logkey.Task, h.ID, logkey.Attempt, h.Attempt)
	_, err = l.a.st.Do(ctx, []*store.Change{{
		Move: task.Release, ID: h.ID, In: task.Input{Attempt: h.Attempt, Worker: l.id},
		Guess: store.Snapshot{Record: task.Record{State: task.Running, Attempt: h.Attempt, Owner: l.id}, Entry: entry, Lane: lane},
		End: &millracev1.AttemptEnd{
			Attempt: h.Attempt, Worker: string(l.id), Reason: millracev1.Reason_REASON_NEVER_STARTED, Message: "claimed by a call whose answer got lost",
			StartedAt: now, EndedAt: now, NoOutput: true,
		},
	}})
	l.a.met.released.Inc()
	return err
}

// sentTimes remembers when heartbeats that ask for a renewal were sent, by sequence.
type sentTimes struct {
	mu  sync.Mutex
	seq uint64
	at  map[uint64]guard.Instant
}

// wantsBit marks sequences of heartbeats that ask for a renewal; those that go by themselves have small numbers.
const wantsBit = 1 << 32

func (s *sentTimes) next() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at == nil {
		s.at = map[uint64]guard.Instant{}
	}
	s.seq++
	s.at[s.seq] = guard.Now()
	delete(s.at, s.seq-64)
	return s.seq | wantsBit
}

// when tells when the heartbeat of that sequence was sent; ok is false for one that asked for nothing.
func (s *sentTimes) when(sequence uint64) (at guard.Instant, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at, ok = s.at[sequence&^wantsBit]
	return at, ok && sequence&wantsBit != 0
}

// askDispatchers asks all that are connected to renew for us.
func (l *life) askDispatchers() {
	hb := l.heartbeat()
	hb.WantsRenewal = true
	hb.Sequence = l.asked.next()
	l.ctl.HeartbeatAll(hb)
}

// heartbeat says what runs.
func (l *life) heartbeat() *millracev1.ControlHeartbeat {
	hb := &millracev1.ControlHeartbeat{RunningListed: true, FreeSlots: uint32(l.free())}
	for _, a := range l.all() {
		hb.Running = append(hb.Running, &millracev1.ControlAttempt{TaskId: string(a.c.ID), Attempt: a.c.Attempt})
	}
	hb.RunningCount = uint32(len(hb.Running))
	return hb
}

// onAck takes a dispatcher's answer in at once, on the goroutine that reads it: while Redis hangs the renewal loop does too.
func (l *life) onAck(dispatcher string, m *millracev1.ControlHeartbeatAck) {
	at, ok := l.asked.when(m.GetSequence())
	if !ok {
		return
	}
	defer l.guardUntil()
	switch {
	case m.GetFenced():
		l.fence()
	case m.GetRenewed():
		l.a.met.renewals.WithLabelValues("dispatcher").Inc()
		l.lease.renewed(at)
		for _, c := range m.GetCancels() {
			if a := l.find(task.ID(c.GetTaskId()), c.GetAttempt()); a != nil {
				a.stop(stopCancelled, -1)
			}
		}
		for _, r := range m.GetRefused() {
			if a := l.find(task.ID(r.GetTaskId()), r.GetAttempt()); a != nil && !a.reporting() {
				a.stop(stopLost, 0)
			}
		}
	case m.GetRedisUnreachable():
		l.lease.vouched(dispatcher, at)
	}
}
