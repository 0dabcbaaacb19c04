package spec

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// policy is every default that a task can leave out.
type policy struct {
	Queue, Priority, Isolation           string
	Timeout, Grace, Retention            time.Duration
	NotBefore, ExpiresAt                 time.Time
	Slots, MaxAttempts, MaxLost          int
	Backoff                              Backoff
	OnExit, OnTimeout, OnLost, OnRefused bool
}

func policyOf(t *millracev1.Task) policy {
	return policy{
		Queue: Queue(t), Priority: Priority(t), Isolation: Isolation(t),
		Timeout: Timeout(t), Grace: Grace(t), Retention: Retention(t),
		NotBefore: NotBefore(t), ExpiresAt: ExpiresAt(t),
		Slots: Slots(t), MaxAttempts: MaxAttempts(t), MaxLost: MaxLost(t), Backoff: BackoffOf(t),
		OnExit:    RetryOn(t, millracev1.Reason_REASON_EXIT),
		OnTimeout: RetryOn(t, millracev1.Reason_REASON_TIMEOUT),
		OnLost:    RetryOn(t, millracev1.Reason_REASON_WORKER_LOST),
		OnRefused: RetryOn(t, millracev1.Reason_REASON_REFUSED),
	}
}

func TestDefaults(t *testing.T) {
	t.Parallel()
	standard := policy{
		Queue: "default", Priority: "normal", Isolation: "kill", Grace: 10 * time.Second, Retention: 24 * time.Hour,
		Slots: 1, MaxAttempts: 1, MaxLost: 3,
		Backoff: Backoff{Initial: time.Second, Factor: 2, Max: 5 * time.Minute, Jitter: 0.2},
		OnExit:  true, OnTimeout: true,
	}
	for name, tc := range map[string]struct {
		json string
		want func(*policy)
	}{
		"nothing":        {`{}`, func(*policy) {}},
		"empty messages": {`{"retry":{"backoff":{}},"resources":{}}`, func(*policy) {}},
		"everything": {
			`{"queue":"q","priority":"low","onIsolation":"keep","timeout":"1h","grace":"0s","retention":"1m",
			  "notBefore":"2030-01-01T00:00:00Z","expiresAt":"2031-01-01T00:00:00Z","resources":{"slots":2},
			  "retry":{"maxAttempts":5,"maxLost":0,"backoff":{"initial":"0s","factor":1,"max":"1s","jitter":0},
			           "retryOn":["refused","exit"],"noRetryOn":["exit"]}}`,
			func(p *policy) {
				*p = policy{
					Queue: "q", Priority: "low", Isolation: "keep", Timeout: time.Hour, Retention: time.Minute,
					NotBefore: time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC), ExpiresAt: time.Date(2031, 1, 1, 0, 0, 0, 0, time.UTC),
					Slots: 2, MaxAttempts: 5, MaxLost: 0, Backoff: Backoff{Factor: 1, Max: time.Second}, OnRefused: true,
				}
			},
		},
		"long first pause": {
			`{"retry":{"backoff":{"initial":"10m"}}}`,
			func(p *policy) { p.Backoff.Initial, p.Backoff.Max = 10*time.Minute, 10*time.Minute },
		},
		"short longest pause": {
			`{"retry":{"backoff":{"max":"100ms"}}}`,
			func(p *policy) { p.Backoff.Initial, p.Backoff.Max = 100*time.Millisecond, 100*time.Millisecond },
		},
		"only exceptions": {`{"retry":{"noRetryOn":["timeout"]}}`, func(p *policy) { p.OnTimeout = false }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want := standard
			tc.want(&want)
			if diff := cmp.Diff(want, policyOf(parse(t, tc.json))); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	if diff := cmp.Diff(standard, policyOf(nil)); diff != "" {
		t.Errorf("of no task (-want +got):\n%s", diff)
	}
}
