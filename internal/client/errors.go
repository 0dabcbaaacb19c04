package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"syscall"

	"connectrpc.com/connect"
)

// passing reports whether an error may go away by itself: the server is not there, is stopping, or has lost Redis.
func passing(ctx context.Context, err error) bool {
	if ctx.Err() != nil {
		return false
	}
	code := connect.CodeOf(err)
	if connect.IsWireError(err) {
		return code == connect.CodeUnavailable
	}
	switch code {
	case connect.CodeUnavailable, connect.CodeUnknown, connect.CodeInternal, connect.CodeCanceled, connect.CodeDeadlineExceeded:
		return true // the connection broke before or within the answer
	default:
		return false
	}
}

// IsLogTrouble reports that the output cannot be read, while the task itself can still be asked for.
func IsLogTrouble(err error) bool {
	return connect.IsWireError(err) && connect.CodeOf(err) == connect.CodeDataLoss
}

// isRefused reports that no connection could be made, so that nothing was sent.
func isRefused(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial"
}

// Error is an error of the API with words for people.
type Error struct {
	Text string
	Err  error
}

func (e *Error) Error() string { return e.Text }

// Unwrap returns the cause, usually a *connect.Error.
func (e *Error) Unwrap() error { return e.Err }

// explain puts an error of a call into words that end with the next step.
func (c *Client) explain(err error) error {
	if errors.Is(err, context.Canceled) && !connect.IsWireError(err) {
		return context.Canceled
	}
	ce, ok := errors.AsType[*connect.Error](err)
	switch {
	case !ok:
		return err
	case connect.IsWireError(err):
		return &Error{Text: ce.Message(), Err: err}
	}
	switch ce.Code() {
	case connect.CodeUnimplemented, connect.CodePermissionDenied, connect.CodeUnauthenticated, connect.CodeInvalidArgument:
		return &Error{Err: err, Text: fmt.Sprintf("%s does not answer like a dispatcher of millrace (%s): check MILLRACE_SERVER", c.Server(), ce.Message())}
	case connect.CodeResourceExhausted:
		return &Error{Err: err, Text: ce.Message() + ": make the task smaller"}
	}
	return &Error{Err: err, Text: fmt.Sprintf("cannot reach a dispatcher at %s (%s): start one with `millrace dev`, or set MILLRACE_SERVER to where it runs",
		c.Server(), shortCause(err))}
}

// shortCause is the innermost reason without the address and the wrapping that go with it.
func shortCause(err error) string {
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno.Error()
	}
	if dns, ok := errors.AsType[*net.DNSError](err); ok {
		return "no host " + dns.Name
	}
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	if ce, ok := errors.AsType[*connect.Error](err); ok {
		return strings.TrimSpace(ce.Message())
	}
	return err.Error()
}
