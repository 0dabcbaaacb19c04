package agent

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/logship"
	"github.com/millrace/millrace/internal/proc"
	"github.com/millrace/millrace/internal/spec"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// stopWhy is why an attempt is stopped from outside. A later, stronger reason replaces a weaker one.
type stopWhy int

const (
	notStopped    stopWhy = iota
	stopTimeout           // ran longer than its timeout
	stopPreempted         // the agent stops
	stopCancelled         // somebody cancelled it
	stopIsolated          // cut off from Redis: dead before anybody else may start it
	stopLost              // not ours any more
)

// attempt is one run of a task.
type attempt struct {
	l     *life
	c     store.Claimed
	t     *millracev1.Task
	slots int
	gone  chan struct{} // closed when its outcome was settled
	once  sync.Once

	mu      sync.Mutex
	why     stopWhy
	stopCh  chan struct{} // closed at the first stop
	grace   time.Duration // of the strongest stop
	proc    *proc.Process
	ending  bool // its outcome is on its way
	started time.Time
}

// start runs a claimed task in a goroutine of its own, which ends when the outcome is handed over.
func (l *life) start(c store.Claimed) {
	a := &attempt{l: l, c: c, slots: 1, gone: make(chan struct{}), stopCh: make(chan struct{}), started: l.a.st.Now()}
	t, err := decode(c)
	if err == nil {
		a.t = t
		a.slots = min(max(spec.Slots(t), 1), max(l.a.cfg.Slots, 1))
	} else {
		a.t = &millracev1.Task{Id: string(c.ID)}
	}
	l.add(a)
	go func() {
		if err != nil {
			a.report(a.refusal(126, err.Error()))
			return
		}
		a.run()
	}()
}

// run does the work and hands over the outcome.
func (a *attempt) run() {
	l := a.l
	if n := spec.Slots(a.t); n > l.a.cfg.Slots {
		a.report(a.refusal(126, fmt.Sprintf("the task needs %d slots and this agent has %d: ask for fewer, or start agents with more", n, l.a.cfg.Slots)))
		return
	}
	lg := l.a.ship.Open(logship.Attempt{
		Task: string(a.c.ID), Attempt: a.c.Attempt, Worker: string(l.id),
		Date: a.started.UTC().Format(time.DateOnly), LimitBytes: a.t.GetLog().GetLimitBytes(), Split: a.t.GetLog().GetSplit(), ElideEmpty: true,
	})
	var end *millracev1.AttemptEnd
	if a.t.GetCall() != nil {
		end = a.call(lg)
	} else {
		end = a.command(lg)
	}
	end.NoOutput = lg.Close()
	a.report(end)
}

// stop asks the attempt to end, with grace in which it may do so by itself: negative for the task's own, 0 for none.
// It returns at once and is safe to call again; a second stop never signals twice, it only shortens the grace.
func (a *attempt) stop(why stopWhy, grace time.Duration) {
	if grace < 0 {
		grace = spec.Grace(a.t)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ending && why < stopIsolated {
		return
	}
	first := a.why == notStopped
	if why > a.why {
		a.why = why
	}
	if first || grace < a.grace {
		a.grace = grace
	}
	if first {
		close(a.stopCh)
	}
	if a.proc != nil {
		a.proc.Stop(syscall.SIGTERM, a.grace)
	}
}

// signal sends a signal to the main process or to the whole tree.
func (a *attempt) signal(name string, tree bool) {
	sig := unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(name), "SIG"))
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.proc == nil || sig == 0 {
		return
	}
	if err := a.proc.Signal(sig, tree); err != nil {
		a.l.log.Info("signal not delivered", logkey.Task, a.c.ID, logkey.Signal, name, logkey.Err, err)
	}
}

func (a *attempt) stopped() stopWhy {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.why
}

// reporting: the outcome is on its way, so that Redis may know already that it is not running any more.
func (a *attempt) reporting() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.ending
}

// keep: the task owns the risk of going on while its agent is cut off.
func (a *attempt) keep() bool { return spec.Isolation(a.t) == spec.IsolationKeep }

// command runs a process tree.
func (a *attempt) command(lg *logship.Log) *millracev1.AttemptEnd {
	if !a.l.a.procs {
		return a.refusal(126, "this agent runs Go handlers only: it is embedded in a program without a guard process")
	}
	ps, err := a.processSpec(lg)
	if err != nil {
		return a.refusal(126, err.Error())
	}
	p, end := a.launch(ps)
	if end != nil {
		return end
	}
	if d := spec.Timeout(a.t); d > 0 {
		t := time.AfterFunc(d, func() { a.stop(stopTimeout, -1) })
		defer t.Stop()
	}
	return a.outcome(p.Wait())
}

