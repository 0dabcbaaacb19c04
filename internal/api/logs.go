package api

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"

	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

const (
	// maxPiece bounds one message of a stream of output.
	maxPiece = 256 << 10
	// firstStartPause and maxStartPause are between looks at a task whose next attempt has not begun: nothing
	// announces a claim.
	firstStartPause = 10 * time.Millisecond
	maxStartPause   = 500 * time.Millisecond
	// endPause is between looks at the record of a running attempt; the end of the task itself is announced.
	endPause = time.Second
)

// ReadLogs streams the output of a task. Without Follow it passes on what is there. With Follow it waits for the
// task to start, and goes on from attempt to attempt until the task has ended and its log is complete, or not waited
// for any longer.
func (s *taskService) ReadLogs(ctx context.Context, req *connect.Request[millracev1.ReadLogsRequest], out *connect.ServerStream[millracev1.ReadLogsResponse]) error {
	bodyArrived(ctx)
	if n := req.Msg.GetStream(); n > 2 {
		return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("stream %d: use 1 for stdout, 2 for stderr, 0 for both", n))
	}
	id, err := s.store.Resolve(ctx, req.Msg.GetId())
	if err != nil {
		return lookupError("read the log", req.Msg.GetId(), err)
	}
	watch := s.hub.Watch(id)
	defer watch.Stop()
	defer writeUntil(ctx, time.Time{})
	l := &logStream{api: (*API)(s), id: id, req: req.Msg, out: out, watch: watch}
	read := l.once
	if req.Msg.GetFollow() {
		read = l.follow
	}
	if err := read(ctx); err != nil {
		return wireError("read the log", err)
	}
	return nil
}

// logStream is one call of ReadLogs.
type logStream struct {
	api   *API
	id    task.ID
	req   *millracev1.ReadLogsRequest
	out   *connect.ServerStream[millracev1.ReadLogsResponse]
	watch *Watch
	begun bool // an attempt was read: offset and tail are for the first one only
}

// once passes on what is there now.
func (l *logStream) once(ctx context.Context) error {
	r, err := l.api.store.Record(ctx, l.id)
	if err != nil {
		return err
	}
	ran := ranAttempt(r)
	n := l.req.GetAttempt()
	if n > ran {
		return connect.NewError(connect.CodeNotFound, fmt.Errorf(
			"task %s has made %d attempts, there is no attempt %d: leave --attempt out for the newest", l.id, ran, n))
	}
	if n == 0 {
		n = ran
	}
	if n == 0 {
		return nil // it has not started: there is no output, and that is no error
	}
	return l.attempt(ctx, r, n, false)
}

// follow goes from attempt to attempt to the end of the task.
func (l *logStream) follow(ctx context.Context) error {
	want := l.req.GetAttempt() // the attempt to read next; 0 for the newest
	for pause := firstStartPause; ; {
		r, err := l.api.store.Record(ctx, l.id)
		if err != nil {
			return err
		}
		ran := ranAttempt(r)
		if want == 0 {
			// When nothing ran yet, the attempt that waits now is the first to show, even if it will be over, and the
			// next one begun, at the next look.
			want = cmp.Or(ran, r.Attempt)
		}
		switch {
		case want > 0 && want <= ran:
			if err := l.attempt(ctx, r, want, true); err != nil {
				return err
			}
			if l.req.GetAttempt() > 0 {
				return nil
			}
			want++
			pause = firstStartPause
			continue
		case r.State.Final():
			return nil
		}
		if err := l.sleep(ctx, pause); err != nil {
			return err
		}
		pause = min(pause*3/2, maxStartPause)
	}
}

// sleep ends early when the task may have ended.
func (l *logStream) sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-l.watch.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// attempt passes on the output of one attempt and closes it with an end message when it is known to have ended.
func (l *logStream) attempt(ctx context.Context, r *store.Record, n uint32, follow bool) error {
	q := LogQuery{Task: l.id, Attempt: n, Started: attemptStart(r, n), Stream: l.req.GetStream(), Follow: follow}
	if !l.begun {
		l.begun = true
		q.Offset, q.Tail = l.req.GetOffset(), l.req.TailLines
	}
	reading, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	if follow {
		watched := make(chan struct{})
		go func() {
			defer close(watched)
			stop(l.untilOver(reading, n))
		}()
		// The watcher uses the store and the watch, so it must have ended before this call does.
		defer func() { stop(nil); <-watched }()
	}
	end := q.Offset
	status, err := l.api.logs.ReadLog(reading, q, func(p LogPiece) error {
		end = p.Offset + uint64(len(p.Data))
		return l.send(ctx, n, p)
	})
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil && !errors.Is(err, context.Canceled):
		if ce := new(connect.Error); errors.As(err, &ce) {
			return err // the client could not be written to
		}
		// The reader has tried what there is to try, so that clients need not repeat the call.
		return connect.NewError(connect.CodeDataLoss, fmt.Errorf("read the log: %w", err))
	case !follow && !status.Ended:
		return nil
	}
	if status.View == nil {
		status.View = l.knownView(ctx, n)
	}
	writeUntil(ctx, time.Now().Add(writePatience))
	return l.out.Send(&millracev1.ReadLogsResponse{Attempt: n, Offset: end, End: true, Log: status.View})
}

// knownView is what the record says of an attempt's log.
func (l *logStream) knownView(ctx context.Context, n uint32) *millracev1.LogView {
	r, err := l.api.store.Record(ctx, l.id)
	switch {
	case err != nil:
		return nil
	case endOf(r, n).GetNoOutput():
		return &millracev1.LogView{Complete: true}
	case r.LogOf == n:
		return logView(r.Log)
	default:
		return nil
	}
}

func attemptStart(r *store.Record, n uint32) time.Time {
	if e := endOf(r, n); e.GetStartedAt() != nil {
		return e.GetStartedAt().AsTime()
	}
	return r.Started
}

func (l *logStream) send(ctx context.Context, n uint32, p LogPiece) error {
	for {
		part := p.Data[:min(len(p.Data), maxPiece)]
		writeUntil(ctx, time.Now().Add(writePatience))
		if err := l.out.Send(&millracev1.ReadLogsResponse{Attempt: n, Offset: p.Offset, Data: part, Stream: p.Stream}); err != nil {
			return err
		}
		p.Data, p.Offset = p.Data[len(part):], p.Offset+uint64(len(part))
		if len(p.Data) == 0 {
			return nil
		}
	}
}

// errPatience ends the reading of an attempt that is over and whose log does not come to its end.
var errPatience = errors.New("the end of the log did not come in time")

// untilOver returns when the attempt has ended and its log had time to arrive.
func (l *logStream) untilOver(ctx context.Context, n uint32) error {
	for {
		r, err := l.api.store.Record(ctx, l.id)
		if errors.Is(err, store.ErrNotFound) {
			return errPatience // its retention is over
		}
		if err == nil && (r.State.Final() || r.Attempt > n) {
			return rest(ctx, l.untilPatience(r, n))
		}
		if err := l.sleep(ctx, endPause); err != nil {
			return err
		}
	}
}

// untilPatience is how long from now on the end of an ended attempt's log is waited for.
func (l *logStream) untilPatience(r *store.Record, n uint32) time.Duration {
	d := l.api.patience(r, n)
	if r.State.Final() {
		return r.Ended.Add(d).Sub(l.api.store.Now())
	}
	return d
}

func rest(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(max(d, 0))
	defer t.Stop()
	select {
	case <-t.C:
		return errPatience
	case <-ctx.Done():
		return ctx.Err()
	}
}
