// Package dispatcher admits tasks, routes them to lanes, makes delayed ones due, cancels, and keeps the control
// connections to agents. Any number may run; none holds state that Redis does not.
//
// It is used by cmd and by programs that embed it. It never runs tasks and never decides that a worker is dead.
package dispatcher

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/control"
	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/ops"
	"github.com/millrace/millrace/internal/spec"
	"github.com/millrace/millrace/internal/store"
)

// Deps of a Service.
type Deps struct {
	Store    *store.Store
	Log      *slog.Logger
	Registry prometheus.Registerer
	Status   *ops.Status
	// API builds what the HTTP address serves; nil for nothing. It gets the service as admitter and canceller.
	API func(*Service) (API, error)
}

// API is what a dispatcher serves on its HTTP address.
type API interface {
	Handler() http.Handler
	// Run blocks until ctx ends.
	Run(ctx context.Context) error
}

// Service is one dispatcher.
type Service struct {
	cfg    Config
	id     string
	st     *store.Store
	log    *slog.Logger
	errs   *logkey.Limiter
	met    *metrics
	status *ops.Status
	ctl    *control.Server
	api    API
	limits spec.Limits

	full    atomic.Pointer[string] // why nothing is admitted now
	wake    chan struct{}          // something is due now
	renews  chan renewal
	vouches vouches

	mu       sync.Mutex
	httpAddr string
	ctlAddr  string
	ready    chan struct{} // closed when both addresses are known
}

// New checks the configuration and builds a dispatcher. It starts nothing.
func New(cfg Config, deps Deps) (*Service, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if deps.Log == nil {
		deps.Log = slog.New(slog.DiscardHandler)
	}
	if deps.Status == nil {
		deps.Status = ops.NewStatus()
	}
	s := &Service{
		cfg: cfg, id: newID(), st: deps.Store, status: deps.Status, met: newMetrics(deps.Registry),
		limits: spec.Limits{TaskBytes: cfg.TaskLimit}, wake: make(chan struct{}, 1),
		renews: make(chan renewal, maxRenewals), vouches: vouches{zero: time.Now()}, ready: make(chan struct{}),
	}
	s.log = deps.Log.With(logkey.Component, "dispatcher")
	s.errs = logkey.NewLimiter(s.log)
	ctl, err := control.NewServer(control.ServerConfig{
		DispatcherID: s.id, Token: []byte(cfg.Token.Reveal()),
		HeartbeatInterval: cfg.HeartbeatInterval,
	}, s, control.Deps{Log: s.log, Registry: deps.Registry})
	if err != nil {
		return nil, err
	}
	s.ctl = ctl
	if deps.API != nil {
		if s.api, err = deps.API(s); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// newID names this incarnation; it is never used again.
func newID() string {
	host, err := os.Hostname()
	if err != nil || !control.ValidID(host) {
		host = "dispatcher"
	}
	var b [5]byte
	_, _ = rand.Read(b[:])
	return host + "-" + hex.EncodeToString(b[:])
}

// ID of this incarnation.
func (s *Service) ID() string { return s.id }

// Addrs waits until the dispatcher listens and returns the addresses of the API and of the control channel.
func (s *Service) Addrs(ctx context.Context) (httpAddr, controlAddr string, err error) {
	select {
	case <-ctx.Done():
		return "", "", ctx.Err()
	case <-s.ready:
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.httpAddr, s.ctlAddr, nil
}

// Run works until ctx ends and returns after everything that it started has ended.
func (s *Service) Run(ctx context.Context) error {
	var lc net.ListenConfig
	ctlLn, err := lc.Listen(ctx, "tcp", s.cfg.ControlAddr)
	if err != nil {
		return fmt.Errorf("listen for agents on %sCONTROL_ADDR=%s: %w", "MILLRACE_", s.cfg.ControlAddr, err)
	}
	var httpLn net.Listener
	if s.api != nil {
		if httpLn, err = lc.Listen(ctx, "tcp", s.cfg.HTTPAddr); err != nil {
			_ = ctlLn.Close()
			return fmt.Errorf("listen for the API on %sHTTP_ADDR=%s: %w", "MILLRACE_", s.cfg.HTTPAddr, err)
		}
	}
	s.listening(ctlLn, httpLn)
	s.log.Info("dispatcher started", logkey.Dispatcher, s.id, "http", s.httpAddr, "control", s.ctlAddr)

	g, gctx := errgroup.WithContext(ctx)
	// A loop that ends before its context is a fault of the whole dispatcher: it must not go on half alive.
	loop := func(name string, run func(context.Context, *ops.Loop)) {
		g.Go(func() error {
			run(gctx, s.status.Loop("dispatcher."+name))
			if gctx.Err() == nil {
				return fmt.Errorf("dispatcher loop %s ended", name)
			}
			return nil
		})
	}
	g.Go(func() error { return s.ctl.Serve(gctx, ctlLn) })
	if httpLn != nil {
		g.Go(func() error { return s.serveHTTP(gctx, httpLn) })
		g.Go(func() error { return s.api.Run(gctx) })
	}
	loop("register", s.register)
	loop("intake", s.intake)
	loop("promote", s.promote)
	loop("bell", s.bell)
	loop("hints", s.hints)
	loop("renew", s.renewLoop)
	loop("janitor", s.janitor)
	err = g.Wait()
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if uerr := s.st.UnregisterDispatcher(last, s.id); uerr != nil {
		s.log.Info("registration could not be removed; it ends by itself", logkey.Err, uerr)
	}
	s.log.Info("dispatcher stopped", logkey.Dispatcher, s.id)
	if ctx.Err() != nil && (err == nil || errors.Is(err, context.Canceled)) {
		return nil
	}
	return err
}

func (s *Service) listening(ctl, api net.Listener) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ctlAddr = ctl.Addr().String()
	if api != nil {
		s.httpAddr = api.Addr().String()
	}
	close(s.ready)
}

// advertise is the address that agents dial: as configured, or the listener's with the host name for a wildcard.
func (s *Service) advertise() string {
	host, port, _ := net.SplitHostPort(s.ctlAddr)
	if s.cfg.AdvertiseAddr != "" {
		h, p, err := net.SplitHostPort(s.cfg.AdvertiseAddr)
		if err != nil {
			h, p = s.cfg.AdvertiseAddr, port
		}
		if p == "0" || p == "" {
			p = port
		}
		return net.JoinHostPort(h, p)
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		if name, err := os.Hostname(); err == nil {
			host = name
		}
	}
	return net.JoinHostPort(host, port)
}

func (s *Service) serveHTTP(ctx context.Context, ln net.Listener) error {
	// No WriteTimeout: waits and logs stream for as long as the caller listens; the API bounds each wait itself.
	srv := &http.Server{
		Handler: s.api.Handler(), ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 2 * time.Minute,
		MaxHeaderBytes: 64 << 10, BaseContext: func(net.Listener) context.Context { return ctx },
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	srv.Protocols = new(http.Protocols)
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetUnencryptedHTTP2(true)
	done := make(chan error, 1)
	go func() { done <- srv.Serve(ln) }() // ends with Shutdown or Close below
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if srv.Shutdown(last) != nil {
		_ = srv.Close()
	}
	if err := <-done; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
