package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
)

// hungryPatience is how long a hungry agent waits at most for the bell before it looks by itself. The dispatchers look at
// the backlog of hungry agents five times a second, so this is only for the case that all of that failed.
const hungryPatience = 10 * time.Second

// fetchLoop claims exactly as many tasks as there are free slots, and when there are fewer waits to be rung.
func (l *life) fetchLoop(ctx context.Context) {
	loop := l.a.status.Loop("agent.fetch")
	for n, tries := uint64(0), 0; ctx.Err() == nil; {
		free := l.free()
		if free == 0 || !l.mayClaim() {
			loop.Doing("all slots are taken, or Redis has to be heard of first")
			if !l.wait(ctx, l.freed, nil, time.Second) {
				return
			}
			continue
		}
		loop.Doing("claiming")
		got, err := l.claim(ctx, free, n)
		n++
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			loop.Failure(err)
			if errors.Is(err, store.ErrFenced) {
				l.fence()
				return
			}
			l.broken.Store(true)
			poke(l.kick)
			l.a.errs.Error(ctx, "claim", "claiming failed, tries again", err)
			if !store.Backoff(ctx, tries) {
				return
			}
			tries++
			continue
		}
		tries = 0
		loop.Success(fmt.Sprintf("claimed %d", got))
		if got >= free {
			continue
		}
		if !l.hungry(ctx, n) {
			return
		}
	}
}

// mayClaim: the lease is valid, Redis has been up for a while, and after a broken connection we renewed first.
func (l *life) mayClaim() bool {
	return l.lease.sure() && l.a.st.Settled() && !l.broken.Load()
}

// order is the sequence of lanes of the n-th fetch: high before normal before low, with one fetch in eight starting at
// normal and one in sixteen at low, so that nothing starves. Queues take turns.
func (l *life) order(n uint64) []string {
	prios := store.Priorities
	switch {
	case n%16 == 15:
		prios = []string{"low", "high", "normal"}
	case n%8 == 7:
		prios = []string{"normal", "high", "low"}
	}
	qs := l.a.cfg.Queues
	out := make([]string, 0, len(prios)*len(qs))
	for _, p := range prios {
		for i := range qs {
			out = append(out, store.Lane(qs[(uint64(i)+n)%uint64(len(qs))], p))
		}
	}
	return out
}

// claimTimeout bounds one claim.
const claimTimeout = 3 * time.Second

func (l *life) claim(ctx context.Context, want int, n uint64) (int, error) {
	l.claiming.Store(true)
	defer l.claiming.Store(false)
	short, cancel := context.WithTimeout(context.WithoutCancel(ctx), claimTimeout)
	defer cancel()
	got, err := l.a.st.Claim(short, store.ClaimFor{Worker: l.id, Lanes: l.order(n), Want: min(want, maxClaim), Lease: l.a.cfg.LeaseTTL})
	for _, c := range got {
		if c.Expired {
			if eerr := l.expire(short, c); eerr != nil && err == nil {
				err = eerr
			}
			continue
		}
		l.a.met.claimed.Inc()
		l.start(c)
	}
	return len(got), err
}

// maxClaim bounds one script's work.
const maxClaim = 256

// hungry tells the dispatchers that we wait, looks once more, because something may have come before they knew, and
// waits. Without a dispatcher it waits for new entries on Redis itself.
func (l *life) hungry(ctx context.Context, n uint64) bool {
	free := l.free()
	if free == 0 {
		return ctx.Err() == nil
	}
	if len(l.ctl.Connected()) == 0 {
		return l.watch(ctx)
	}
	drain(l.rung)
	l.ctl.SendHungry(ctx, l.lanes, free)
	got, err := l.claim(ctx, free, n)
	if got > 0 || err != nil {
		return ctx.Err() == nil // the loop claims again and handles an error that stays
	}
	l.a.status.Loop("agent.fetch").Doing("waiting for the bell")
	return l.wait(ctx, l.rung, l.fencedCh, hungryPatience)
}

// watch waits for a new entry in any lane, for at most a second or two, without a dispatcher's help.
func (l *life) watch(ctx context.Context) bool {
	l.a.status.Loop("agent.fetch").Doing("watching Redis, no dispatcher is connected")
	err := l.a.st.Watch(ctx, l.lanes, time.Second)
	if err != nil {
		l.broken.Store(true)
		poke(l.kick)
		return store.Backoff(ctx, 2)
	}
	return ctx.Err() == nil
}

func (l *life) wait(ctx context.Context, what, or <-chan struct{}, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-what:
	case <-or:
	case <-t.C:
	}
	return true
}

func drain(ch chan struct{}) {
	select {
	case <-ch:
	default:
	}
}

// expire ends a task whose time to start is over.
func (l *life) expire(ctx context.Context, c store.Claimed) error {
	t, err := decode(c)
	if err != nil {
		return nil //nolint:nilerr // a dispatcher expires it
	}
	_, err = l.a.st.Do(ctx, []*store.Change{{Move: task.Expire, ID: c.ID, Guess: c.At, In: task.Input{Attempt: c.Attempt}, Spec: t, Retention: retention(t)}})
	return err
}
