package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/agent"
	"github.com/millrace/millrace/dispatcher"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/embedded"
	"github.com/millrace/millrace/internal/ops"
	"github.com/millrace/millrace/internal/proc"
	"github.com/millrace/millrace/internal/store"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// figure is one line of a bench.
type figure struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
	Floor string  `json:"floor,omitempty"` // what is promised on two cores with Redis on them
	Met   bool    `json:"met"`
}

// benchFlags of `millrace bench`.
type benchFlags struct {
	redis              string
	quick, asJSON, aof bool
}

func benchCmd(u *ui) *cobra.Command {
	var f benchFlags
	cmd := &cobra.Command{
		Use: "bench", Short: "Measure throughput, latency, spawning, logs and idle costs", Args: noArgs,
		Long: `Measure this machine with a private Redis, or with an empty Redis of yours (--redis; keys go into a namespace of
their own, which is removed at the end). Everything runs on this machine, with all guarantees on; bounded in count and
time. The floors are for two cores with Redis on them. On a noisy machine run it several times.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return runBench(cmd.Context(), u, f) },
	}
	cmd.Flags().StringVar(&f.redis, "redis", "", "use this Redis instead of a private one")
	cmd.Flags().BoolVar(&f.aof, "aof", false, "the private Redis writes an append-only file, synced every second")
	cmd.Flags().BoolVar(&f.quick, "quick", false, "a third of the counts")
	cmd.Flags().BoolVar(&f.asJSON, "json", false, "print one JSON array")
	return cmd
}

// rig is a whole system in this process, with an agent that counts.
type rig struct {
	st      *store.Store
	d       *dispatcher.Service
	dir     string
	url     string
	ns      string
	ended   chan *millracev1.Result // final results, in order
	started chan time.Time          // when a handler named "mark" began
	quick   bool
}

func runBench(ctx context.Context, u *ui, f benchFlags) error {
	dir, err := os.MkdirTemp("", "millrace-bench-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	url := f.redis
	if url == "" {
		r, err := embedded.Start(ctx, embedded.Options{Dir: filepath.Join(dir, "redis"), Persist: f.aof})
		if err != nil {
			return err
		}
		defer r.Stop()
		if r.InMemory {
			u.say("bench: redis-server is not installed; the in-memory one is several times slower")
		}
		url = r.URL
	}
	if err := proc.BecomeSubreaper(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	var all []figure
	for _, part := range []func(context.Context, *rig) ([]figure, error){benchThroughput, benchLatency, benchCancel, benchSpawn, benchLogs, benchIdle} {
		got, err := withRig(ctx, dir, url, f.quick, part)
		if err != nil {
			return err
		}
		for _, g := range got {
			if !f.asJSON {
				printFigure(u.out, g)
			}
		}
		all = append(all, got...)
	}
	if f.asJSON {
		return u.plainJSON(all)
	}
	return nil
}

func printFigure(w io.Writer, g figure) {
	note := ""
	if g.Floor != "" {
		note = "floor " + g.Floor
		if !g.Met {
			note += "  NOT MET"
		}
	}
	fmt.Fprintf(w, "%-44s %12.2f %-9s %s\n", g.Name, g.Value, g.Unit, note)
}

// withRig runs one part on a fresh namespace.
func withRig(ctx context.Context, dir, url string, quick bool, part func(context.Context, *rig) ([]figure, error)) (out []figure, err error) {
	r := &rig{dir: dir, url: url, quick: quick, ns: fmt.Sprintf("bench-%d", time.Now().UnixNano()), ended: make(chan *millracev1.Result, 1<<16), started: make(chan time.Time, 1024)}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
	r.st, err = store.New(store.Options{URL: url, Namespace: r.ns, Name: "millrace-bench", Readers: 8, Alone: true}, log)
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.st.Close() }()
	if err := r.st.Wait(ctx, 5*time.Second); err != nil {
		return nil, err
	}
	if _, err := r.st.Check(ctx, false); err != nil {
		return nil, err
	}
	h := &host{log: log, store: r.st, registry: prometheus.NewRegistry(), status: ops.NewStatus()}
	var dc dispatcher.Config
	var ac agent.Config
	var lc logsinkConfig
	for _, err := range []error{config.Load(&dc), config.Load(&ac), config.Load(&lc)} {
		if err != nil {
			return nil, err
		}
	}
	dc.HTTPAddr, dc.ControlAddr, dc.AdvertiseAddr = "127.0.0.1:0", "127.0.0.1:0", ""
	ac.StateDir, ac.DrainTimeout, ac.Slots, ac.Queues = filepath.Join(dir, "state"), 0, benchSlots, []string{"default"}
	lc.Config.Dir, lc.Config.Addr = filepath.Join(dir, "logs"), "127.0.0.1:0"
	if r.d, err = buildDispatcher(dc, h); err != nil {
		return nil, err
	}
	sink, err := buildLogsink(lc.Config, dc.Token, h)
	if err != nil {
		return nil, err
	}
	a, err := agent.New(ac, agent.Deps{Store: r.st, Log: log, Status: h.status, NoGuard: true},
		agent.Handle("noop", func(context.Context, *agent.Call) ([]byte, error) { return nil, nil }),
		agent.Handle("mark", func(context.Context, *agent.Call) ([]byte, error) { r.started <- time.Now(); return nil, nil }))
	if err != nil {
		return nil, err
	}
	run, stop := context.WithCancel(ctx)
	var g errgroup.Group
	g.Go(func() error { return r.d.Run(run) })
	g.Go(func() error { return sink.Run(run) })
	g.Go(func() error { return r.st.Tail(run, func() {}, func(x *millracev1.Result) { r.ended <- x }) })
	agentCtx, stopAgent := context.WithCancel(ctx)
	agentDone := make(chan error, 1)
	go func() { agentDone <- a.Run(agentCtx) }() // ends with stopAgent
	err = a.Ready(ctx)
	if err == nil {
		out, err = part(ctx, r)
	}
	stopAgent()
	aerr := <-agentDone
	stop()
	gerr := g.Wait()
	for _, e := range []error{err, aerr, gerr, r.st.Wipe(context.WithoutCancel(ctx))} {
		if e != nil {
			return out, e
		}
	}
	return out, nil
}

// benchSlots of the agent: as many handlers as asynq's best case has, and more processes than cores are never started
// at once because the parts limit them.
const benchSlots = 200

// await takes n results.
func (r *rig) await(ctx context.Context, n int) error {
	for range n {
		select {
		case <-r.ended:
		case <-ctx.Done():
			return fmt.Errorf("bench: %d results did not come: %w", n, ctx.Err())
		}
	}
	return nil
}

func (r *rig) count(n int) int {
	if r.quick {
		return n / 3
	}
	return n
}

// percentile of sorted durations, in ms.
func percentile(d []time.Duration, p float64) float64 {
	slices.Sort(d)
	return float64(d[min(int(float64(len(d))*p), len(d)-1)].Microseconds()) / 1000
}
