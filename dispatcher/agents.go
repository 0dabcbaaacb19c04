package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/millrace/millrace/internal/control"
	"github.com/millrace/millrace/internal/hold"
	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/ops"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

var _ control.Handler = (*Service)(nil)

// maxRenewals that wait; a worker whose heartbeat is not answered asks again.
const maxRenewals = 1024

// renewal is a worker's wish that we renew for it.
type renewal struct {
	w     control.WorkerInfo
	hb    *millracev1.ControlHeartbeat
	reply func(*millracev1.ControlHeartbeatAck)
}

// vouches are the words that Redis is gone for us too, which workers may rely on for a while. The decisions are
// package hold's.
type vouches struct {
	mu    sync.Mutex
	d     hold.Dispatcher
	last  map[string]renewal // the newest wish of each worker that relies on us
	zero  time.Time          // of the clock that package hold is asked on
	peers int
}

func (v *vouches) now() hold.Instant { return time.Since(v.zero) }

// give notes the word before it is sent.
func (v *vouches) give(rules hold.Rules, r renewal) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.d.Vouch(rules, r.w.ID, v.now())
	if v.last == nil {
		v.last = map[string]renewal{}
	}
	v.last[r.w.ID] = r
}

// settled notes that nobody can be misled about the worker any more.
func (v *vouches) settled(worker string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.d.Renewed(worker)
	delete(v.last, worker)
}

// owed returns the workers to renew before we may register, as they last asked.
func (v *vouches) owed() []renewal {
	v.mu.Lock()
	defer v.mu.Unlock()
	var out []renewal
	still := map[string]renewal{}
	for _, w := range v.d.Owed(v.now()) {
		still[w] = v.last[w]
		out = append(out, v.last[w])
	}
	v.last = still
	return out
}

func (v *vouches) mayRegister() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.d.MayRegister(v.now())
}

func (v *vouches) setPeers(n int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.peers = n
}

func (v *vouches) hasPeers() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.peers > 0
}

// Connected writes us into the worker's meta before it is welcomed: only then do we count for holding.
func (s *Service) Connected(ctx context.Context, w control.WorkerInfo) error {
	err := s.st.Link(ctx, task.WorkerID(w.ID), s.id, true)
	switch {
	case errors.Is(err, store.ErrFenced):
		return errors.New("this worker was declared dead or never registered")
	case err != nil:
		return fmt.Errorf("redis cannot be reached to register the connection: %w", err)
	}
	return nil
}

// Disconnected does nothing: the agent itself takes us out of its meta when it can reach Redis.
func (s *Service) Disconnected(control.WorkerInfo) {}

// Heartbeat answers at once, or hands the wish for a renewal to the loop that talks to Redis.
func (s *Service) Heartbeat(w control.WorkerInfo, hb *millracev1.ControlHeartbeat, reply func(*millracev1.ControlHeartbeatAck)) {
	if !hb.GetWantsRenewal() {
		reply(&millracev1.ControlHeartbeatAck{})
		return
	}
	select {
	case s.renews <- renewal{w, hb, reply}:
	default: // the agent asks again
	}
}

// Hungry needs nothing more: the bell looks at the lanes of hungry agents by itself.
func (s *Service) Hungry(control.WorkerInfo, *millracev1.ControlHungry) {}

// renewLoop renews on behalf of agents that cannot reach Redis.
func (s *Service) renewLoop(ctx context.Context, loop *ops.Loop) {
	for {
		select {
		case <-ctx.Done():
			return
		case r := <-s.renews:
			ack, err := s.renewFor(ctx, r)
			if err == nil {
				loop.Success("renewed for " + r.w.ID)
			}
			r.reply(ack)
			if err != nil {
				loop.Failure(err)
				s.answerAll()
			}
		}
	}
}

// answerAll tells everybody who asked while a try failed what came of it: with a Redis that hangs, one try for each
// worker would answer most of them too late.
func (s *Service) answerAll() {
	for {
		select {
		case r := <-s.renews:
			r.reply(s.unreachable(r))
		default:
			return
		}
	}
}

// unreachable is the word that Redis is gone for us too; it is noted before it is sent.
func (s *Service) unreachable(r renewal) *millracev1.ControlHeartbeatAck {
	s.met.renewed.WithLabelValues("unreachable").Inc()
	s.vouches.give(s.cfg.rules(), r)
	return &millracev1.ControlHeartbeatAck{RedisUnreachable: true, HoldLease: durationpb.New(hold.Vouch)}
}

