package api

import (
	"context"
	"errors"
	"fmt"

	"connectrpc.com/connect"

	"github.com/millrace/millrace/internal/spec"
	"github.com/millrace/millrace/internal/store"
)

// Codes of a Refusal beside those of package spec.
const (
	// CodeIDTaken: the id belongs to a task with another content.
	CodeIDTaken = "id_taken"
	// CodeFull: Redis is near its memory limit, no task is taken in now.
	CodeFull = "full"
)

// Refusal says why a task was not taken in, in words that end with the next step.
type Refusal struct {
	Code string // one of spec.CodeBadTask, spec.CodeTooLarge, CodeIDTaken, CodeFull
	Err  error
}

// Refuse returns a *Refusal.
func Refuse(code string, err error) error { return &Refusal{Code: code, Err: err} }

func (r *Refusal) Error() string { return r.Err.Error() }

// Unwrap returns the cause.
func (r *Refusal) Unwrap() error { return r.Err }

// errStopping tells clients to go on at another dispatcher, or at this one when it is back.
var errStopping = errors.New("the dispatcher is stopping: try again")

// wireError gives an error the code that clients branch on. The text is for people.
func wireError(what string, err error) error {
	if ce := new(connect.Error); errors.As(err, &ce) {
		return ce
	}
	if r := new(Refusal); errors.As(err, &r) {
		return connect.NewError(refusalCode(r.Code), r.Err)
	}
	switch {
	case errors.Is(err, spec.ErrTooLarge):
		return connect.NewError(connect.CodeResourceExhausted, err)
	case errors.Is(err, context.Canceled):
		// The caller left, and sees nothing of this, or the server ends its calls because it stops.
		return connect.NewError(connect.CodeUnavailable, errStopping)
	case errors.Is(err, context.DeadlineExceeded):
		return connect.NewError(connect.CodeDeadlineExceeded, fmt.Errorf("%s: the time that the caller gave is over", what))
	case store.IsOutOfMemory(err):
		return connect.NewError(connect.CodeResourceExhausted,
			fmt.Errorf("%s: Redis is at its memory limit: wait until tasks end, or raise maxmemory", what))
	case store.IsUnavailable(err):
		return connect.NewError(connect.CodeUnavailable,
			fmt.Errorf("%s: the dispatcher cannot reach Redis (%w): try again; if it stays so, look at Redis", what, err))
	default:
		return connect.NewError(connect.CodeInternal, fmt.Errorf("%s: %w: look at the dispatcher's log", what, err))
	}
}

func refusalCode(code string) connect.Code {
	switch code {
	case CodeIDTaken:
		return connect.CodeAlreadyExists
	case CodeFull, spec.CodeTooLarge:
		return connect.CodeResourceExhausted
	default:
		return connect.CodeInvalidArgument
	}
}

// lookupError is for a task that an id or prefix did not lead to.
func lookupError(what, id string, err error) error {
	if ambiguous := new(store.AmbiguousError); errors.As(err, &ambiguous) {
		return connect.NewError(connect.CodeFailedPrecondition, ambiguous)
	}
	if !errors.Is(err, store.ErrNotFound) {
		return wireError(what, err)
	}
	if id == "" {
		return connect.NewError(connect.CodeInvalidArgument, errors.New("id is empty: give a task's id or the beginning of one"))
	}
	return connect.NewError(connect.CodeNotFound, fmt.Errorf(
		"no task with the id or prefix %q: `millrace ps` lists tasks; records are kept for their retention after the end (24h unless set)", id))
}