// launch starts the process unless the attempt was stopped before.
func (a *attempt) launch(ps proc.Spec) (*proc.Process, *millracev1.AttemptEnd) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.why != notStopped {
		return nil, a.neverStarted(a.why)
	}
	p, err := proc.Start(ps)
	var refused *proc.RefusedError
	switch {
	case errors.As(err, &refused):
		return nil, a.refusal(refused.Code, refused.Text)
	case err != nil:
		e := a.end(millracev1.Reason_REASON_INTERNAL, 125, "this machine could not start it: "+err.Error())
		return nil, e
	}
	a.proc = p
	return p, nil
}

func (a *attempt) neverStarted(why stopWhy) *millracev1.AttemptEnd {
	e := a.end(millracev1.Reason_REASON_NEVER_STARTED, 0, "stopped before it started")
	if why == stopCancelled {
		e.Reason, e.Message = millracev1.Reason_REASON_CANCELLED, "cancelled before it started"
	}
	return e
}

// outcome turns what the process did, and why it was stopped, into the end of the attempt.
func (a *attempt) outcome(o proc.Outcome) *millracev1.AttemptEnd {
	e := a.end(millracev1.Reason_REASON_UNSPECIFIED, int32(o.ExitCode), "")
	e.CoreDumped, e.Killed = o.CoreDumped, o.Killed
	e.Usage = &millracev1.Usage{UserCpu: durationpb.New(o.UserCPU), SystemCpu: durationpb.New(o.SystemCPU), MaxRssBytes: uint64(max(o.MaxRSSBytes, 0))}
	for _, s := range o.Survivors {
		e.Survivors = append(e.Survivors, strings.ToValidUTF8(fmt.Sprintf("%d %s", s.PID, s.Command), "\uFFFD"))
	}
	switch {
	case o.Signal != 0:
		e.Signal = strings.TrimPrefix(unix.SignalName(o.Signal), "SIG")
		if e.Signal == "" {
			e.Signal = fmt.Sprint(int(o.Signal)) // a real-time signal has no name
		}
		e.Reason, e.Message = millracev1.Reason_REASON_SIGNAL, "ended by SIG"+e.Signal
	case o.ExitCode != 0:
		e.Reason, e.Message = millracev1.Reason_REASON_EXIT, fmt.Sprintf("exit code %d", o.ExitCode)
	}
	a.because(e)
	return e
}

// because lets the reason of a stop from outside win over what the process made of it.
func (a *attempt) because(e *millracev1.AttemptEnd) {
	did := "it ended with exit code " + fmt.Sprint(e.ExitCode)
	if e.Signal != "" {
		did = "it ended by SIG" + e.Signal
	}
	switch a.stopped() {
	case notStopped:
	case stopTimeout:
		e.Reason, e.Message = millracev1.Reason_REASON_TIMEOUT, fmt.Sprintf("ran longer than its timeout of %v; %s", spec.Timeout(a.t), did)
	case stopPreempted:
		// What ended well by itself although it was asked to stop has done its work.
		if e.Reason != millracev1.Reason_REASON_UNSPECIFIED {
			e.Reason, e.Message = millracev1.Reason_REASON_PREEMPTED, "handed to another agent because this one stops; "+did
		}
	case stopCancelled:
		e.Reason, e.Message = millracev1.Reason_REASON_CANCELLED, "cancelled; "+did
	case stopIsolated, stopLost:
		e.Reason, e.Message = millracev1.Reason_REASON_WORKER_LOST, "its agent was cut off and stopped it"
	}
}

