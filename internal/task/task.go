// Package task is the domain: what a task's record may hold and which moves may change it.
//
// It has no I/O and no clock. Services call it through internal/store, which turns a chosen rule into one
// guarded script; the model tests of this package run the same table through every interleaving.
package task

import (
	"fmt"
	"time"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// ID names a task: [A-Za-z0-9._-]{1,128}, not starting with a dot.
type ID string

// WorkerID names one incarnation of an agent process, "<name>-<random>"; it is never used again.
type WorkerID string

// State is where a task stands, written into the record as one letter.
type State byte

// States. None is the absence of a record.
const (
	None      State = 'n'
	Waiting   State = 'w'
	Delayed   State = 'd'
	Queued    State = 'q'
	Running   State = 'r'
	Succeeded State = 'S'
	Failed    State = 'F'
	Cancelled State = 'C'
	Expired   State = 'E'
)

var stateNames = map[State]string{
	None: "none", Waiting: "waiting", Delayed: "delayed", Queued: "queued", Running: "running",
	Succeeded: "succeeded", Failed: "failed", Cancelled: "cancelled", Expired: "expired",
}

var stateProto = map[State]millracev1.State{
	Waiting: millracev1.State_STATE_WAITING, Delayed: millracev1.State_STATE_DELAYED,
	Queued: millracev1.State_STATE_QUEUED, Running: millracev1.State_STATE_RUNNING,
	Succeeded: millracev1.State_STATE_SUCCEEDED, Failed: millracev1.State_STATE_FAILED,
	Cancelled: millracev1.State_STATE_CANCELLED, Expired: millracev1.State_STATE_EXPIRED,
}

// String is the word that people read.
func (s State) String() string {
	if n, ok := stateNames[s]; ok {
		return n
	}
	return fmt.Sprintf("state(%q)", byte(s))
}

// Proto is the same state in messages; unspecified for None and for letters this version does not know.
func (s State) Proto() millracev1.State { return stateProto[s] }

// StateOf is the inverse of Proto; None when it has none.
func StateOf(p millracev1.State) State {
	for s, v := range stateProto {
		if v == p {
			return s
		}
	}
	return None
}

// Final reports whether nothing changes the task any more.
func (s State) Final() bool {
	return s == Succeeded || s == Failed || s == Cancelled || s == Expired
}

// Record is the part of a task's record that moves decide on. The zero Attempt and an empty Owner mean "none yet".
type Record struct {
	State    State
	Attempt  uint32
	Owner    WorkerID // present or last owner
	Cancel   bool     // a cancel mark stands
	Failures uint32   // attempts that count against max_attempts
	Lost     uint32   // attempts that count against max_lost
}

// End says how an attempt ended, as its agent or the reaper saw it.
type End struct {
	Reason millracev1.Reason // unspecified: it succeeded
	// Retry is the producer's rule for this task.
	Retry RetryRule
}

// RetryRule is what the retry decision needs of a task's spec.
type RetryRule struct {
	MaxAttempts uint32
	MaxLost     uint32
	Retryable   func(millracev1.Reason) bool
	Delay       func(failures uint32) time.Duration
}

// Verdict is what follows an attempt that ended by itself.
type Verdict struct {
	Retry bool
	After time.Duration // before the next attempt
	Final State         // when !Retry
}

// Decide applies the retry rule to the end of a running attempt of r. Failures is the count after this attempt.
func Decide(r Record, e End) Verdict {
	if e.Reason == millracev1.Reason_REASON_UNSPECIFIED {
		return Verdict{Final: Succeeded}
	}
	if e.Reason == millracev1.Reason_REASON_CANCELLED {
		return Verdict{Final: Cancelled}
	}
	failures := r.Failures + 1
	if failures < e.Retry.MaxAttempts && e.Retry.Retryable(e.Reason) {
		return Verdict{Retry: true, After: e.Retry.Delay(failures)}
	}
	return Verdict{Final: Failed}
}
