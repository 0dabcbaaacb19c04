package spec

import (
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// Defaults of a task. To change one changes the meaning of tasks that are already stored: do not.
const (
	DefaultQueue       = "default"
	DefaultPriority    = PriorityNormal
	DefaultGrace       = 10 * time.Second
	DefaultMaxAttempts = 1
	DefaultMaxLost     = 3
	DefaultRetention   = 24 * time.Hour
	DefaultSlots       = 1
	DefaultInitial     = time.Second
	DefaultFactor      = 2
	DefaultMax         = 5 * time.Minute
	DefaultJitter      = 0.2
)

// The priorities, from the most urgent.
const (
	PriorityHigh   = "high"
	PriorityNormal = "normal"
	PriorityLow    = "low"
)

// What a cut-off agent does with a task.
const (
	IsolationKill = "kill"
	IsolationKeep = "keep"
)

// defaultRetryOn are the reasons that are the task's own doing.
var defaultRetryOn = []millracev1.Reason{
	millracev1.Reason_REASON_EXIT, millracev1.Reason_REASON_SIGNAL, millracev1.Reason_REASON_OOM, millracev1.Reason_REASON_TIMEOUT,
}

// Queue of the task.
func Queue(t *millracev1.Task) string { return or(t.GetQueue(), DefaultQueue) }

// Priority of the task: high, normal or low.
func Priority(t *millracev1.Task) string { return or(t.GetPriority(), DefaultPriority) }

// Timeout of one attempt; 0 is none.
func Timeout(t *millracev1.Task) time.Duration { return orDuration(t.GetTimeout(), 0) }

// Grace between the polite signal and KILL.
func Grace(t *millracev1.Task) time.Duration { return orDuration(t.GetGrace(), DefaultGrace) }

// Retention of the record after the end.
func Retention(t *millracev1.Task) time.Duration {
	return orDuration(t.GetRetention(), DefaultRetention)
}

// Isolation is what a cut-off agent does with the task: IsolationKill or IsolationKeep.
func Isolation(t *millracev1.Task) string { return or(t.GetOnIsolation(), IsolationKill) }

// NotBefore is the earliest start; zero when there is none.
func NotBefore(t *millracev1.Task) time.Time {
	if t.GetNotBefore() == nil {
		return time.Time{}
	}
	return t.GetNotBefore().AsTime()
}

// ExpiresAt is the latest start; zero when there is none.
func ExpiresAt(t *millracev1.Task) time.Time {
	if t.GetExpiresAt() == nil {
		return time.Time{}
	}
	return t.GetExpiresAt().AsTime()
}

// Slots of an agent that one attempt takes.
func Slots(t *millracev1.Task) int { return int(or(t.GetResources().GetSlots(), DefaultSlots)) }

// MaxAttempts is how many attempts may fail through the task's own doing.
func MaxAttempts(t *millracev1.Task) int {
	return int(or(t.GetRetry().GetMaxAttempts(), DefaultMaxAttempts))
}

// MaxLost is how many attempts may be lost with their worker; 0 means the first loss is the end.
func MaxLost(t *millracev1.Task) int {
	if r := t.GetRetry(); r != nil && r.MaxLost != nil {
		return int(r.GetMaxLost())
	}
	return DefaultMaxLost
}

// RetryOn tells whether an attempt that ended for this reason may be followed by another one, if attempts are left.
func RetryOn(t *millracev1.Task, reason millracev1.Reason) bool {
	return slices.Contains(retryOn(t.GetRetry()), reason)
}

// retryOn is the effective list: sorted, each reason once, without those of no_retry_on.
func retryOn(r *millracev1.Retry) []millracev1.Reason {
	on := r.GetRetryOn()
	if len(on) == 0 {
		on = defaultRetryOn
	}
	on = slices.DeleteFunc(slices.Clone(on), func(reason millracev1.Reason) bool {
		return slices.Contains(r.GetNoRetryOn(), reason)
	})
	slices.Sort(on)
	return slices.Compact(on)
}

func or[T comparable](v, otherwise T) T {
	var zero T
	if v == zero {
		return otherwise
	}
	return v
}

func orDuration(d *durationpb.Duration, otherwise time.Duration) time.Duration {
	if d == nil {
		return otherwise
	}
	return d.AsDuration()
}