func (s *Service) renewFor(ctx context.Context, r renewal) (*millracev1.ControlHeartbeatAck, error) {
	held := make([]store.Held, len(r.hb.GetRunning()))
	for i, a := range r.hb.GetRunning() {
		held[i] = store.Held{ID: task.ID(a.GetTaskId()), Attempt: a.GetAttempt()}
	}
	short, cancel := context.WithTimeout(ctx, min(500*time.Millisecond, s.cfg.HeartbeatInterval/2))
	defer cancel()
	got, err := s.st.Renew(short, store.RenewFor{
		Worker: task.WorkerID(r.w.ID), Beat: "by " + s.id,
		TTL: s.cfg.HeartbeatTTL, Lease: s.cfg.LeaseTTL, Held: held,
	})
	ack := &millracev1.ControlHeartbeatAck{}
	switch {
	case errors.Is(err, store.ErrFenced):
		s.met.renewed.WithLabelValues("fenced").Inc()
		ack.Fenced = true
		s.vouches.settled(r.w.ID)
		return ack, nil
	case err != nil:
		return s.unreachable(r), err
	}
	s.met.renewed.WithLabelValues("renewed").Inc()
	ack.Renewed = true
	s.vouches.settled(r.w.ID)
	for i, st := range got.Status {
		a := r.hb.GetRunning()[i]
		switch st {
		case store.OursCancel:
			ack.Cancels = append(ack.Cancels, &millracev1.ControlCancel{TaskId: a.GetTaskId(), Attempt: a.GetAttempt(), Reason: "cancelled"})
		case store.NotOurs:
			ack.Refused = append(ack.Refused, a)
		case store.Ours:
		}
	}
	return ack, nil
}

// register keeps our address in Redis, so that agents find us and reapers know whether we live. After a time without
// Redis it first renews every worker that relies on our word that Redis is gone, or waits until that word has run out.
func (s *Service) register(ctx context.Context, loop *ops.Loop) {
	ttl := s.cfg.rules().Registration()
	loop.Expect(3 * ttl)
	for tries := 0; ctx.Err() == nil; {
		err := s.registerOnce(ctx, ttl)
		if err != nil {
			loop.Failure(err)
			s.errs.Error(ctx, "register", "registration failed, tries again", err)
			if !store.Backoff(ctx, tries) {
				return
			}
			tries++
			continue
		}
		tries = 0
		loop.Success("")
		if !sleep(ctx, ttl/4) {
			return
		}
	}
}

func (s *Service) registerOnce(ctx context.Context, ttl time.Duration) error {
	if err := s.st.Ping(ctx); err != nil {
		return err
	}
	for _, r := range s.vouches.owed() {
		if _, err := s.renewFor(ctx, r); err != nil {
			return err
		}
	}
	if !s.vouches.mayRegister() {
		return errors.New("a worker may still rely on our word that Redis is gone")
	}
	if err := s.st.RegisterDispatcher(ctx, s.id, s.advertise(), ttl); err != nil {
		return err
	}
	peers, err := s.st.DispatcherAddrs(ctx)
	if err != nil {
		return err
	}
	delete(peers, s.id)
	s.vouches.setPeers(len(peers))
	return nil
}

// janitor trims what has had its time and watches Redis' memory.
func (s *Service) janitor(ctx context.Context, loop *ops.Loop) {
	var cursor uint64
	trimmed := time.Now()
	for {
		if err := s.tidy(ctx, &cursor, &trimmed); err != nil && ctx.Err() == nil {
			loop.Failure(err)
			s.errs.Warn(ctx, "janitor", "tidying failed, tries again", err)
		} else {
			loop.Success("")
		}
		if !sleep(ctx, time.Second) {
			return
		}
	}
}

// sweepPage is how many ids of final tasks are looked at in one go.
const sweepPage = 1000

func (s *Service) tidy(ctx context.Context, cursor *uint64, trimmed *time.Time) error {
	share, err := s.st.MemoryShare(ctx)
	if err != nil {
		return err
	}
	s.setFull(share)
	for range 20 {
		removed, next, err := s.st.SweepDone(ctx, *cursor, sweepPage)
		if err != nil {
			return err
		}
		*cursor = next
		if next == 0 || removed < sweepPage/4 {
			break
		}
	}
	if time.Since(*trimmed) < min(10*time.Second, s.cfg.ResultsAge) {
		return nil
	}
	*trimmed = time.Now()
	stale, err := s.st.TrimResults(ctx, s.cfg.ResultsAge)
	for _, g := range stale {
		s.log.Error("removed a group of `results` that had not read for an hour; results were kept for it until now", logkey.Group, g)
	}
	return err
}

func (s *Service) setFull(share float64) {
	was := s.full.Load() != nil
	if share < s.cfg.MemoryLimit {
		if was {
			s.full.Store(nil)
			s.status.SetReady("memory")
			s.log.Info("intake is open again")
		}
		return
	}
	why := fmt.Sprintf("Redis uses %.0f %% of its maxmemory, the limit is %.0f %%", share*100, s.cfg.MemoryLimit*100)
	s.full.Store(&why)
	if !was {
		s.status.SetNotReady("memory", why)
		s.log.Warn("intake is closed until tasks have ended", logkey.Reason, why)
	}
}
