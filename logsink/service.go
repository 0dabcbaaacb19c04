// Package logsink drains the log streams into files and serves them to readers.
//
// Chunks are written at their offset, synced in batches, and only then acknowledged and deleted from the stream, so
// that a sink may die anywhere and its successor goes on without a gap or a repeat. Dispatchers read over HTTP; nobody
// else talks to a logsink. The package never decides anything about tasks.
package logsink

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/ops"
	"github.com/millrace/millrace/internal/store"
)

// Service is one logsink.
type Service struct {
	cfg     Config
	st      *store.Store
	log     *slog.Logger
	limiter *logkey.Limiter
	metrics *metrics
	status  *ops.Status
	table   *table
	id      string

	listening chan struct{} // closed once addr is set
	addr      string
	leases    atomic.Pointer[leases] // set while Run drains
}

// New checks cfg. It starts nothing and touches neither disk nor network.
func New(cfg Config, deps Deps) (*Service, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if deps.Store == nil {
		return nil, errors.New("logsink needs a store")
	}
	log := deps.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	status := deps.Status
	if status == nil {
		status = ops.NewStatus()
	}
	host, _ := os.Hostname() // only to tell sinks apart in logs
	return &Service{
		cfg: cfg, st: deps.Store, log: log, limiter: logkey.NewLimiter(log), metrics: newMetrics(deps.Registerer),
		status: status, table: newTable(cfg.Dir, cfg.OpenLogs), id: host + "-" + rand.Text()[:12],
		listening: make(chan struct{}),
	}, nil
}

// Run drains and serves until ctx ends. What was read by then is written, synced and acknowledged first.
func (s *Service) Run(ctx context.Context) error {
	if err := os.MkdirAll(s.cfg.Dir, 0o750); err != nil {
		return fmt.Errorf("make the log directory: %w: set MILLRACE_LOG_DIR to a directory that can be written", err)
	}
	ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", s.cfg.Addr)
	if err != nil {
		return fmt.Errorf("listen for log readers on %s: %w: set MILLRACE_LOGSINK_ADDR to a free address", s.cfg.Addr, err)
	}
	s.addr = s.advertised(ln.Addr().String())
	close(s.listening)

	stopServing := s.serve(ln)
	defer stopServing()
	shards, err := s.shards(ctx)
	if err != nil {
		return err
	}
	if shards == 0 {
		return nil // stopped while Redis could not be reached
	}
	s.log.Info("logsink is running", slog.String(logkey.Addr, s.addr), slog.String(logkey.Path, s.cfg.Dir), slog.Int("shards", shards))

	leases := newLeases(s.st, s.log, s.id, s.addr, s.cfg.LeaseTTL, shards)
	s.leases.Store(leases)
	var background sync.WaitGroup
	bctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	background.Go(func() { leases.run(bctx) })
	background.Go(func() { s.retain(ctx) })
	background.Go(func() { s.watchGaps(ctx) })
	newDrain(s, leases).run(ctx)
	stop()
	background.Wait()

	// Redis may be gone; then the leases end by themselves.
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if err := leases.leave(last); err != nil {
		s.log.Warn("log shards could not be given up, another logsink takes them later",
			slog.Any(logkey.Err, err), slog.Duration(logkey.After, s.cfg.LeaseTTL))
	}
	stopServing()
	return s.table.closeAll()
}

// shards asks for the number of log shards until Redis answers; 0 when ctx ended first.
func (s *Service) shards(ctx context.Context) (int, error) {
	for tries := 0; ; tries++ {
		n, err := s.st.LogShards(ctx)
		if err == nil {
			return n, nil
		}
		if ctx.Err() != nil {
			return 0, nil
		}
		if errors.Unwrap(err) == nil {
			return 0, err // the setting itself is wrong
		}
		s.limiter.Warn(ctx, "shards", "waiting for redis", err)
		if !store.Backoff(ctx, tries) {
			return 0, nil
		}
	}
}

// Addr returns the address that readers use, once Run listens on it.
func (s *Service) Addr(ctx context.Context) (string, error) {
	select {
	case <-s.listening:
		return s.addr, nil
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

// advertised is what dispatchers are told: the configured address, with the port listened on where it has none or 0.
func (s *Service) advertised(listening string) string {
	_, port, err := net.SplitHostPort(listening)
	if err != nil || s.cfg.Advertise == "" {
		return withHost(listening)
	}
	host, p, err := net.SplitHostPort(s.cfg.Advertise)
	if err != nil {
		return net.JoinHostPort(s.cfg.Advertise, port)
	}
	if p == "0" || p == "" {
		p = port
	}
	return net.JoinHostPort(host, p)
}

// withHost replaces an address that means every interface by our host name: others cannot dial it.
func withHost(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return addr
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		if name, err := os.Hostname(); err == nil {
			return net.JoinHostPort(name, port)
		}
	}
	return addr
}

// serve starts the HTTP server and returns what stops it; that may be called twice.
func (s *Service) serve(ln net.Listener) func() {
	ctx, cancel := context.WithCancel(context.Background())
	srv := &http.Server{
		Handler:           s.handler(),
		ReadHeaderTimeout: 10 * time.Second,
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			s.log.Error("log readers cannot be served any more", slog.Any(logkey.Err, err))
		}
	})
	return func() {
		cancel() // ends those that follow
		grace, stop := context.WithTimeout(context.Background(), time.Second)
		defer stop()
		if srv.Shutdown(grace) != nil {
			_ = srv.Close()
		}
		wg.Wait()
	}
}
