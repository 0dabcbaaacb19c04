// Package ops is the side door of a service for people and machines that
// operate it: an HTTP server with /healthz, /readyz, /metrics, /statusz and
// /debug/pprof, and the [Status] that the service's loops report to.
//
// Package main of a service builds one [Server] and runs it as an actor beside
// the service; the service itself only sees the Status. Nothing here is
// needed for work to go on, and nothing here may slow it down.
package ops

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/logkey"
)

// shutdownTimeout is how long requests may finish in after Run's context ended.
const shutdownTimeout = 2 * time.Second

// Config says where a Server listens and what it calls itself.
type Config struct {
	Addr    string        // MILLRACE_OPS_ADDR; empty for off
	Token   config.Secret // when set, asked for by everything but /healthz and /readyz
	Service string        // shown on /statusz
	Version string        // shown on /statusz
}

// Deps is what a Server shows.
type Deps struct {
	Logger  *slog.Logger
	Metrics prometheus.Gatherer
	Status  *Status
}

// Server is the ops HTTP server.
type Server struct {
	cfg     Config
	log     *slog.Logger
	status  *Status
	handler http.Handler

	listening chan struct{} // closed when addr is set
	once      sync.Once
	addr      string
}

// New builds a server. It refuses an address that other machines can reach
// when there is no token.
func New(cfg Config, deps Deps) (*Server, error) {
	if err := config.CheckListen(config.Prefix+"OPS_ADDR", cfg.Addr, cfg.Token); err != nil {
		return nil, err
	}
	s := &Server{
		cfg:       cfg,
		log:       deps.Logger,
		status:    deps.Status,
		listening: make(chan struct{}),
	}
	s.handler = s.routes(deps.Metrics)
	return s, nil
}

// Run serves until ctx ends, and returns nil then; running requests get two
// seconds to finish. With an empty address it only waits. Call it once.
func (s *Server) Run(ctx context.Context) error {
	if s.cfg.Addr == "" {
		<-ctx.Done()
		return nil
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", s.cfg.Addr)
	if err != nil {
		return fmt.Errorf("%sOPS_ADDR=%s: cannot listen: %w", config.Prefix, s.cfg.Addr, err)
	}
	s.once.Do(func() {
		s.addr = l.Addr().String()
		close(s.listening)
	})
	s.log.Info("ops server listening", logkey.Addr, s.addr)
	return s.serve(ctx, l)
}

// Addr returns the address that the server listens on. It waits for Run, and
// ends with ctx.
func (s *Server) Addr(ctx context.Context) (string, error) {
	select {
	case <-s.listening:
		return s.addr, nil
	case <-ctx.Done():
		return "", fmt.Errorf("ops server is not listening: %w", context.Cause(ctx))
	}
}

func (s *Server) serve(ctx context.Context, l net.Listener) error {
	srv := &http.Server{
		Handler:           s.handler,
		ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	}
	served := make(chan error, 1) // one value, also when nobody asks
	go func() { served <- srv.Serve(l) }()

	select {
	case err := <-served:
		return fmt.Errorf("ops server: %w", err)
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if err := srv.Shutdown(stop); err != nil {
		// A profile that is still being taken is not worth waiting for.
		_ = srv.Close()
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("ops server: %w", err)
	}
	return nil
}
