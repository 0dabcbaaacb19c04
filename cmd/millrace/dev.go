package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/agent"
	"github.com/millrace/millrace/dispatcher"
	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/embedded"
	"github.com/millrace/millrace/internal/ops"
	"github.com/millrace/millrace/internal/store"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
	"github.com/millrace/millrace/reaper"
)

// devFlags of `millrace dev`.
type devFlags struct {
	dir, redis, http string
	memory, verbose  bool
}

func devCmd() *cobra.Command {
	var f devFlags
	cmd := &cobra.Command{
		Use: "dev [flags] [-- CMD [ARG…]]", Short: "Run everything in one process, with a Redis of its own",
		Long: `Run dispatcher, agent, reaper and logsink in one process, with a private redis-server or valkey-server when one is
installed, else with one in memory.

With CMD: run it as a task in the current directory, show its output, and exit with its code (see millrace --help).
Without: stay until Ctrl-C, which stops everything within the grace of what runs; a second one stops at once.

MILLRACE_SLOTS, MILLRACE_QUEUES and the other variables of the services work here too.`,
		Example: "  millrace dev -- python3 train.py\n  millrace dev --dir ~/millrace",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 && cmd.ArgsLenAtDash() != 0 {
				return fmt.Errorf("unexpected %q: put the command after --, as in `millrace dev -- %s`", args[0], strings.Join(args, " "))
			}
			u := &ui{in: cmd.InOrStdin(), out: cmd.OutOrStdout(), err: cmd.ErrOrStderr()}
			return runDev(cmd.Context(), u, f, args)
		},
	}
	cmd.Flags().StringVar(&f.dir, "dir", "", "keep Redis' data, logs and state here; a directory that is removed at the end when not given")
	cmd.Flags().StringVar(&f.redis, "redis", "", "use this Redis instead of a private one")
	cmd.Flags().StringVar(&f.http, "http", "", "address of the API (127.0.0.1:8080, or a free port with CMD)")
	cmd.Flags().BoolVar(&f.memory, "memory", false, "take the in-memory Redis although redis-server is installed")
	cmd.Flags().BoolVar(&f.verbose, "verbose", false, "show the services' log with CMD too")
	return cmd
}

// dev is one run of `millrace dev`.
type dev struct {
	*host
	u     *ui
	f     devFlags
	dir   string
	redis *embedded.Server // nil with --redis

	dispatcher *dispatcher.Service
	agent      *agent.Agent
	rest       []runnable
	http       string // address of the API
}

func runDev(ctx context.Context, u *ui, f devFlags, command []string) (err error) {
	d := &dev{host: &host{status: ops.NewStatus(), registry: prometheus.NewRegistry()}, u: u, f: f}
	if d.dir, err = devDir(f.dir); err != nil {
		return err
	}
	cleanup := func() {
		if f.dir == "" {
			_ = os.RemoveAll(d.dir)
		}
	}
	defer cleanup()
	d.signals = watchSignals(func() { cleanup(); os.Exit(codeCancelled) }) // the guard kills what still runs
	defer d.signals.stop()

	url := f.redis
	if url == "" {
		if d.redis, err = embedded.Start(ctx, embedded.Options{Dir: filepath.Join(d.dir, "redis"), Persist: true, InMemory: f.memory}); err != nil {
			return err
		}
		defer d.redis.Stop()
		url = d.redis.URL
	}
	if err := d.build(ctx, url, len(command) > 0); err != nil {
		return err
	}
	defer func() { _ = d.store.Close() }()
	return d.run(ctx, command)
}

// devDir is the directory for data; a temporary one says whose it is, should it ever be left behind.
func devDir(dir string) (string, error) {
	if dir != "" {
		abs, err := filepath.Abs(dir)
		if err == nil {
			err = os.MkdirAll(abs, 0o755)
		}
		if err != nil {
			return "", fmt.Errorf("--dir: %w", err)
		}
		lock, err := os.OpenFile(filepath.Join(abs, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return "", fmt.Errorf("--dir: %w", err)
		}
		// Held until the process ends.
		if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			return "", fmt.Errorf("--dir %s is used by another millrace dev: stop that one, or choose another directory", dir)
		}
		heldForLife = append(heldForLife, lock)
		return abs, nil
	}
	tmp, err := os.MkdirTemp("", "millrace-dev-")
	if err != nil {
		return "", fmt.Errorf("temporary directory: %w: choose one with --dir", err)
	}
	return tmp, nil
}

// heldForLife keeps files, and the locks on them, from being collected before the process ends.
var heldForLife []*os.File