// call runs a Go handler.
func (a *attempt) call(lg *logship.Log) *millracev1.AttemptEnd {
	c := a.t.GetCall()
	fn := a.l.a.handlers[c.GetHandler()]
	if fn == nil {
		have := strings.Join(a.l.a.handlerNames(), ", ")
		if have == "" {
			have = "none"
		}
		return a.refusal(127, fmt.Sprintf("no handler named %q in this agent (it has %s): serve such tasks from a queue of their own", c.GetHandler(), have))
	}
	if why := a.stopped(); why != notStopped {
		return a.neverStarted(why)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	if d := spec.Timeout(a.t); d > 0 {
		t := time.AfterFunc(d, func() { a.stop(stopTimeout, -1) })
		defer t.Stop()
	}
	done := make(chan struct{})
	defer close(done)
	go func() { // ends with the call
		select {
		case <-a.stopCh:
			cancel(cause(a.stopped()))
		case <-done:
		}
	}()
	out, err := call(ctx, fn, &Call{
		ID: string(a.c.ID), Attempt: a.c.Attempt, Handler: c.GetHandler(), Payload: c.GetPayload(),
		Labels: a.t.GetLabels(), Output: lg.Writer(0),
	})
	e := a.end(millracev1.Reason_REASON_UNSPECIFIED, 0, "")
	if err != nil {
		e.ExitCode = 1
		e.Reason, e.Message = millracev1.Reason_REASON_EXIT, shorten(strings.ToValidUTF8(err.Error(), "\uFFFD"))
	} else {
		e.Output = out
	}
	if err != nil || a.stopped() >= stopCancelled {
		a.because(e)
	}
	return e
}

func cause(why stopWhy) error {
	switch why {
	case stopTimeout:
		return ErrTimeout
	case stopPreempted:
		return ErrPreempted
	case stopCancelled:
		return ErrCancelled
	default:
		return ErrLost
	}
}

const maxMessage = 1000

func shorten(s string) string {
	if len(s) <= maxMessage {
		return s
	}
	return strings.ToValidUTF8(s[:maxMessage], "") + " …"
}

func (a *attempt) end(why millracev1.Reason, code int32, message string) *millracev1.AttemptEnd {
	return &millracev1.AttemptEnd{
		Attempt: a.c.Attempt, Worker: string(a.l.id), Reason: why, ExitCode: code, Message: message,
		StartedAt: timestamppb.New(a.started), EndedAt: timestamppb.New(a.l.a.st.Now()),
	}
}

// refusal is the end of an attempt that never began to print.
func (a *attempt) refusal(code int, why string) *millracev1.AttemptEnd {
	e := a.end(millracev1.Reason_REASON_REFUSED, int32(code), why)
	e.NoOutput = true
	return e
}

// report hands the outcome to the finish loop, as the move that the retry rule makes of it.
func (a *attempt) report(e *millracev1.AttemptEnd) {
	e.EndedAt = timestamppb.New(a.l.a.st.Now())
	a.mu.Lock()
	why := a.why
	a.ending = true
	a.mu.Unlock()
	a.l.a.met.ended.WithLabelValues(reasonWord(e)).Inc()
	if why == stopLost {
		a.l.drop(a) // the record is not ours to change
		return
	}
	c := &store.Change{
		ID: a.c.ID, Guess: a.c.At, In: task.Input{Attempt: a.c.Attempt, Worker: a.l.id}, End: e, Spec: a.t, SpecBytes: a.c.Spec,
		Retention: retention(a.t),
	}
	switch {
	case why == stopIsolated, e.Reason == millracev1.Reason_REASON_PREEMPTED,
		e.Reason == millracev1.Reason_REASON_NEVER_STARTED, e.Reason == millracev1.Reason_REASON_INTERNAL:
		c.Move = task.Release
		if e.Reason == millracev1.Reason_REASON_INTERNAL {
			c.Due = a.l.a.st.Now().Add(5 * time.Second) // another agent, or this one when its machine has recovered
		}
		a.l.a.met.released.Inc()
	default:
		v := task.Decide(a.c.At.Record, task.End{Reason: e.Reason, Retry: retryRule(a.t)})
		c.Move, c.In.To = task.Finish, v.Final
		if v.Retry {
			c.Move, c.Due = task.Retry, a.l.a.st.Now().Add(v.After)
		}
	}
	a.l.finishes <- &ending{a: a, change: c}
}

func retryRule(t *millracev1.Task) task.RetryRule {
	return task.RetryRule{
		MaxAttempts: uint32(spec.MaxAttempts(t)), MaxLost: uint32(spec.MaxLost(t)),
		Retryable: func(r millracev1.Reason) bool { return spec.RetryOn(t, r) },
		Delay:     func(n uint32) time.Duration { return spec.Delay(spec.BackoffOf(t), int(n), rand.Float64) },
	}
}

func retention(t *millracev1.Task) time.Duration { return spec.Retention(t) }

func reasonWord(e *millracev1.AttemptEnd) string {
	if e.GetReason() == millracev1.Reason_REASON_UNSPECIFIED {
		return "none"
	}
	return strings.ToLower(strings.TrimPrefix(e.GetReason().String(), "REASON_"))
}
