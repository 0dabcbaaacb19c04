package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"github.com/millrace/millrace/internal/spec"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func encodeTask(t *millracev1.Task) []byte {
	b, err := proto.Marshal(t)
	if err != nil {
		panic(err) // built here, of valid strings
	}
	return b
}

func handlerTask(name string, payload int) []byte {
	return encodeTask(&millracev1.Task{Work: &millracev1.Task_Call{Call: &millracev1.Call{Handler: name, Payload: bytes.Repeat([]byte("x"), payload)}}})
}

func commandTask(id string, argv ...string) *millracev1.Task {
	return &millracev1.Task{Id: id, Work: &millracev1.Task_Command{Command: &millracev1.Command{Argv: argv}}}
}

// benchThroughput: no-op handler tasks of 200 bytes, produced and consumed at once, records kept.
func benchThroughput(ctx context.Context, r *rig) ([]figure, error) {
	n := r.count(30000)
	if err := r.produce(ctx, 300, 1); err != nil { // the first ones pay for scripts and connections
		return nil, err
	}
	if err := r.await(ctx, 300); err != nil {
		return nil, err
	}
	before, err := r.st.CommandStats(ctx)
	if err != nil {
		return nil, err
	}
	begun := time.Now()
	var g errgroup.Group
	g.Go(func() error { return r.produce(ctx, n, 4) })
	err = errors.Join(r.await(ctx, n), g.Wait())
	if err != nil {
		return nil, err
	}
	rate := float64(n) / time.Since(begun).Seconds()
	after, err := r.st.CommandStats(ctx)
	if err != nil {
		return nil, err
	}
	return []figure{
		{"no-op tasks, produce and consume", rate, "tasks/s", "≥ 8000", rate >= 8000},
		{"  Redis commands a task, with those in scripts", float64(after.Calls-before.Calls) / float64(n), "", "", true},
		{"  Redis CPU a task", (after.CPU - before.CPU).Seconds() * 1e6 / float64(n), "µs", "", true},
	}, nil
}

// produce adds tasks in pipelines of 128 from several goroutines.
func (r *rig) produce(ctx context.Context, n, producers int) error {
	one := handlerTask("noop", 200)
	var g errgroup.Group
	for p := range producers {
		share := n / producers
		if p == 0 {
			share += n % producers
		}
		g.Go(func() error {
			for share > 0 {
				batch := min(share, 128)
				tasks := make([][]byte, batch)
				for i := range tasks {
					tasks[i] = one
				}
				if err := r.st.AddTasks(ctx, tasks); err != nil {
					return err
				}
				share -= batch
			}
			return nil
		})
	}
	return g.Wait()
}

