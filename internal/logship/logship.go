// Package logship takes the output of attempts on an agent and ships it to the log streams.
//
// The agent opens a Log per attempt and writes what the task prints; nothing here ever makes the task wait for
// Redis. Output is cut into chunks that carry task, attempt, worker, sequence and byte offset, so that sending one
// twice is harmless, kept in bounded memory, and when Redis is slow or gone in a spool file on the local disk. Chunks
// of all attempts of a shard share appends. What an agent could not send before it died is sent by the next agent that
// uses the same spool directory.
package logship

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/store"
)

// Appender adds encoded LogChunks to a shard's stream, in order. accepted < len(chunks) without an error means that
// the shard is full: the rest has to be tried again later. After an error any part may have been added.
type Appender interface {
	AppendLog(ctx context.Context, shard int, chunks [][]byte) (accepted int, err error)
}

// Config of a Shipper. The zero value of every field but SpoolDir means its default.
type Config struct {
	// SpoolDir holds output that Redis could not take yet. Several agents may share it.
	SpoolDir string
	// MemoryPerAttempt bounds the unsent output of one attempt in memory, in bytes; the rest is spooled. 4 MiB.
	MemoryPerAttempt int
	// MemoryTotal bounds the unsent output of all attempts in memory, in bytes. 64 MiB.
	MemoryTotal int
	// SpoolLimit bounds the spool on disk, in bytes; output beyond it is dropped with a visible marker. 4 GiB.
	SpoolLimit int64
	// ChunkBytes is the most output in one chunk. 64 KiB.
	ChunkBytes int
	// FlushInterval is how long output may wait for more of it. 100ms.
	FlushInterval time.Duration
	// Linger replaces FlushInterval for the first output after a silence, so that a lone line is seen at once and the
	// output and the end of a short task still share one append. 10ms.
	Linger time.Duration
	// LimitBytes is kept of an attempt that has no limit of its own. 256 MiB.
	LimitBytes uint64
	// Compress packs chunks with zstd where that makes them smaller.
	Compress bool
	// StopTimeout is how long Run goes on sending after its context ended, before the rest goes to the spool. 5s.
	StopTimeout time.Duration
}

func (c Config) withDefaults() Config {
	setDefault(&c.MemoryPerAttempt, 4<<20)
	setDefault(&c.MemoryTotal, 64<<20)
	setDefault(&c.SpoolLimit, 4<<30)
	setDefault(&c.ChunkBytes, 64<<10)
	setDefault(&c.FlushInterval, 100*time.Millisecond)
	setDefault(&c.Linger, 10*time.Millisecond)
	setDefault(&c.LimitBytes, 256<<20)
	setDefault(&c.StopTimeout, 5*time.Second)
	return c
}

func setDefault[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

// Validate returns everything that is wrong with c.
func (c Config) Validate() error {
	var errs []error
	if c.SpoolDir == "" {
		errs = append(errs, errors.New("spool directory is not set"))
	}
	c = c.withDefaults()
	if c.ChunkBytes < 512 || c.ChunkBytes > 512<<10 {
		errs = append(errs, fmt.Errorf("chunk size %d is outside 512 to %d bytes", c.ChunkBytes, 512<<10))
	}
	if c.MemoryPerAttempt < c.ChunkBytes {
		errs = append(errs, fmt.Errorf("memory per attempt %d is less than one chunk of %d bytes", c.MemoryPerAttempt, c.ChunkBytes))
	}
	if c.MemoryTotal < c.MemoryPerAttempt {
		errs = append(errs, fmt.Errorf("total memory %d is less than the memory per attempt %d", c.MemoryTotal, c.MemoryPerAttempt))
	}
	if c.FlushInterval < 0 || c.Linger < 0 || c.StopTimeout < 0 || c.SpoolLimit < 0 {
		errs = append(errs, errors.New("times and the spool limit cannot be negative"))
	}
	return errors.Join(errs...)
}

// Deps are what a Shipper works with.
type Deps struct {
	// Appender is where chunks go.
	Appender Appender
	// Shards is the number of log shards, fixed for the life of a namespace. It is asked until it answers once.
	Shards func(ctx context.Context) (int, error)
	// Logger may be nil.
	Logger *slog.Logger
	// Registerer may be nil.
	Registerer prometheus.Registerer
}

// Shipper ships the output of all attempts of one agent.
type Shipper struct {
	cfg     Config
	deps    Deps
	log     *slog.Logger
	metrics *metrics
	packer  *packer

	memory  atomic.Int64 // bytes of unsent chunks in memory
	spooled atomic.Int64 // bytes in spool files

	mu      sync.Mutex
	number  int // of shards; 0 while unknown
	shards  map[int]*shard
	open    map[*Log]struct{}                 // logs that have written something and are not sent to their end
	launch  func(f func(ctx context.Context)) // set while Run runs: starts a goroutine that Run ends and waits for
	stopped bool                              // Run has ended: chunks go straight to the spool
	wg      sync.WaitGroup                    // senders and the goroutines that finish cut logs
}

// New checks cfg and makes the spool directory. It starts nothing.
func New(cfg Config, deps Deps) (*Shipper, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("log shipping: %w", err)
	}
	if err := os.MkdirAll(cfg.SpoolDir, 0o700); err != nil {
		return nil, fmt.Errorf("make the log spool directory: %w", err)
	}
	log := deps.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	cfg = cfg.withDefaults()
	return &Shipper{
		cfg: cfg, deps: deps, log: log,
		metrics: newMetrics(deps.Registerer),
		packer:  &packer{enabled: cfg.Compress},
		shards:  map[int]*shard{},
		open:    map[*Log]struct{}{},
	}, nil
}