func (d *dev) build(ctx context.Context, url string, quiet bool) error {
	var dc dispatcher.Config
	var ac agent.Config
	var rc reaper.Config
	var lc logsinkConfig
	if err := errors.Join(config.Load(&dc), config.Load(&ac), config.Load(&rc), config.Load(&lc)); err != nil {
		return err
	}
	logs := dc.Log
	if quiet && !d.f.verbose {
		logs.Level = slog.LevelError
	}
	d.log = logs.NewLogger(d.u.err)
	var err error
	d.store, err = store.New(store.Options{URL: url, Namespace: dc.Namespace, Name: "millrace-dev", Readers: 8, Embedded: d.redis != nil && d.redis.InMemory, Alone: d.redis != nil}, d.log)
	if err != nil {
		return err
	}
	if err := d.store.Wait(ctx, 10*time.Second); err != nil {
		return err
	}
	if _, err := d.store.Check(ctx, false); err != nil {
		return err
	}
	dc.ControlAddr, dc.AdvertiseAddr = "127.0.0.1:0", ""
	switch {
	case d.f.http != "":
		dc.HTTPAddr = d.f.http
	case quiet:
		dc.HTTPAddr = "127.0.0.1:0"
	}
	if err := dc.Validate(); err != nil {
		return err
	}
	lc.Config.Dir, lc.Config.Addr, lc.Config.Advertise = filepath.Join(d.dir, "logs"), "127.0.0.1:0", ""
	ac.StateDir, ac.DrainTimeout = filepath.Join(d.dir, "state"), 0
	if d.dispatcher, err = buildDispatcher(dc, d.host); err != nil {
		return err
	}
	if d.agent, err = buildAgent(ac, d.host); err != nil {
		return err
	}
	r, err := buildReaper(rc, d.host)
	if err != nil {
		return err
	}
	l, err := buildLogsink(lc.Config, dc.Token, d.host)
	if err != nil {
		return err
	}
	d.rest = []runnable{d.dispatcher, r, l}
	return nil
}

// run starts everything, and stops it in order: the agent first, so that the others can take its last words.
func (d *dev) run(ctx context.Context, command []string) error {
	rest, stopRest := context.WithCancel(context.WithoutCancel(ctx))
	defer stopRest()
	g, gctx := errgroup.WithContext(rest)
	for _, s := range d.rest {
		g.Go(func() error { return s.Run(gctx) })
	}
	agentCtx, stopAgent := context.WithCancel(context.WithoutCancel(ctx))
	defer stopAgent()
	agentEnd := make(chan error, 1)
	go func() { agentEnd <- d.agent.Run(agentCtx) }() // ends with stopAgent

	err := d.serve(gctx, command, agentEnd)
	stopAgent()
	aerr := <-agentEnd
	stopRest()
	gerr := g.Wait()
	exit := &exitError{}
	if errors.As(err, &exit) {
		return err
	}
	return errors.Join(err, aerr, gerr)
}

// serve lasts as long as there is something to do: the command, or until somebody stops us or a service fails.
func (d *dev) serve(ctx context.Context, command []string, agentEnd chan error) error {
	addr, _, err := d.dispatcher.Addrs(ctx)
	if err != nil {
		return nil //nolint:nilerr // a service failed to start and tells why itself
	}
	d.http = "http://" + addr
	if len(command) > 0 {
		return d.command(ctx, command)
	}
	d.banner()
	select {
	case <-d.signals.first:
		d.u.say("stopping; once more stops at once")
	case <-ctx.Done():
	case err := <-agentEnd:
		agentEnd <- err
	}
	return nil
}

func (d *dev) command(ctx context.Context, argv []string) error {
	if d.redis != nil && d.redis.InMemory {
		d.u.say("dev: Redis is in memory, nothing is kept (install redis-server to change that)")
	}
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	c, err := client.New(client.Config{Server: d.http, Token: config.Secret(os.Getenv("MILLRACE_TOKEN")), Notify: func(line string) { d.u.say("%s", line) }})
	if err != nil {
		return err
	}
	defer c.Close()
	t := &millracev1.Task{Queue: d.agent.Queues()[0], Work: &millracev1.Task_Command{Command: &millracev1.Command{Argv: argv, Dir: dir}}}
	if err := d.agent.Ready(ctx); err != nil {
		return nil //nolint:nilerr // a service failed and tells why itself
	}
	return d.u.runTask(ctx, c, t, false, false)
}

func (d *dev) banner() {
	where := d.f.redis
	switch {
	case d.redis == nil:
		where = config.RedactURL(where)
	case d.redis.InMemory:
		where = "in memory at " + d.redis.Addr + " — DATA IS LOST AT EXIT (install redis-server to keep it)"
	case d.f.dir == "":
		where = d.redis.Program + " at " + d.redis.Addr + ", removed at exit (keep it with --dir)"
	default:
		where = d.redis.Program + " at " + d.redis.Addr + ", data in " + d.dir
	}
	server := ""
	if d.http != "http://127.0.0.1:8080" {
		server = "MILLRACE_SERVER=" + d.http + " "
	}
	fmt.Fprintf(d.u.out, `millrace dev is up
  API    %s
  Redis  %s

Try, in another terminal:
  %smillrace run -- echo hello
  %smillrace ps
`, d.http, where, server, server)
	if d.redis != nil {
		_, port, _ := strings.Cut(d.redis.Addr, ":")
		fmt.Fprintf(d.u.out, "  redis-cli -p %s XADD tasks '*' json '{\"command\":{\"argv\":[\"echo\",\"hi\"]}}'\n", port)
	} else {
		fmt.Fprintf(d.u.out, "  %smillrace workers\n", server)
	}
	fmt.Fprintln(d.u.out, "\nCtrl-C stops it.")
}
