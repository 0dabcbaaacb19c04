package spec

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func fixed(r float64) func() float64 { return func() float64 { return r } }

func TestDelay(t *testing.T) {
	t.Parallel()
	standard := BackoffOf(nil)
	for name, tc := range map[string]struct {
		b        Backoff
		failures int
		rnd      float64
		want     time.Duration
	}{
		"first":              {standard, 1, 0.5, time.Second},
		"second":             {standard, 2, 0.5, 2 * time.Second},
		"ninth is cut":       {standard, 10, 0.5, 5 * time.Minute},
		"least":              {standard, 1, 0, 800 * time.Millisecond},
		"most, over the max": {standard, 100, 1, 6 * time.Minute},
		"none counts as one": {standard, 0, 0.5, time.Second},
		"no pause":           {Backoff{Factor: 100, Max: time.Hour}, math.MaxInt, 0.5, 0},
		"full jitter":        {Backoff{Initial: time.Second, Factor: 1, Max: time.Hour, Jitter: 1}, 7, 0, 0},
		"overflow":           {Backoff{Initial: math.MaxInt64, Factor: 100, Max: math.MaxInt64, Jitter: 1}, 1000, 0.999, math.MaxInt64},
		"nonsense":           {Backoff{Initial: -time.Second, Factor: math.NaN(), Max: -1, Jitter: math.NaN()}, -5, 0.5, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := Delay(tc.b, tc.failures, fixed(tc.rnd))
			if d := got - tc.want; d < -time.Microsecond || d > time.Microsecond {
				t.Errorf("Delay = %v, want %v", got, tc.want)
			}
		})
	}
}

func TestDelayStaysInItsBounds(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := Backoff{
			Initial: time.Duration(rapid.Int64Range(0, int64(maxPause)).Draw(t, "initial")),
			Max:     time.Duration(rapid.Int64Range(0, int64(maxPause)).Draw(t, "max")),
			Factor:  rapid.Float64Range(1, maxFactor).Draw(t, "factor"),
			Jitter:  rapid.Float64Range(0, 1).Draw(t, "jitter"),
		}
		n := rapid.Int().Draw(t, "failures")
		d := Delay(b, n, fixed(rapid.Float64Range(0, 0.999).Draw(t, "rnd")))
		if most := float64(b.Max) * (1 + b.Jitter); d < 0 || float64(d) > most+1 {
			t.Fatalf("Delay(%+v, %d) = %v", b, n, d)
		}
	})
}
