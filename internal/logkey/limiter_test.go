package logkey

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"
)

// setup returns a limiter, what it wrote, and its clock.
func setup(t *testing.T) (*Limiter, *bytes.Buffer, *time.Time) {
	t.Helper()
	var out bytes.Buffer
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	l := NewLimiter(slog.New(slog.NewTextHandler(&out, nil)))
	l.now = func() time.Time { return now }
	return l, &out, &now
}

func TestLimiterWritesOneLineAPeriod(t *testing.T) {
	t.Parallel()
	l, out, now := setup(t)
	ctx, err := t.Context(), errors.New("boom")
	for range 5 {
		l.Warn(ctx, "claim", "claim failed", err, Queue, "default")
	}
	l.Error(ctx, "renew", "renewal failed", err)
	*now = now.Add(limiterEvery)
	l.Warn(ctx, "claim", "claim failed", err)
	*now = now.Add(limiterEvery)
	l.Warn(ctx, "claim", "claim failed", err)

	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	want := []string{
		`level=WARN msg="claim failed" err=boom queue=default`,
		`level=ERROR msg="renewal failed" err=boom`,
		`level=WARN msg="claim failed" err=boom suppressed=4`,
		`level=WARN msg="claim failed" err=boom`,
	}
	if len(lines) != len(want) {
		t.Fatalf("wrote %d lines, want %d:\n%s", len(lines), len(want), out)
	}
	for i := range want {
		if !strings.HasSuffix(lines[i], want[i]) {
			t.Errorf("line %d = %s, want it to end in %s", i, lines[i], want[i])
		}
	}
}

func TestLimiterSkipsNil(t *testing.T) {
	t.Parallel()
	l, out, _ := setup(t)
	l.Error(t.Context(), "k", "msg", nil)
	if out.Len() > 0 {
		t.Errorf("a nil error was logged: %s", out)
	}
}

func TestLimiterMemoryIsBounded(t *testing.T) {
	t.Parallel()
	l := NewLimiter(slog.New(slog.DiscardHandler))
	for i := range 10 * limiterKeys {
		l.Error(t.Context(), fmt.Sprint("key", i), "msg", errors.New("boom"))
	}
	if n := len(l.keys); n > limiterKeys {
		t.Errorf("%d keys are kept, want at most %d", n, limiterKeys)
	}
}

func TestLimiterConcurrently(t *testing.T) {
	t.Parallel()
	l := NewLimiter(slog.New(slog.DiscardHandler))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				l.Error(context.Background(), "k", "msg", errors.New("boom"))
			}
		})
	}
	wg.Wait()
	if got := l.keys["k"].suppressed; got != 799 {
		t.Errorf("suppressed = %d, want 799", got)
	}
}
