package logsink

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/ops"
	"github.com/millrace/millrace/internal/store"
)

const (
	readCount = 32          // chunks of a shard in one read: with 4 shards at most 8 MiB
	readBlock = time.Second // how long a read waits, and so how long stopping takes
	// recheck is how often unfinished chunks are looked for without a reason. A sink that was frozen may be given chunks
	// after we have drained what it left: they must be found before a reader gives up on them (gapHold).
	recheck = 2 * time.Second
)

// drain moves chunks from the streams into files. One goroutine reads and writes, another syncs what was written and
// acknowledges it, several batches at once when the disk is slower than Redis.
type drain struct {
	s      *Service
	leases *leases
	loop   *ops.Loop
	syncs  chan *batch // written, to be synced; full: reading waits for the disk

	mu       sync.Mutex
	flying   int           // batches that are not acknowledged
	landed   chan struct{} // closed when flying becomes 0
	failed   error         // of the sync stage, since the reader last asked
	drained  map[int]bool  // shards without unfinished chunks of an earlier reader
	lastLook time.Time
}

func newDrain(s *Service, l *leases) *drain {
	return &drain{s: s, leases: l, loop: s.status.Loop("logsink.drain"), syncs: make(chan *batch, 3), drained: map[int]bool{}}
}

// run drains until ctx ends and what was read is acknowledged.
func (d *drain) run(ctx context.Context) {
	d.loop.Expect(30 * time.Second)
	defer d.loop.Expect(0)
	// Batches under way are finished, but not for ever.
	last, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(5*time.Second, cancel) })
	defer stop()
	var syncer sync.WaitGroup
	syncer.Go(func() { d.runSync(last) })
	for tries := 0; ctx.Err() == nil; {
		err := d.runOnce(ctx)
		if err == nil {
			tries = 0
			continue
		}
		if ctx.Err() != nil {
			break
		}
		d.trouble(ctx, err)
		store.Backoff(ctx, tries)
		tries++
	}
	close(d.syncs)
	syncer.Wait()
}

// trouble says what is wrong and makes the next round begin with what is unfinished.
func (d *drain) trouble(ctx context.Context, err error) {
	d.loop.Failure(err)
	d.mu.Lock()
	clear(d.drained)
	d.mu.Unlock()
	if isDisk(err) {
		d.s.metrics.failures.Inc()
		d.s.status.SetNotReady("disk", "logs cannot be written: "+err.Error()+": make room; they stay in Redis and with the agents")
		d.s.limiter.Error(ctx, "disk", "logs cannot be written, they stay in redis and with the agents", err)
		return
	}
	d.s.limiter.Warn(ctx, "drain", "log streams cannot be drained, trying again", err)
}

// diskError is an error of the log files.
type diskError struct{ err error }

func (e diskError) Error() string { return e.err.Error() }
func (e diskError) Unwrap() error { return e.err }

func isDisk(err error) bool {
	_, ok := errors.AsType[diskError](err)
	return ok
}

// runOnce reads one round of chunks and writes them.
func (d *drain) runOnce(ctx context.Context) error {
	if err := d.takeFailure(); err != nil {
		return err
	}
	shards := d.leases.held()
	if len(shards) == 0 {
		d.loop.Doing("waiting for a log shard")
		d.loop.Success("")
		select {
		case <-ctx.Done():
		case <-d.leases.changes():
		case <-time.After(readBlock):
		}
		return nil
	}
	if err := d.drainHistory(ctx, shards); err != nil {
		return err
	}
	d.loop.Doing("reading")
	entries, err := d.s.st.ReadLogs(ctx, shards, readCount, readBlock)
	if err != nil {
		return err
	}
	d.loop.Success("")
	if len(entries) == 0 {
		return nil
	}
	return d.handle(ctx, entries)
}

// drainHistory finishes what earlier readers of our shards, or we before an error, left unfinished. Shards are looked
// at anew from time to time: a former owner that was frozen in a read may have taken chunks and died.
func (d *drain) drainHistory(ctx context.Context, shards []int) error {
	d.mu.Lock()
	if time.Since(d.lastLook) > recheck && d.flying == 0 {
		d.lastLook = time.Now()
		clear(d.drained)
	}
	for n := range d.drained {
		if !slices.Contains(shards, n) {
			delete(d.drained, n)
		}
	}
	d.mu.Unlock()
	for _, n := range shards {
		for !d.isDrained(n) {
			// What is under way is unfinished too, so it has to land first.
			if err := d.land(ctx); err != nil {
				return err
			}
			d.loop.Doing("finishing what was left")
			entries, err := d.s.st.PendingLogs(ctx, n, 4*readCount)
			if err != nil {
				return err
			}
			if len(entries) == 0 {
				d.mu.Lock()
				d.drained[n] = true
				d.mu.Unlock()
				break
			}
			if err := d.handle(ctx, entries); err != nil {
				return err
			}
			d.loop.Success("")
		}
	}
	return nil
}

