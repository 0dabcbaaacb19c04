package logkey

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

const (
	limiterEvery = 10 * time.Second
	// limiterKeys bounds the memory when callers put ids into keys. Reaching it
	// forgets the keys that are quiet, or all of them.
	limiterKeys = 1024
)

// Limiter writes at most one line per key in 10 seconds, and with the next line
// of that key says how many it left out. Loops that retry log their errors
// through it, so that an outage is visible without filling the disk.
//
// It is safe for concurrent use.
type Limiter struct {
	logger *slog.Logger
	every  time.Duration
	now    func() time.Time

	mu   sync.Mutex
	keys map[string]*limited
}

type limited struct {
	last       time.Time
	suppressed int
}

// NewLimiter returns a limiter that writes to logger.
func NewLimiter(logger *slog.Logger) *Limiter {
	return &Limiter{logger: logger, every: limiterEvery, now: time.Now, keys: make(map[string]*limited)}
}

// Error logs msg with err at level error, unless a line with the same key was
// written less than 10 seconds ago. The key is a constant that names the place
// or the kind of failure, such as "claim"; args are as in [slog.Logger.Error].
// A nil err logs nothing.
func (l *Limiter) Error(ctx context.Context, key, msg string, err error, args ...any) {
	l.log(ctx, slog.LevelError, key, msg, err, args)
}

// Warn is [Limiter.Error] at level warn, for what is going to be retried.
func (l *Limiter) Warn(ctx context.Context, key, msg string, err error, args ...any) {
	l.log(ctx, slog.LevelWarn, key, msg, err, args)
}

func (l *Limiter) log(ctx context.Context, level slog.Level, key, msg string, err error, args []any) {
	if err == nil {
		return
	}
	suppressed, ok := l.allow(key)
	if !ok {
		return
	}
	attrs := append([]any{slog.Any(Err, err)}, args...)
	if suppressed > 0 {
		attrs = append(attrs, slog.Int(Suppressed, suppressed))
	}
	l.logger.Log(ctx, level, msg, attrs...) //nolint:sloglint // the caller's constant
}

// allow says whether key may write now, and how many lines it left out before.
func (l *Limiter) allow(key string) (suppressed int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	k := l.keys[key]
	if k == nil {
		l.makeRoom(now)
		k = &limited{}
		l.keys[key] = k
	} else if now.Sub(k.last) < l.every {
		k.suppressed++
		return 0, false
	}
	suppressed, k.suppressed, k.last = k.suppressed, 0, now
	return suppressed, true
}

func (l *Limiter) makeRoom(now time.Time) {
	if len(l.keys) < limiterKeys {
		return
	}
	for key, k := range l.keys {
		if now.Sub(k.last) >= l.every {
			delete(l.keys, key)
		}
	}
	if len(l.keys) >= limiterKeys {
		clear(l.keys)
	}
}
