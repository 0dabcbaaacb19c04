package logship

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/logkey"
)

const (
	batchBytes  = 1 << 20
	batchChunks = 256
	// spoolAfter is how long appends may fail before what is in memory goes to disk, so that little is lost if the
	// agent is killed while Redis is gone.
	spoolAfter = time.Second
)

// shard sends the chunks of all logs of one shard, one append at a time, so that the chunks of a log arrive in order.
type shard struct {
	s       *Shipper
	n       int
	started bool // guarded by the Shipper's lock
	wake    chan struct{}

	mu    sync.Mutex // locked after a Log's lock
	fresh []*Log

	active  []*Log // logs with chunks; only run touches it
	failing time.Time
	warned  time.Time
}

// add hands over a log that has something to send.
func (sh *shard) add(l *Log) {
	sh.mu.Lock()
	sh.fresh = append(sh.fresh, l)
	sh.mu.Unlock()
	select {
	case sh.wake <- struct{}{}:
	default:
	}
}

func (sh *shard) run(ctx context.Context) {
	pause := pauser{min: 10 * time.Millisecond, max: time.Second}
	for {
		select {
		case <-ctx.Done():
			return
		case <-sh.wake:
		}
		for ctx.Err() == nil {
			batch := sh.collect()
			if len(batch) == 0 {
				break
			}
			if sh.send(ctx, batch) {
				pause.reset()
				continue
			}
			if pause.wait(ctx) != nil {
				return
			}
		}
	}
}

// part is what a batch takes from one log.
type part struct {
	l      *Log
	chunks [][]byte
}

// collect takes the oldest chunks of every log that has some, each its share of a batch.
func (sh *shard) collect() []part {
	sh.mu.Lock()
	sh.active = append(sh.active, sh.fresh...)
	sh.fresh = nil
	sh.mu.Unlock()
	if len(sh.active) == 0 {
		return nil
	}
	share := batchBytes / min(len(sh.active), batchChunks)
	var parts []part
	size, count := 0, 0
	for i, l := range sh.active {
		if size >= batchBytes || count >= batchChunks {
			// The rest comes first next time.
			sh.active = append(sh.active[i:len(sh.active):len(sh.active)], sh.active[:i]...)
			break
		}
		l.mu.Lock()
		chunks := l.q.window(share)
		l.mu.Unlock()
		if len(chunks) > batchChunks-count {
			chunks = chunks[:batchChunks-count]
		}
		for _, c := range chunks {
			size += len(c)
		}
		count += len(chunks)
		parts = append(parts, part{l, chunks})
	}
	return parts
}

// send appends a batch and reports whether all of it was accepted.
func (sh *shard) send(ctx context.Context, parts []part) bool {
	var chunks [][]byte
	for _, p := range parts {
		chunks = append(chunks, p.chunks...)
	}
	taken := 0
	if len(chunks) > 0 {
		var err error
		if taken, err = sh.s.deps.Appender.AppendLog(ctx, sh.n, chunks); err != nil {
			sh.failed(ctx, err)
			return false
		}
		sh.recovered()
	}
	sh.s.metrics.chunks.Add(float64(taken))
	left := taken
	for _, p := range parts {
		n := min(left, len(p.chunks))
		left -= n
		if sh.accepted(p, n) {
			sh.active = slices.DeleteFunc(sh.active, func(l *Log) bool { return l == p.l })
		}
	}
	if taken < len(chunks) {
		sh.s.metrics.full.Inc()
	}
	return taken == len(chunks)
}

// accepted removes the n oldest chunks of a log and reports whether it has none left for now.
func (sh *shard) accepted(p part, n int) bool {
	l := p.l
	for _, c := range p.chunks[:n] {
		sh.s.metrics.bytes.Add(float64(len(c)))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.q.pop(n)
	if !l.q.empty() {
		return false
	}
	l.ready = false
	if l.ended {
		sh.s.forget(l)
	}
	return true
}

// failed says so once in a while and brings what is in memory to safety.
func (sh *shard) failed(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	sh.s.metrics.failures.Inc()
	now := time.Now()
	if sh.failing.IsZero() {
		sh.failing = now
	}
	if now.Sub(sh.warned) > 10*time.Second {
		sh.warned = now
		sh.s.log.Warn("logs cannot be sent, output is kept and sent later", slog.Int(logkey.Shard, sh.n), slog.Any(logkey.Err, err))
	}
	if now.Sub(sh.failing) < spoolAfter {
		return
	}
	for _, l := range sh.active {
		l.mu.Lock()
		// When the disk refuses, memory is still there, and push says so when that is full too.
		_ = l.q.spill()
		l.mu.Unlock()
	}
}

func (sh *shard) recovered() {
	if !sh.failing.IsZero() && !sh.warned.IsZero() {
		sh.s.log.Info("logs can be sent again", slog.Int(logkey.Shard, sh.n), slog.Duration(logkey.Took, time.Since(sh.failing)))
	}
	sh.failing, sh.warned = time.Time{}, time.Time{}
}

// pauser waits longer each time, with jitter, until it is reset.
type pauser struct {
	min, max, next time.Duration
}

func (p *pauser) reset() { p.next = 0 }

func (p *pauser) wait(ctx context.Context) error {
	p.next = min(max(p.next*2, p.min), p.max)
	timer := time.NewTimer(p.next/2 + rand.N(p.next))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
