package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	oklog "github.com/oklog/run"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"

	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/guard"
	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/ops"
	"github.com/millrace/millrace/internal/store"
)

// guardLink is this process' line to its guard; nil for verbs that have none.
var guardLink *guard.Link

// runGuard makes this process the guard when it was started as an agent, and returns only in the agent itself.
func runGuard() {
	if len(os.Args) < 2 || (os.Args[1] != "agent" && os.Args[1] != "dev") || asksForHelp(os.Args[2:]) {
		return
	}
	code, link, err := guard.Supervise(guard.Options{})
	if link == nil {
		if err != nil {
			fmt.Fprintln(os.Stderr, "millrace: guard:", err)
		}
		os.Exit(code)
	}
	guardLink = link
}

func asksForHelp(args []string) bool {
	for _, a := range args {
		if a == "--" {
			return false
		}
		if a == "-h" || a == "--help" {
			return true
		}
	}
	return false
}

// shared are the parts of a service's configuration that all have.
type shared struct {
	config.Redis
	config.Auth
	config.Ops
	config.Log
}

// host is what a service runs on.
type host struct {
	log      *slog.Logger
	store    *store.Store
	registry *prometheus.Registry
	status   *ops.Status
	signals  *signals
}

// runnable is a service.
type runnable interface {
	Run(ctx context.Context) error
}

// serviceCmd is a verb that runs one service, configured by the environment only.
//
//	signals ──▶ interrupt ──▶ ctx of ops and service ends ──▶ each Run returns when all it started has ended ──▶ Redis is closed
func serviceCmd[C any](name, short string, common func(*C) shared, build func(*C, *host) (runnable, error)) *cobra.Command {
	cmd := &cobra.Command{
		Use: name, Short: short, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var cfg C
			if err := config.Load(&cfg); err != nil {
				return err
			}
			return runService(cmd.Context(), name, common(&cfg), cmd.ErrOrStderr(), func(h *host) (runnable, error) { return build(&cfg, h) })
		},
	}
	cmd.SetHelpFunc(func(cmd *cobra.Command, _ []string) {
		fmt.Fprintf(cmd.OutOrStdout(), "%s\n\nIt is configured by the environment only:\n\n", short)
		_ = config.Help(cmd.OutOrStdout(), new(C))
	})
	return cmd
}

func runService(ctx context.Context, name string, c shared, errOut io.Writer, build func(*host) (runnable, error)) error {
	tuneMemory()
	h := &host{log: c.NewLogger(errOut), registry: prometheus.NewRegistry(), status: ops.NewStatus(), signals: watchSignals(nil)}
	defer h.signals.stop()
	h.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	st, err := openStore(ctx, name, c, h)
	if err != nil {
		if h.signals.seen() {
			return nil
		}
		return err
	}
	defer func() { _ = st.Close() }()
	h.store = st
	svc, err := build(h)
	if err != nil {
		return err
	}
	o, err := ops.New(ops.Config{Addr: c.Ops.Addr, Token: c.Token, Service: name, Version: buildVersion()},
		ops.Deps{Logger: h.log, Metrics: h.registry, Status: h.status})
	if err != nil {
		return err
	}
	var g oklog.Group
	addActor(ctx, &g, svc)
	addActor(ctx, &g, o)
	quit := make(chan struct{})
	g.Add(func() error {
		select {
		case <-h.signals.first:
			return errSignalled
		case <-quit:
			return nil
		}
	}, func(error) { close(quit) })
	if err := g.Run(); err != nil && !errors.Is(err, errSignalled) {
		return err
	}
	return nil
}

// errSignalled ends the group when somebody asked us to stop.
var errSignalled = errors.New("signalled")

// addActor runs a service until it ends or the group is interrupted; the interrupt only cancels.
func addActor(parent context.Context, g *oklog.Group, r runnable) {
	ctx, cancel := context.WithCancelCause(parent)
	g.Add(func() error { return r.Run(ctx) }, func(err error) { cancel(err) })
}

// openStore connects, waits for Redis as long as configured, and checks its settings.
func openStore(ctx context.Context, name string, c shared, h *host) (*store.Store, error) {
	st, err := store.New(store.Options{URL: c.URL, Namespace: c.Namespace, Name: "millrace-" + name, Readers: 4}, h.log)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(h.signals.ctx, cancel)
	defer stop()
	err = st.Wait(ctx, c.WaitRedis)
	if err == nil {
		var warnings []string
		warnings, err = st.Check(ctx, c.Strict)
		for _, w := range warnings {
			h.log.Warn("redis can lose tasks as it is set", logkey.Reason, w)
		}
	}
	if err != nil {
		_ = st.Close()
		return nil, err
	}
	return st, nil
}

// signals counts INT and TERM: the first one asks to stop, the second to hurry, the third ends the process.
type signals struct {
	first, hurry chan struct{}
	ctx          context.Context //nolint:containedctx // it is a signal, as the channels are: it ends with the first
	cancel       context.CancelFunc
	ch           chan os.Signal
	quit         chan struct{}
}

// watchSignals counts from now on. atSecond, when given, replaces the hurry.
func watchSignals(atSecond func()) *signals {
	s := &signals{first: make(chan struct{}), hurry: make(chan struct{}), ch: make(chan os.Signal, 4), quit: make(chan struct{})}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	signal.Notify(s.ch, os.Interrupt, syscall.SIGTERM)
	go func() { // ends with stop
		for n := 1; ; n++ {
			select {
			case <-s.quit:
				return
			case <-s.ch:
			}
			switch n {
			case 1:
				close(s.first)
				s.cancel()
			case 2:
				if atSecond != nil {
					atSecond()
				}
				close(s.hurry)
			default:
				os.Exit(codeCancelled) // the guard kills what still runs
			}
		}
	}()
	return s
}

func (s *signals) stop() {
	signal.Stop(s.ch)
	close(s.quit)
	s.cancel()
}

func (s *signals) seen() bool { return s.ctx.Err() != nil }

// tuneMemory keeps an idle service small without slowing a busy one: the collector runs more often only while there
// is little to collect.
func tuneMemory() {
	if os.Getenv("GOGC") == "" && os.Getenv("GOMEMLIMIT") == "" {
		debug.SetGCPercent(75)
	}
}
