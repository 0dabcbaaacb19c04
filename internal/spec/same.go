package spec

import (
	"bytes"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// Canonical returns the bytes by which "the same id, the same spec" is decided, for a valid task. They leave out the
// id, which is compared before, and the trace context, because a producer that sends a task again does so in another
// trace. A field that says its default counts as absent: so the bytes of a stored task stay what they are when a
// later version adds fields.
func Canonical(t *millracev1.Task) ([]byte, error) {
	c := proto.CloneOf(t)
	c.Id, c.Traceparent = "", ""
	if len(c.GetSigned().GetTask()) > 0 {
		return marshal(c) // what was signed is the same only byte for byte
	}
	c.Queue = unless(c.GetQueue(), DefaultQueue)
	c.Priority = unless(c.GetPriority(), DefaultPriority)
	c.OnIsolation = unless(c.GetOnIsolation(), IsolationKill)
	c.Grace = unlessDuration(c.GetGrace(), DefaultGrace)
	c.Retention = unlessDuration(c.GetRetention(), DefaultRetention)
	c.Retry = sparseRetry(c)
	if r := c.GetResources(); r != nil {
		r.Slots = unless(r.GetSlots(), DefaultSlots)
		c.Resources = unlessEmpty(r)
	}
	c.Log = unlessEmpty(c.GetLog())
	c.SignalBefore = unlessEmpty(c.GetSignalBefore())
	c.Signed = unlessEmpty(c.GetSigned())
	if cmd := c.GetCommand(); cmd.GetStdin() != "" {
		cmd.StdinBytes, cmd.Stdin = []byte(cmd.GetStdin()), "" // two ways to say the same
	}
	return marshal(c)
}

// Equal tells whether two valid tasks ask for the same.
func Equal(a, b *millracev1.Task) bool {
	ca, errA := Canonical(a)
	cb, errB := Canonical(b)
	return errA == nil && errB == nil && bytes.Equal(ca, cb)
}

// sparseRetry writes the effective retry rules without what is default.
func sparseRetry(t *millracev1.Task) *millracev1.Retry {
	b := BackoffOf(t)
	sparse := &millracev1.Backoff{Factor: unless(b.Factor, DefaultFactor)}
	if b.Initial != DefaultInitial {
		sparse.Initial = durationpb.New(b.Initial)
	}
	if b.Max != max(DefaultMax, b.Initial) {
		sparse.Max = durationpb.New(b.Max)
	}
	if b.Jitter != DefaultJitter {
		sparse.Jitter = new(b.Jitter)
	}
	r := &millracev1.Retry{
		MaxAttempts: unless(t.GetRetry().GetMaxAttempts(), DefaultMaxAttempts),
		Backoff:     unlessEmpty(sparse),
	}
	if n := MaxLost(t); n != DefaultMaxLost {
		r.MaxLost = new(uint32(n)) //nolint:gosec // it came from a uint32
	}
	switch on := retryOn(t.GetRetry()); {
	case slices.Equal(on, defaultRetryOn):
	case len(on) == 0:
		r.NoRetryOn = defaultRetryOn // nothing at all is retried; an empty retry_on would say the default
	default:
		r.RetryOn = on
	}
	return unlessEmpty(r)
}

func marshal(t *millracev1.Task) ([]byte, error) {
	return proto.MarshalOptions{Deterministic: true}.Marshal(t)
}

func unless[T comparable](v, standard T) T {
	if v == standard {
		var zero T
		return zero
	}
	return v
}

func unlessDuration(d *durationpb.Duration, standard time.Duration) *durationpb.Duration {
	if d == nil || d.AsDuration() == standard {
		return nil
	}
	return d
}

// unlessEmpty drops a message that says nothing.
func unlessEmpty[M interface {
	comparable
	proto.Message
}](m M) M {
	var none M
	if m == none || proto.Size(m) == 0 {
		return none
	}
	return m
}
