package api

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/spec"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
	"github.com/millrace/millrace/proto/millrace/v1/millracev1connect"
)

// taskService implements the service over the API.
type taskService API

var _ millracev1connect.TaskServiceHandler = (*taskService)(nil)

// Submit admits one task.
func (s *taskService) Submit(ctx context.Context, req *connect.Request[millracev1.SubmitRequest]) (*connect.Response[millracev1.SubmitResponse], error) {
	t := req.Msg.GetTask()
	if t == nil {
		return nil, connect.NewError(connect.CodeInvalidArgument,
			errors.New(`task is missing: send {"task":{"command":{"argv":["echo","hi"]}}}`))
	}
	if err := spec.Validate(t, s.cfg.Limits); err != nil {
		return nil, wireError("submit", Refuse(spec.Code(err), err))
	}
	id, created, err := s.admit.Admit(ctx, t)
	if err != nil {
		return nil, wireError("submit", err)
	}
	s.log.Debug("task submitted", logkey.Task, id, "created", created, logkey.Peer, req.Peer().Addr)
	return connect.NewResponse(&millracev1.SubmitResponse{Id: id, Created: created}), nil
}

// GetTask shows one task.
func (s *taskService) GetTask(ctx context.Context, req *connect.Request[millracev1.GetTaskRequest]) (*connect.Response[millracev1.GetTaskResponse], error) {
	r, err := s.find(ctx, "show", req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&millracev1.GetTaskResponse{Task: View(r, true)}), nil
}

// CancelTask cancels a task that has not ended.
func (s *taskService) CancelTask(ctx context.Context, req *connect.Request[millracev1.CancelTaskRequest]) (*connect.Response[millracev1.CancelTaskResponse], error) {
	id, err := s.store.Resolve(ctx, req.Msg.GetId())
	if err != nil {
		return nil, lookupError("cancel", req.Msg.GetId(), err)
	}
	out, err := s.cancel.Cancel(ctx, id)
	if err == nil {
		err = out.Err
	}
	if err != nil {
		return nil, lookupError("cancel", string(id), err)
	}
	if out.Now.State == task.None {
		return nil, lookupError("cancel", string(id), store.ErrNotFound)
	}
	// A task that is marked already is on its way to cancelled too.
	accepted := out.Done || out.Now.Cancel && !out.Now.State.Final()
	s.log.Info("cancel", logkey.Task, id, logkey.State, out.Now.State, "accepted", accepted)
	return connect.NewResponse(&millracev1.CancelTaskResponse{Id: string(id), State: out.Now.State.Proto(), Accepted: accepted}), nil
}

// ListDead lists dead letters, the newest first.
func (s *taskService) ListDead(ctx context.Context, req *connect.Request[millracev1.ListDeadRequest]) (*connect.Response[millracev1.ListDeadResponse], error) {
	letters, err := s.store.Dead(ctx, pageSize(req.Msg.GetLimit()))
	if err != nil {
		return nil, wireError("list dead letters", err)
	}
	out := &millracev1.ListDeadResponse{}
	for _, l := range letters {
		out.Letters = append(out.Letters, &millracev1.DeadView{Entry: l.Entry, Letter: l.Letter})
	}
	return connect.NewResponse(out), nil
}

// find reads the record of an id or a unique prefix of one.
func (s *taskService) find(ctx context.Context, what, prefix string) (*store.Record, error) {
	id, err := s.store.Resolve(ctx, prefix)
	if err != nil {
		return nil, lookupError(what, prefix, err)
	}
	r, err := s.store.Record(ctx, id)
	if err != nil {
		return nil, lookupError(what, prefix, err)
	}
	return r, nil
}

const (
	defaultWait = 30 * time.Second
	maxWait     = 60 * time.Second
	// lookAnyway is how often a waiter looks at the record without having been woken: when Redis or the hub is away
	// for longer than results are kept, this is what ends the wait.
	lookAnyway = 5 * time.Second
)

// WaitTask returns when the task is final, and its log complete if asked, or when the time is over.
func (s *taskService) WaitTask(ctx context.Context, req *connect.Request[millracev1.WaitTaskRequest]) (*connect.Response[millracev1.WaitTaskResponse], error) {
	wait := defaultWait
	if d := req.Msg.GetTimeout(); d != nil {
		wait = min(max(d.AsDuration(), 0), maxWait)
	}
	id, err := s.store.Resolve(ctx, req.Msg.GetId())
	if err != nil {
		return nil, lookupError("wait", req.Msg.GetId(), err)
	}
	over := time.NewTimer(wait)
	defer over.Stop()
	watch := s.hub.Watch(id)
	defer watch.Stop()
	for pause := firstLogPause; ; {
		r, err := s.store.Record(ctx, id)
		if err != nil {
			return nil, lookupError("wait", string(id), err)
		}
		final := r.State.Final()
		if final && (!req.Msg.GetLogs() || s.logSettled(r)) {
			return connect.NewResponse(&millracev1.WaitTaskResponse{Task: View(r, false), Done: true}), nil
		}
		again := lookAnyway
		if final {
			again, pause = pause, min(pause*2, maxLogPause)
		}
		tick := time.NewTimer(again)
		select {
		case <-watch.C:
		case <-tick.C:
		case <-over.C:
			tick.Stop()
			// The record may have changed since it was read, but then the next call says so.
			return connect.NewResponse(&millracev1.WaitTaskResponse{Task: View(r, false)}), nil
		case <-ctx.Done():
			tick.Stop()
			return nil, wireError("wait", ctx.Err())
		}
		tick.Stop()
	}
}

// Pauses between looks at a final task's record for the end of its log, which nothing announces.
const (
	firstLogPause = 5 * time.Millisecond
	maxLogPause   = 200 * time.Millisecond
)

// lostPatience is how long the end of a log is waited for when its worker died: its spool may be sent by the next
// agent on the same machine, but nobody knows when.
const lostPatience = 2 * time.Second

// logSettled reports whether the log of a final task is complete, or is not waited for any longer.
func (s *taskService) logSettled(r *store.Record) bool {
	n := ranAttempt(r)
	if n == 0 || r.LogOf >= n && logView(r.Log).GetComplete() {
		return true
	}
	return !s.store.Now().Before(r.Ended.Add((*API)(s).patience(r, n)))
}

// patience is how long after its end the log of an attempt is waited for.
func (a *API) patience(r *store.Record, attempt uint32) time.Duration {
	e := endOf(r, attempt)
	switch {
	case e.GetNoOutput():
		return 0
	case e.GetReason() == millracev1.Reason_REASON_WORKER_LOST || r.Attempt > attempt:
		return min(lostPatience, a.cfg.LogPatience)
	default:
		return a.cfg.LogPatience
	}
}