// benchLatency: from just before the XADD to the first line of the handler, one task at a time on an idle system.
func benchLatency(ctx context.Context, r *rig) ([]figure, error) {
	one := handlerTask("mark", 200)
	var took []time.Duration
	for i := range r.count(300) + 20 {
		time.Sleep(20 * time.Millisecond) //nolint:forbidigo // the gap is what is measured: an idle system
		begun := time.Now()
		if err := r.st.AddTasks(ctx, [][]byte{one}); err != nil {
			return nil, err
		}
		select {
		case at := <-r.started:
			if i >= 20 { // the first ones warm up
				took = append(took, at.Sub(begun))
			}
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	p50, p99 := percentile(took, 0.5), percentile(took, 0.99)
	return []figure{{"submit to start, idle, p50", p50, "ms", "≤ 2", p50 <= 2}, {"submit to start, idle, p99", p99, "ms", "≤ 10", p99 <= 10}}, nil
}

// benchCancel: from just before the cancel to the moment at which the process notes its SIGTERM.
func benchCancel(ctx context.Context, r *rig) ([]figure, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	var took []time.Duration
	for i := range r.count(60) {
		file := filepath.Join(r.dir, fmt.Sprintf("term-%d", i))
		id := spec.NewID(time.Now())
		if _, _, err := r.d.Admit(ctx, commandTask(id, self, termVerb, file)); err != nil {
			return nil, err
		}
		if err := awaitFile(ctx, file+".ready"); err != nil {
			return nil, err
		}
		begun := time.Now()
		if _, err := r.d.Cancel(ctx, task.ID(id)); err != nil {
			return nil, err
		}
		if err := r.await(ctx, 1); err != nil {
			return nil, err
		}
		raw, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		at, err := strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64)
		if err != nil {
			return nil, err
		}
		took = append(took, time.Unix(0, at).Sub(begun))
	}
	p50 := percentile(took, 0.5)
	return []figure{{"cancel to SIGTERM, p50", p50, "ms", "≤ 5", p50 <= 5}, {"cancel to SIGTERM, p99", percentile(took, 0.99), "ms", "", true}}, nil
}

// termVerb is a hidden verb: a process that notes when it gets SIGTERM.
const termVerb = "bench-term"

func benchTermCmd() *cobra.Command {
	return &cobra.Command{Use: termVerb, Hidden: true, Args: cobra.ExactArgs(1), RunE: func(_ *cobra.Command, args []string) error {
		ch := make(chan os.Signal, 1)
		signal.Notify(ch, syscall.SIGTERM)
		if err := os.WriteFile(args[0]+".ready", nil, 0o600); err != nil {
			return err
		}
		<-ch
		return os.WriteFile(args[0], []byte(strconv.FormatInt(time.Now().UnixNano(), 10)), 0o600)
	}}
}

func awaitFile(ctx context.Context, path string) error {
	t := time.NewTicker(time.Millisecond)
	defer t.Stop()
	for {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
}

// benchSpawn: /bin/true through the whole system against os/exec with pipes, two at a time, in turns.
func benchSpawn(ctx context.Context, r *rig) ([]figure, error) {
	const parallel, rounds = 2, 3
	n := r.count(300)
	var ours, bare []float64
	for range rounds {
		begun := time.Now()
		if err := bareSpawns(ctx, n, parallel); err != nil {
			return nil, err
		}
		bare = append(bare, float64(n)/time.Since(begun).Seconds())
		begun = time.Now()
		if err := r.spawns(ctx, n, parallel); err != nil {
			return nil, err
		}
		ours = append(ours, float64(n)/time.Since(begun).Seconds())
	}
	o, b := median(ours), median(bare)
	return []figure{
		{"spawn /bin/true through the system", o, "tasks/s", "", true},
		{"  bare os/exec with pipes", b, "proc/s", "", true},
		{"  ratio", o / b, "", "≥ 0.75", o/b >= 0.75},
	}, nil
}

// spawns keeps `parallel` tasks in flight.
func (r *rig) spawns(ctx context.Context, n, parallel int) error {
	raw := encodeTask(commandTask("", "/bin/true"))
	sent := 0
	add := func(k int) error {
		k = min(k, n-sent)
		if k <= 0 {
			return nil
		}
		sent += k
		batch := make([][]byte, k)
		for i := range batch {
			batch[i] = raw
		}
		return r.st.AddTasks(ctx, batch)
	}
	if err := add(2 * parallel); err != nil { // one more each, so that the next is there when one ends
		return err
	}
	for range n {
		if err := r.await(ctx, 1); err != nil {
			return err
		}
		if err := add(1); err != nil {
			return err
		}
	}
	return nil
}

func bareSpawns(ctx context.Context, n, parallel int) error {
	var g errgroup.Group
	g.SetLimit(parallel)
	for range n {
		g.Go(func() error {
			cmd := exec.CommandContext(ctx, "/bin/true")
			var out, errOut bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &errOut
			return cmd.Run()
		})
	}
	return g.Wait()
}

// benchLogs: bytes that a process writes, through Redis, into a file.
func benchLogs(ctx context.Context, r *rig) ([]figure, error) {
	size := int64(r.count(240)) << 20
	src := filepath.Join(r.dir, "source")
	if err := writeLog(src, size); err != nil {
		return nil, err
	}
	t := commandTask(spec.NewID(time.Now()), "cat", src)
	t.Log = &millracev1.LogOptions{LimitBytes: uint64(2 * size)}
	begun := time.Now()
	if _, _, err := r.d.Admit(ctx, t); err != nil {
		return nil, err
	}
	for {
		view, err := r.st.LogView(ctx, t.GetId(), 1)
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return nil, err
		}
		if view.GetComplete() {
			break
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
	rate := float64(size) / 1e6 / time.Since(begun).Seconds()
	return []figure{{"log path, process to file", rate, "MB/s", "≥ 100", rate >= 100}}, nil
}

// writeLog makes text like a training's.
func writeLog(path string, size int64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	var block bytes.Buffer
	for i := 0; block.Len() < 1<<20; i++ {
		fmt.Fprintf(&block, "episode %7d  reward %9.4f  loss %.6f  epsilon %.4f  steps %5d\n", i, float64(i%977)/31, 1/float64(i+1), 0.99/float64(i%53+1), i*37%501)
	}
	for n := int64(0); n < size; n += int64(block.Len()) {
		if _, err := f.Write(block.Bytes()[:min(int64(block.Len()), size-n)]); err != nil {
			return errors.Join(err, f.Close())
		}
	}
	return f.Close()
}

// benchIdle: what an agent, the real program with its guard, costs while it has nothing to do.
func benchIdle(ctx context.Context, r *rig) ([]figure, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self, "agent")
	cmd.Env = append(os.Environ(), "MILLRACE_REDIS_URL="+r.url, "MILLRACE_NAMESPACE="+r.ns, "MILLRACE_STATE_DIR="+filepath.Join(r.dir, "idle"),
		"MILLRACE_AGENT_NAME=idle", "MILLRACE_LOG_LEVEL=error")
	cmd.Stdout, cmd.Stderr = io.Discard, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	defer func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	}()
	settle, span := 6*time.Second, 10*time.Second
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(settle):
	}
	guardPID := cmd.Process.Pid
	agentPID, err := onlyChild(guardPID)
	if err != nil {
		return nil, err
	}
	before := cpuOf(guardPID) + cpuOf(agentPID)
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(span):
	}
	share := 100 * (cpuOf(guardPID) + cpuOf(agentPID) - before).Seconds() / span.Seconds()
	rss, guard := rssOf(agentPID), rssOf(guardPID)
	return []figure{
		{"idle agent, RSS", rss, "MiB", "≤ 25", rss <= 25},
		{"  its guard, RSS", guard, "MiB", "", true},
		{"idle agent and guard, CPU of a core", share, "%", "< 0.5", share < 0.5},
	}, nil
}

func onlyChild(pid int) (int, error) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if fields := strings.Fields(string(raw)); err == nil && len(fields) > 0 {
			return strconv.Atoi(fields[0])
		}
	}
	return 0, errors.New("bench: the agent has not started")
}

// cpuOf is the CPU time of a process so far, at the resolution of the scheduler.
func cpuOf(pid int) time.Duration {
	var total time.Duration
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if fields := strings.Fields(string(raw)); err == nil && len(fields) > 0 {
			ns, _ := strconv.ParseInt(fields[0], 10, 64)
			total += time.Duration(ns)
		}
	}
	return total
}

func rssOf(pid int) float64 {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	fields := strings.Fields(string(raw))
	if err != nil || len(fields) < 2 {
		return 0
	}
	pages, _ := strconv.ParseFloat(fields[1], 64)
	return pages * float64(os.Getpagesize()) / (1 << 20)
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return s[len(s)/2]
}
