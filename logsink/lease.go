package logsink

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/store"
)

// leases keeps the registration and the leases of log shards. Every logsink takes its share of the shards, rounded up,
// and one that has more gives the rest away, so a new one soon has work and a dead one's shards are soon taken.
type leases struct {
	st     *store.Store
	log    *slog.Logger
	id     string
	addr   string
	ttl    time.Duration
	shards int

	mu      sync.Mutex
	until   map[int]time.Time // held shards and how long that is certain
	busy    map[int]int       // shards with batches that are not acknowledged
	leaving map[int]bool      // shards that are given away as soon as they are not busy
	free    map[int]bool      // shards that were nobody's at the last look
	changed chan struct{}     // closed at the next change of until
}

func newLeases(st *store.Store, log *slog.Logger, id, addr string, ttl time.Duration, shards int) *leases {
	return &leases{
		st: st, log: log, id: id, addr: addr, ttl: ttl, shards: shards,
		until: map[int]time.Time{}, busy: map[int]int{},
		leaving: map[int]bool{}, free: map[int]bool{}, changed: make(chan struct{}),
	}
}

func (l *leases) run(ctx context.Context) {
	for tries := 0; ; {
		pause := l.ttl / 4
		if err := l.renew(ctx); err != nil && ctx.Err() == nil {
			l.log.Warn("log shards cannot be leased, trying again", slog.Any(logkey.Err, err), slog.Int(logkey.Try, tries+1))
			tries++
			pause = min(pause, 500*time.Millisecond)
		} else {
			tries = 0
		}
		if len(l.held()) < l.shards {
			pause = min(pause, time.Second) // a shard that becomes free should not wait
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
	}
}

// renew registers, renews what is held, takes what is free up to our share and gives up what is above it.
func (l *leases) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, l.ttl/2)
	defer cancel()
	sent := time.Now()
	if err := l.st.RegisterLogsink(ctx, l.id, l.addr, l.ttl); err != nil {
		return err
	}
	sinks, err := l.st.LogsinkAddrs(ctx)
	if err != nil {
		return err
	}
	// What the first look finds free is taken by the second.
	for range 2 {
		wishes, more := l.wishes(max(len(sinks), 1))
		holders, err := l.st.LeaseLogShards(ctx, l.id, l.ttl, wishes)
		if err != nil {
			return err
		}
		l.update(holders, sent.Add(l.ttl-l.ttl/5))
		if !more {
			break
		}
	}
	return nil
}

// wishes renews what is held up to our share, gives up what is above it, and takes what was free. more says that it
// would have taken more.
func (l *leases) wishes(sinks int) (wishes []store.LeaseWish, more bool) {
	share := (l.shards + sinks - 1) / sinks
	l.mu.Lock()
	defer l.mu.Unlock()
	wishes = make([]store.LeaseWish, l.shards)
	have := 0
	clear(l.leaving)
	for n := range l.shards {
		if _, ok := l.until[n]; !ok {
			continue
		}
		have++
		wishes[n] = store.LeaseTake
		if have > share {
			l.leaving[n] = true
			if l.busy[n] == 0 {
				wishes[n] = store.LeaseDrop
			}
		}
	}
	for n := range l.shards {
		if l.free[n] && have < share {
			wishes[n] = store.LeaseTake
			have++
		}
	}
	return wishes, have < share
}

func (l *leases) update(holders []string, until time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	changed := false
	for n, holder := range holders {
		_, had := l.until[n]
		has := holder == l.id
		l.free[n] = holder == ""
		if has {
			l.until[n] = until
		} else {
			delete(l.until, n)
		}
		if had != has {
			changed = true
			l.log.Info("log shard", slog.Int(logkey.Shard, n), slog.Bool("held", has))
		}
	}
	if changed {
		close(l.changed)
		l.changed = make(chan struct{})
	}
}

// held returns the shards that are certainly ours now.
func (l *leases) held() []int {
	l.mu.Lock()
	defer l.mu.Unlock()
	var shards []int
	for n := range l.shards {
		if until, ok := l.until[n]; ok && !l.leaving[n] && time.Now().Before(until) {
			shards = append(shards, n)
		}
	}
	return shards
}

// holds reports whether the task's log comes through us.
func (l *leases) holds(task string) bool {
	return slices.Contains(l.held(), store.LogShard(task, l.shards))
}

// changes returns a channel that is closed when shards come or go.
func (l *leases) changes() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.changed
}

// begin and done keep a shard from being given away while chunks of it are under way.
func (l *leases) begin(shard int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.busy[shard]++
}

func (l *leases) done(shard int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.busy[shard]--
}

// leave gives everything up, so that others go on at once.
func (l *leases) leave(ctx context.Context) error {
	wishes := make([]store.LeaseWish, l.shards)
	for n := range wishes {
		wishes[n] = store.LeaseDrop
	}
	if _, err := l.st.LeaseLogShards(ctx, l.id, l.ttl, wishes); err != nil {
		return err
	}
	return l.st.UnregisterLogsink(ctx, l.id)
}
