package logread

import (
	"context"
	"fmt"
	"time"

	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// follow goes from attempt to attempt until the task is final, or through the one that was asked for.
func (r *reader) follow(ctx context.Context, attempt uint32) error {
	for {
		now, err := r.followOne(ctx, attempt)
		last := now.State == task.None || now.State.Final() && now.Attempt <= attempt
		if err != nil || last || r.req.Attempt != 0 {
			return err
		}
		attempt++
		r.req.Offset, r.req.Tail = 0, nil
	}
}

// over reports whether an attempt has ended, or will never begin, by a look at the record.
func over(now store.Snapshot, attempt uint32) bool {
	return now.State == task.None || now.State.Final() || now.Attempt > attempt
}

// followOne gives out the log of an attempt to its end. It returns the record as it was when the attempt was over.
func (r *reader) followOne(ctx context.Context, attempt uint32) (store.Snapshot, error) {
	streaming, stop := context.WithCancel(ctx)
	all := r.stream(streaming, attempt)
	defer func() {
		stop()
		for range all { // until its goroutine has ended
		}
	}()
	pieces := all
	w := r.watchRecord(attempt)
	defer w.stop()
	for ended := false; ; {
		select {
		case <-ctx.Done():
			return w.now, ctx.Err()
		case got, ok := <-pieces:
			if !ok {
				return w.now, ctx.Err()
			}
			if got.err != nil {
				return w.now, got.err
			}
			if err := r.give(got.piece); err != nil {
				return w.now, err
			}
			if got.piece.GetLog() == nil {
				continue
			}
			if r.req.Attempt != 0 {
				return w.now, nil
			}
			ended, pieces = true, nil
			w.hurry()
		case <-w.changed:
			w.due(0)
		case <-w.timer.C:
			done, err := r.look(ctx, w, ended)
			if err != nil || done {
				return w.now, err
			}
		}
	}
}

// watcher is what a follower knows of the record while it follows an attempt.
type watcher struct {
	attempt uint32
	now     store.Snapshot
	changed <-chan struct{}
	timer   *time.Timer
	pause   time.Duration
	limit   time.Time // when the end of the log is not waited for any more; zero while the attempt runs
	unwatch func()
}

func (r *reader) watchRecord(attempt uint32) *watcher {
	changed, stop := r.c.watch(r.req.Task)
	return &watcher{attempt: attempt, changed: changed, unwatch: stop, timer: time.NewTimer(0), pause: time.Second}
}

func (w *watcher) stop() {
	w.timer.Stop()
	w.unwatch()
}

func (w *watcher) due(in time.Duration) { w.timer.Reset(in) }

// hurry looks often: the log has ended, so the attempt is over, or will be in a moment.
func (w *watcher) hurry() {
	w.pause = 5 * time.Millisecond
	w.due(0)
}

// look reads the record and reports whether there is nothing more to wait for.
func (r *reader) look(ctx context.Context, w *watcher, ended bool) (done bool, err error) {
	snaps, err := r.c.st.Snapshots(ctx, []task.ID{r.req.Task})
	if err != nil {
		// Redis is away; the log itself may still come from the logsink.
		w.due(w.pause)
		return false, nil
	}
	w.now = snaps[0]
	if !over(w.now, w.attempt) {
		w.pause = min(w.pause*2, time.Second)
		w.due(w.pause)
		return false, nil
	}
	if ended {
		return true, nil
	}
	return r.lookForEnd(ctx, w)
}

// lookForEnd is asked while an attempt is over and its log has not ended.
func (r *reader) lookForEnd(ctx context.Context, w *watcher) (done bool, err error) {
	if w.limit.IsZero() {
		end, err := r.c.st.AttemptEnd(ctx, r.req.Task, w.attempt)
		if err != nil {
			return false, fmt.Errorf("read how attempt %d of task %s ended: %w", w.attempt, r.req.Task, err)
		}
		if end == nil && w.now.Attempt <= w.attempt {
			return true, nil // it never began
		}
		wait := r.c.cfg.EndWait
		if end == nil || end.GetReason() == millracev1.Reason_REASON_WORKER_LOST || w.now.Attempt > w.attempt {
			wait = r.c.cfg.LostWait
		}
		w.limit = time.Now().Add(wait)
		w.pause = 50 * time.Millisecond
	}
	view, err := r.c.st.LogView(ctx, string(r.req.Task), w.attempt)
	if err != nil {
		return false, fmt.Errorf("read the log state of task %s: %w", r.req.Task, err)
	}
	// An attempt that printed nothing has no log to end, only this.
	if view.GetComplete() && view.GetBytes() == 0 || time.Now().After(w.limit) {
		return true, r.giveEnd(ctx, w.attempt)
	}
	w.pause = min(w.pause*2, time.Second)
	w.due(min(w.pause, time.Until(w.limit)+time.Millisecond))
	return false, nil
}

// got is what comes out of stream.
type got struct {
	piece *millracev1.ReadLogsResponse
	err   error
}

// stream reads pieces until the log ends or ctx does, then closes the channel, which is unbuffered: a slow caller slows
// the logsink's connection down and nothing else.
func (r *reader) stream(ctx context.Context, attempt uint32) <-chan got {
	out := make(chan got)
	src := r.source(attempt, true)
	go func() { // ends with ctx; followOne waits for it by draining the channel
		defer close(out)
		defer src.close()
		for {
			p, err := src.next(ctx)
			select {
			case out <- got{p, err}:
			case <-ctx.Done():
				return
			}
			if err != nil || p.GetLog() != nil {
				return
			}
		}
	}()
	return out
}
