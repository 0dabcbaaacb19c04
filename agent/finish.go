package agent

import (
	"context"
	"errors"
	"sort"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// maxBatch is how many outcomes go into one script.
const maxBatch = 128

// ending is an outcome on its way to Redis.
type ending struct {
	a      *attempt
	change *store.Change
}

// finishLoop reports outcomes. While one batch is under way the next one gathers: batches grow with the load, and an idle
// agent reports at once. An outcome is tried until Redis has answered, or until this worker is fenced.
func (l *life) finishLoop(ctx context.Context) {
	loop := l.a.status.Loop("agent.finish")
	var batch []*ending
	var late recent
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.resend:
			l.sayAgain(ctx, late.since(time.Now().Add(-resendWindow)))
			continue
		case e := <-l.finishes:
			batch = append(batch[:0], e)
		}
	gather:
		for len(batch) < maxBatch {
			select {
			case e := <-l.finishes:
				batch = append(batch, e)
			default:
				break gather
			}
		}
		late.add(batch, time.Now())
		for tries := 0; len(batch) > 0; tries++ {
			var err error
			batch, err = l.report(ctx, batch)
			if err == nil {
				loop.Success("")
				continue
			}
			loop.Failure(err)
			if l.isFenced() || ctx.Err() != nil {
				l.forsake(batch)
				break
			}
			l.a.errs.Error(ctx, "finish", "outcomes not reported, tries again", err, logkey.Count, len(batch))
			poke(l.kick)
			store.Backoff(ctx, tries)
		}
	}
}

// resendWindow is how much a Redis that syncs its file every second may have forgotten when it comes back, and more.
const resendWindow = 5 * time.Second

// recent are the outcomes of the last seconds.
type recent struct{ list []said }

type said struct {
	at     time.Time
	change *store.Change
}

// maxRecent bounds them by number: what a second holds at the highest rates.
const maxRecent = 20000

func (r *recent) add(batch []*ending, now time.Time) {
	for _, e := range batch {
		r.list = append(r.list, said{now, e.change})
	}
	if n := len(r.list) - maxRecent; n > 0 {
		r.list = append(r.list[:0], r.list[n:]...)
	}
	if len(r.list) > 0 && now.Sub(r.list[0].at) > 2*resendWindow {
		r.list = append(r.list[:0:0], r.after(now.Add(-resendWindow))...)
	}
}

func (r *recent) after(t time.Time) []said {
	i := sort.Search(len(r.list), func(i int) bool { return r.list[i].at.After(t) })
	return r.list[i:]
}

func (r *recent) since(t time.Time) []*store.Change {
	var out []*store.Change
	for _, s := range r.after(t) {
		out = append(out, s.change)
	}
	return out
}

// sayAgain reports outcomes once more to a Redis that was restarted and may have forgotten them. Those it knows change
// nothing.
func (l *life) sayAgain(ctx context.Context, changes []*store.Change) {
	for len(changes) > 0 && ctx.Err() == nil {
		n := min(len(changes), maxBatch)
		out, err := l.a.st.Do(ctx, changes[:n])
		if err != nil {
			l.a.errs.Warn(ctx, "resend", "recent outcomes not repeated to the restarted Redis", err)
			return
		}
		again := 0
		for _, o := range out {
			if o.Done {
				again++
			}
		}
		if again > 0 {
			l.log.Warn("the restarted Redis had forgotten outcomes; reported them again", logkey.Count, again)
		}
		changes = changes[n:]
	}
}

func (l *life) forsake(batch []*ending) {
	for _, e := range batch {
		l.a.met.refused.Inc()
		l.drop(e.a)
	}
}

// report sends a batch of outcomes, settles each that Redis answered for, and returns the others with the error.
func (l *life) report(ctx context.Context, batch []*ending) (open []*ending, err error) {
	changes := make([]*store.Change, len(batch))
	for i, e := range batch {
		changes[i] = e.change
	}
	out, err := l.a.st.Do(ctx, changes)
	if err != nil {
		return batch, err
	}
	for i, o := range out {
		e, oerr := batch[i], o.Err
		if o.Done {
			l.ended(e, o.Now.State)
		} else if oerr == nil {
			oerr = l.refused(ctx, e, o)
		}
		if oerr != nil {
			open, err = append(open, e), oerr
		}
	}
	return open, err
}

func (l *life) ended(e *ending, now task.State) {
	l.log.Info("attempt ended", logkey.Task, e.change.ID, logkey.Attempt, e.change.In.Attempt, logkey.State, now.String(),
		logkey.Reason, reasonWord(e.change.End), logkey.ExitCode, e.change.End.GetExitCode())
	l.a.cleanup(e.a, now)
	l.drop(e.a)
}

// refused settles an outcome that the record did not take: it is ours already, because an answer got lost, or the
// attempt is not ours any more. An outcome whose record has vanished is kept as a dead letter.
func (l *life) refused(ctx context.Context, e *ending, o store.Outcome) error {
	if o.Now.State == task.None {
		d := &millracev1.DeadLetter{
			Source: "agent", Task: string(e.change.ID), Code: "record_missing", Attempts: []*millracev1.AttemptEnd{e.change.End},
			Reason: "the task's record vanished while it ran: Redis lost data, or the record was deleted; this is how the attempt ended",
		}
		if err := l.a.st.AddDead(ctx, d); err != nil {
			return err
		}
	} else if end, err := l.a.st.AttemptEnd(ctx, e.change.ID, e.change.In.Attempt); err != nil {
		return err
	} else if end.GetWorker() == string(l.id) {
		l.ended(e, o.Now.State)
		return nil
	}
	l.a.met.refused.Inc()
	l.log.Warn("outcome refused: the attempt is no longer ours", logkey.Task, e.change.ID, logkey.Attempt, e.change.In.Attempt, logkey.State, o.Now.State.String())
	l.a.cleanup(e.a, o.Now.State)
	l.drop(e.a)
	return nil
}

func decode(c store.Claimed) (*millracev1.Task, error) {
	t := &millracev1.Task{}
	if err := proto.Unmarshal(c.Spec, t); err != nil {
		return nil, errors.New("the task's record cannot be read: it was written by another version of millrace, or is damaged")
	}
	t.Id = string(c.ID)
	return t, nil
}