// Run sends until ctx ends, then goes on for at most StopTimeout, puts the rest into the spool and returns. Logs that
// are open when ctx ends lose nothing that was written before that; they should be closed first, so that their end is
// known.
func (s *Shipper) Run(ctx context.Context) error {
	sendCtx, stopSending := context.WithCancel(context.WithoutCancel(ctx))
	defer stopSending()
	s.mu.Lock()
	s.launch = func(f func(context.Context)) { s.wg.Go(func() { f(sendCtx) }) }
	for _, sh := range s.shards {
		s.startLocked(sh)
	}
	s.mu.Unlock()

	var left sync.WaitGroup
	left.Go(func() {
		if s.learnShards(ctx) {
			s.sendLeftovers(ctx)
		}
	})

	<-ctx.Done()
	left.Wait()
	for _, l := range s.logs() {
		l.flush()
	}
	timer := time.AfterFunc(s.cfg.StopTimeout, stopSending)
	s.waitIdle(sendCtx)
	timer.Stop()
	stopSending()
	s.mu.Lock()
	s.stopped = true
	s.mu.Unlock()
	s.wg.Wait()
	return s.spillAll()
}

// waitIdle returns when no log has anything left to send, or ctx ended.
func (s *Shipper) waitIdle(ctx context.Context) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		idle := true
		for _, l := range s.logs() {
			if !l.idle() {
				idle = false
				break
			}
		}
		if idle {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// spillAll puts everything unsent on disk and closes the files, for the next agent.
func (s *Shipper) spillAll() error {
	var errs []error
	for _, l := range s.logs() {
		if err := l.abandon(); err != nil {
			errs = append(errs, fmt.Errorf("spool the log of task %s attempt %d: %w", l.a.Task, l.a.Attempt, err))
		}
	}
	return errors.Join(errs...)
}

func (s *Shipper) logs() []*Log {
	s.mu.Lock()
	defer s.mu.Unlock()
	logs := make([]*Log, 0, len(s.open))
	for l := range s.open {
		logs = append(logs, l)
	}
	return logs
}

// learnShards asks for the number of shards and then lets the logs that waited for it be sent.
func (s *Shipper) learnShards(ctx context.Context) bool {
	pause := pauser{min: 50 * time.Millisecond, max: time.Second}
	for {
		n, err := s.deps.Shards(ctx)
		if err == nil {
			s.mu.Lock()
			s.number = n
			s.mu.Unlock()
			break
		}
		s.log.Debug("the number of log shards is not known yet", slog.Any(logkey.Err, err))
		if pause.wait(ctx) != nil {
			return false
		}
	}
	for _, l := range s.logs() {
		l.mu.Lock()
		if !l.q.empty() {
			l.announce()
		}
		l.mu.Unlock()
	}
	return true
}

// shardFor returns the sender of a task's shard and starts it when it is new; nil while the shards are unknown.
func (s *Shipper) shardFor(task string) *shard {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.number == 0 {
		return nil
	}
	n := store.LogShard(task, s.number)
	sh := s.shards[n]
	if sh == nil {
		sh = &shard{s: s, n: n, wake: make(chan struct{}, 1)}
		s.shards[n] = sh
		s.startLocked(sh)
	}
	return sh
}

func (s *Shipper) startLocked(sh *shard) {
	if s.launch == nil || s.stopped || sh.started {
		return
	}
	sh.started = true
	s.launch(sh.run)
}

// goFinish runs f in a goroutine that Run waits for, or reports that Run does not run.
func (s *Shipper) goFinish(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.launch == nil || s.stopped {
		return false
	}
	s.launch(func(context.Context) { f() })
	return true
}

// forget removes a log that is sent to its end.
func (s *Shipper) forget(l *Log) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, l)
}
