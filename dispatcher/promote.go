package dispatcher

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/ops"
	"github.com/millrace/millrace/internal/spec"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// pollDue is how long a dispatcher sleeps at most between looks at what is due: a hint that got lost costs no more.
const pollDue = 500 * time.Millisecond

// promote makes delayed tasks queued when they are due, and ends those whose time to start is over.
func (s *Service) promote(ctx context.Context, loop *ops.Loop) {
	loop.Expect(30 * time.Second)
	tries := 0
	for ctx.Err() == nil {
		n, next, err := s.promoteOnce(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			loop.Failure(err)
			s.errs.Error(ctx, "promote", "promoting failed, tries again", err)
			if !store.Backoff(ctx, tries) {
				return
			}
			tries++
			continue
		}
		tries = 0
		loop.Success(fmt.Sprintf("%d moved", n))
		if n > 0 {
			continue
		}
		t := time.NewTimer(next)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-s.wake:
			t.Stop()
		case <-t.C:
		}
	}
}

// promoteOnce handles what is due now and tells when to look again.
func (s *Service) promoteOnce(ctx context.Context) (moved int, next time.Duration, err error) {
	ids, err := s.st.Due(ctx, store.IndexDelayed, 0, batchSize)
	if err != nil {
		return 0, 0, err
	}
	if moved, err = s.promoteIDs(ctx, ids); err != nil {
		return moved, 0, err
	}
	over, err := s.st.Due(ctx, store.IndexExpiring, 0, batchSize)
	if err != nil {
		return moved, 0, err
	}
	if err := s.expire(ctx, over); err != nil {
		return moved, 0, err
	}
	moved += len(over)
	next = pollDue
	for _, i := range []store.Index{store.IndexDelayed, store.IndexExpiring} {
		at, ok, err := s.st.NextDue(ctx, i)
		if err != nil {
			return moved, 0, err
		}
		if ok {
			next = min(next, max(at.Sub(s.st.Now()), time.Millisecond))
		}
	}
	return moved, next, nil
}

func (s *Service) promoteIDs(ctx context.Context, ids []task.ID) (int, error) {
	snaps, err := s.st.Snapshots(ctx, ids)
	if err != nil {
		return 0, err
	}
	var changes []*store.Change
	var stale []task.ID
	for i, sn := range snaps {
		if sn.State != task.Delayed {
			stale = append(stale, ids[i])
			continue
		}
		changes = append(changes, &store.Change{Move: task.Promote, ID: ids[i], Guess: sn, In: task.Input{Attempt: sn.Attempt}})
	}
	out, err := s.st.Do(ctx, changes)
	if err != nil {
		return 0, err
	}
	lanes, n := map[string]int{}, 0
	for i, o := range out {
		switch {
		case o.Done:
			lanes[o.Now.Lane]++
			n++
		case o.Err != nil:
			s.errs.Error(ctx, "promote.one", "a delayed task could not be queued, tries again", o.Err, logkey.Task, changes[i].ID)
		case o.Now.State != task.Delayed:
			stale = append(stale, changes[i].ID)
		}
	}
	s.met.promoted.Add(float64(n))
	s.ring(ctx, lanes)
	return n, s.st.ForgetUnless(ctx, store.IndexDelayed, task.Delayed, stale...)
}

// expire ends tasks that were not started in time. Those that run or have ended only leave the index.
func (s *Service) expire(ctx context.Context, ids []task.ID) error {
	recs, err := s.st.Records(ctx, ids)
	if err != nil {
		return err
	}
	var changes []*store.Change
	for i, r := range recs {
		if r == nil || r.State.Final() || r.State == task.Running {
			continue
		}
		changes = append(changes, finalChange(task.Expire, ids[i], r))
	}
	out, err := s.st.Do(ctx, changes)
	if err != nil {
		return err
	}
	for _, o := range out {
		if o.Done {
			s.met.expired.Inc()
		}
	}
	return s.st.Forget(ctx, store.IndexExpiring, ids...)
}

// finalChange ends a task that does not run.
func finalChange(m task.Move, id task.ID, r *store.Record) *store.Change {
	t := &millracev1.Task{}
	_ = proto.Unmarshal(r.Spec, t) // what cannot be read has the default retention and no labels
	return &store.Change{Move: m, ID: id, Guess: r.Snapshot, In: task.Input{Attempt: r.Attempt}, Spec: t, Retention: spec.Retention(t)}
}
