package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"strings"
)

// Call is one run of a Go handler.
type Call struct {
	// ID of the task.
	ID string
	// Attempt from 1; a handler with effects elsewhere can use (ID, Attempt) as a fencing token.
	Attempt uint32
	// Handler it was called as.
	Handler string
	// Payload as the producer wrote it.
	Payload []byte
	// Labels of the task.
	Labels map[string]string
	// Output is the task's log.
	Output io.Writer
}

// HandlerFunc does the work of a call. Its result goes into the Result, up to 64 KiB; an error fails the attempt, and
// the task's retry rule decides what follows. ctx ends on cancel, timeout and loss of the lease, with that as its
// cause; a handler that goes on all the same keeps its slot, but its outcome may no longer count. A panic is a failure.
type HandlerFunc func(ctx context.Context, c *Call) ([]byte, error)

// Option changes an Agent.
type Option func(*Agent)

// Handle registers a handler for tasks that call it by name.
func Handle(name string, fn HandlerFunc) Option {
	return func(a *Agent) { a.handlers[name] = fn }
}

// Causes of a handler's context.
var (
	// ErrCancelled: the task was cancelled.
	ErrCancelled = errors.New("task cancelled")
	// ErrTimeout: the attempt took longer than the task's timeout.
	ErrTimeout = errors.New("task timed out")
	// ErrLost: the attempt is no longer this worker's; its outcome does not count.
	ErrLost = errors.New("attempt is no longer ours")
	// ErrPreempted: the agent stops and hands the task to another one.
	ErrPreempted = errors.New("task handed to another agent")
)

// maxOutput is how much of a handler's result is kept.
const maxOutput = 64 << 10

// call runs a handler and turns a panic into an error.
func call(ctx context.Context, fn HandlerFunc, c *Call) (out []byte, err error) {
	defer func() {
		if p := recover(); p != nil {
			stack := string(debug.Stack())
			_, _ = fmt.Fprintf(c.Output, "panic: %v\n%s", p, stack)
			err = fmt.Errorf("panic: %v", strings.TrimSpace(fmt.Sprint(p)))
		}
	}()
	out, err = fn(ctx, c)
	if len(out) > maxOutput {
		return nil, fmt.Errorf("handler %s returned %d bytes, at most %d are kept: store large results elsewhere", c.Handler, len(out), maxOutput)
	}
	return out, err
}