func (d *drain) isDrained(n int) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.drained[n]
}

// land waits until no batch is under way and returns what went wrong with them.
func (d *drain) land(ctx context.Context) error {
	d.mu.Lock()
	if d.flying > 0 {
		landed := make(chan struct{})
		d.landed = landed
		d.mu.Unlock()
		select {
		case <-landed:
		case <-ctx.Done():
			return ctx.Err()
		}
	} else {
		d.mu.Unlock()
	}
	return d.takeFailure()
}

func (d *drain) takeFailure() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := d.failed
	d.failed = nil
	return err
}

// handle writes entries and hands them to the sync stage.
func (d *drain) handle(ctx context.Context, entries []store.LogEntry) error {
	b := &batch{s: d.s, logs: map[*attemptLog]struct{}{}, acks: map[int][]string{}}
	err := b.write(ctx, entries)
	if err != nil {
		b.release()
		return err
	}
	d.mu.Lock()
	d.flying++
	d.mu.Unlock()
	for n := range b.acks {
		d.leases.begin(n)
	}
	d.syncs <- b // the sync stage always takes it: it ends only when this channel is closed
	return nil
}

func (d *drain) runSync(ctx context.Context) {
	for b := range d.syncs {
		all := []*batch{b}
		// Whatever waits shares one sync.
		for more := true; more && len(all) < 8; {
			select {
			case next, ok := <-d.syncs:
				if more = ok; ok {
					all = append(all, next)
				}
			default:
				more = false
			}
		}
		err := d.finish(ctx, all)
		d.mu.Lock()
		if err != nil {
			d.failed = err
		}
		d.flying -= len(all)
		if d.flying == 0 && d.landed != nil {
			close(d.landed)
			d.landed = nil
		}
		d.mu.Unlock()
	}
}

// finish syncs batches, writes the states of logs that ended, and acknowledges.
func (d *drain) finish(ctx context.Context, batches []*batch) error {
	defer func() {
		for _, b := range batches {
			for n := range b.acks {
				d.leases.done(n)
			}
			b.release()
		}
	}()
	start := time.Now()
	logs := map[*attemptLog]uint64{}
	for _, b := range batches {
		for a := range b.logs {
			logs[a] = a.syncing()
		}
	}
	if err := syncLogs(d.s.cfg.Dir, logs); err != nil {
		return diskError{fmt.Errorf("sync logs: %w", err)}
	}
	d.s.metrics.syncs.Observe(time.Since(start).Seconds())
	d.s.status.SetReady("disk")
	for _, b := range batches {
		if err := d.s.st.SetLogStates(ctx, b.states()); err != nil {
			return err
		}
		for n, ids := range b.acks {
			if err := d.s.st.AckLogs(ctx, n, ids); err != nil {
				return err
			}
			d.s.metrics.chunks.Add(float64(len(ids)))
		}
	}
	return nil
}

// syncLogs makes logs safe: each by itself when they are few, else the whole file system at once, which costs as much
// as a few files.
func syncLogs(root string, logs map[*attemptLog]uint64) error {
	const few = 4
	var errs []error
	all := len(logs) > few && canSyncFileSystem
	if all {
		errs = append(errs, syncFileSystem(root))
	}
	for a := range logs {
		if !all {
			errs = append(errs, a.sync())
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for a, chunks := range logs {
		errs = append(errs, a.syncDone(chunks))
	}
	return errors.Join(errs...)
}

// watchGaps passes what was waited for long enough, so that readers go on.
func (s *Service) watchGaps(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for _, a := range s.table.overdue() {
			if missing := a.giveUp(); missing > 0 {
				s.metrics.missing.Add(float64(missing))
				s.log.Warn("output of a task never came, its log has a hole", slog.String(logkey.Task, a.key.task),
					slog.Uint64(logkey.Attempt, uint64(a.key.attempt)), slog.Uint64(logkey.Bytes, missing))
			}
			if a.finished() {
				err := s.st.SetLogStates(ctx, []store.LogState{a.state()})
				s.limiter.Warn(ctx, "state", "the state of a log could not be written", err)
			}
			s.table.release(a)
		}
	}
}

// isTooLarge tells the errors that are the chunk's fault from those that are the disk's.
func isTooLarge(err error) bool {
	return errors.Is(err, syscall.EFBIG) || errors.Is(err, syscall.EINVAL)
}
