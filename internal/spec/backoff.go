package spec

import (
	"math"
	"time"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// Backoff is the pause between attempts with its defaults filled in.
type Backoff struct {
	Initial time.Duration // before the second attempt
	Factor  float64       // growth from one pause to the next
	Max     time.Duration // longest pause, before the jitter
	Jitter  float64       // spread as a fraction, 0 to 1
}

// BackoffOf a task. When only one of initial and max is given and contradicts the default of the other, the given
// one wins.
func BackoffOf(t *millracev1.Task) Backoff {
	p := t.GetRetry().GetBackoff()
	b := Backoff{
		Initial: orDuration(p.GetInitial(), DefaultInitial),
		Factor:  or(p.GetFactor(), DefaultFactor),
		Max:     orDuration(p.GetMax(), DefaultMax),
		Jitter:  DefaultJitter,
	}
	if p.GetMax() == nil {
		b.Max = max(b.Max, b.Initial)
	}
	b.Initial = min(b.Initial, b.Max)
	if p != nil && p.Jitter != nil {
		b.Jitter = p.GetJitter()
	}
	return b
}

// Delay is the pause after the given number of failures (1 after the first): initial × factor^(failures-1), at most
// max, spread evenly by ± jitter. rnd returns a number in [0, 1) as rand.Float64 does. No input makes it negative or
// lets it overflow.
func Delay(b Backoff, failures int, rnd func() float64) time.Duration {
	d := min(float64(b.Initial)*math.Pow(b.Factor, float64(max(failures, 1)-1)), float64(b.Max))
	if math.IsNaN(d) { // 0 × Inf: no pause has grown for ever and is still none
		return 0
	}
	d *= 1 + b.Jitter*(2*rnd()-1)
	switch {
	case d >= math.MaxInt64:
		return math.MaxInt64
	case d > 0:
		return time.Duration(d)
	default: // negative or NaN, from a policy that was never validated
		return 0
	}
}
