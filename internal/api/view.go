package api

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/millrace/millrace/internal/spec"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// View shows a record. The spec is in it only when full.
func View(r *store.Record, full bool) *millracev1.TaskView {
	t := &millracev1.Task{}
	// What cannot be read was not written by us; the record is shown without it.
	_ = proto.Unmarshal(r.Spec, t)
	queue, priority := store.SplitLane(r.Lane)
	v := &millracev1.TaskView{
		Id: string(r.ID), Name: t.GetName(), State: r.State.Proto(), Attempt: r.Attempt, Reason: r.Reason,
		Worker: string(r.Owner), Attempts: r.Ends, Queue: queue, Priority: priority, CancelRequested: r.Cancel,
		Failures: r.Failures, Lost: r.Lost, CreatedAt: stamp(r.Created), StartedAt: stamp(r.Started), EndedAt: stamp(r.Ended),
		Log: logView(r.Log),
	}
	if r.State == task.Delayed {
		v.DueAt = stamp(r.Due)
	}
	if n := ranAttempt(r); r.State.Final() && n > 0 {
		v.Attempt = n // a task cancelled in the queue never made the attempt it waited for
	} else if r.State.Final() && r.Started.IsZero() {
		v.Attempt = 0
	}
	last := lastEnd(r)
	if last != nil {
		v.Signal = last.GetSignal()
		v.ExitCode = exitCode(last)
	}
	v.Message = message(r, t, last)
	if full {
		v.Spec = t
	}
	return v
}

// exitCode of an attempt, nil when its process never ran or nobody saw its end.
func exitCode(e *millracev1.AttemptEnd) *int32 {
	code := e.GetExitCode()
	switch e.GetReason() {
	case millracev1.Reason_REASON_WORKER_LOST, millracev1.Reason_REASON_NEVER_STARTED, millracev1.Reason_REASON_DEPENDENCY:
		return nil
	case millracev1.Reason_REASON_INTERNAL, millracev1.Reason_REASON_REFUSED:
		if code == 0 {
			return nil
		}
	default:
	}
	if code < 0 {
		return nil
	}
	return &code
}

func lastEnd(r *store.Record) *millracev1.AttemptEnd {
	if len(r.Ends) == 0 {
		return nil
	}
	return r.Ends[len(r.Ends)-1]
}

// endOf is how an attempt ended, nil when that is not known.
func endOf(r *store.Record, attempt uint32) *millracev1.AttemptEnd {
	for _, e := range r.Ends {
		if e.GetAttempt() == attempt {
			return e
		}
	}
	return nil
}

// ranAttempt is the newest attempt that a worker had, 0 when there was none: only such an attempt has output.
func ranAttempt(r *store.Record) uint32 {
	switch {
	case r.State == task.Running, r.State == task.Succeeded, r.State == task.Failed && r.Owner != "":
		return r.Attempt
	default:
		return lastEnd(r).GetAttempt()
	}
}

// message says in a few words how the task ended, or what happened to it before.
func message(r *store.Record, t *millracev1.Task, last *millracev1.AttemptEnd) string {
	switch {
	case r.State == task.Succeeded:
		return ""
	case r.State == task.Expired:
		return "not started before " + t.GetExpiresAt().AsTime().Format(time.RFC3339)
	case r.State == task.Cancelled:
		return cancelWords(r, last)
	case r.State == task.Failed && (last == nil || last.GetReason() != r.Reason):
		return reasonWords(r.Reason, &millracev1.AttemptEnd{ExitCode: -1}, t)
	case last == nil || last.GetReason() == millracev1.Reason_REASON_UNSPECIFIED:
		return ""
	case r.State == task.Failed:
		return reasonWords(r.Reason, last, t)
	default:
		return fmt.Sprintf("attempt %d: %s", last.GetAttempt(), reasonWords(last.GetReason(), last, t))
	}
}

func cancelWords(r *store.Record, last *millracev1.AttemptEnd) string {
	switch {
	case last != nil && last.GetReason() != millracev1.Reason_REASON_CANCELLED:
		return fmt.Sprintf("cancelled before attempt %d", r.Attempt)
	case last.GetReason() != millracev1.Reason_REASON_CANCELLED:
		return "cancelled before it started"
	case last.GetKilled():
		return "cancelled, killed after the grace period"
	case last.GetSignal() == "" && exitCode(last) != nil:
		return fmt.Sprintf("cancelled, exit %d", last.GetExitCode())
	default:
		return "cancelled"
	}
}

func reasonWords(reason millracev1.Reason, e *millracev1.AttemptEnd, t *millracev1.Task) string {
	or := func(words string) string {
		if e.GetMessage() != "" {
			return e.GetMessage()
		}
		return words
	}
	switch reason {
	case millracev1.Reason_REASON_EXIT:
		if t.GetCall() != nil {
			return or("the handler returned an error")
		}
		return fmt.Sprintf("exit %d", e.GetExitCode())
	case millracev1.Reason_REASON_SIGNAL:
		s := "killed by SIG" + e.GetSignal()
		if e.GetCoreDumped() {
			s += " (core dumped)"
		}
		return s
	case millracev1.Reason_REASON_OOM:
		return or("killed for using too much memory")
	case millracev1.Reason_REASON_TIMEOUT:
		if d := spec.Timeout(t); d > 0 {
			return fmt.Sprintf("timed out after %s", d)
		}
		return or("timed out")
	case millracev1.Reason_REASON_CANCELLED:
		return "cancelled"
	case millracev1.Reason_REASON_PREEMPTED:
		return or("given back by its agent")
	case millracev1.Reason_REASON_WORKER_LOST:
		if e.GetWorker() != "" {
			return or("lost with worker " + e.GetWorker())
		}
		return or("lost with its worker")
	case millracev1.Reason_REASON_REFUSED:
		return or("the agent could not run it")
	case millracev1.Reason_REASON_NEVER_STARTED:
		return or("never started")
	case millracev1.Reason_REASON_DEPENDENCY:
		return or("a task that it waits for did not succeed")
	case millracev1.Reason_REASON_INTERNAL:
		return or("a fault of millrace or of the agent's host")
	default:
		return or("")
	}
}

func stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

func logView(raw []byte) *millracev1.LogView {
	if len(raw) == 0 {
		return nil
	}
	v := &millracev1.LogView{}
	if proto.Unmarshal(raw, v) != nil {
		return nil
	}
	return v
}
