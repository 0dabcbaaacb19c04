//go:build e2e

// Package e2e tests the whole system: real processes of the real binary on a real Redis, killed and cut off for real.
// Scenario ids such as S01 or R14 name cases that were distilled from public reports against comparable systems.
package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/protobuf/proto"

	"github.com/millrace/millrace/internal/redistest"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// binary is built once for all tests.
var binary string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "millrace-e2e-")
	if err != nil {
		panic(err)
	}
	binary = filepath.Join(dir, "millrace")
	if out, err := exec.Command("go", "build", "-o", binary, "../../cmd/millrace").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build: %v\n%s", err, out)
		os.Exit(1)
	}
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// Times that all tests use: short, with the proportions of the defaults.
const (
	ttl      = 3 * time.Second
	scan     = time.Second
	patience = 60 * time.Second // for anything that has to happen; no test passes because it is over
)

// system is one deployment.
type system struct {
	t      *testing.T
	redis  *redistest.Server
	url    string // as the services see it
	dir    string
	st     *store.Store
	server string // of the first dispatcher
	env    map[string]string

	mu    sync.Mutex
	procs []*service
}

// newSystem starts a Redis, one dispatcher, one reaper and one logsink.
func newSystem(t *testing.T, opts ...redistest.Option) *system {
	t.Helper()
	s := bare(t, opts...)
	s.dispatcher()
	s.start("reaper", nil)
	s.start("logsink", map[string]string{"LOG_DIR": filepath.Join(s.dir, "logs"), "LOGSINK_ADDR": "127.0.0.1:0"})
	return s
}

// bare starts only a Redis.
func bare(t *testing.T, opts ...redistest.Option) *system {
	t.Helper()
	r := redistest.Start(t, opts...)
	s := &system{t: t, redis: r, url: r.URL(), dir: t.TempDir(), env: map[string]string{}}
	st, err := store.New(store.Options{URL: r.URL(), Name: "e2e"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	s.st = st
	t.Cleanup(func() { s.stopAll(); _ = st.Close() })
	return s
}

// service is a running process of the binary.
type service struct {
	s    *system
	verb string
	cmd  *exec.Cmd
	done chan struct{}
	mu   sync.Mutex
	log  bytes.Buffer
	more chan struct{} // poked at each write
}

func (p *service) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case p.more <- struct{}{}:
	default:
	}
	return p.log.Write(b)
}

func (p *service) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.String()
}

// start runs a verb as a process of its own.
func (s *system) start(verb string, env map[string]string, args ...string) *service {
	s.t.Helper()
	p := &service{s: s, verb: verb, done: make(chan struct{}), more: make(chan struct{}, 1)}
	p.cmd = exec.Command(binary, append([]string{verb}, args...)...)
	p.cmd.Env = s.environ(env)
	p.cmd.Stdout, p.cmd.Stderr = p, p
	p.cmd.WaitDelay = 5 * time.Second
	if err := p.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	go func() { _ = p.cmd.Wait(); close(p.done) }() // ends with the process
	s.mu.Lock()
	s.procs = append(s.procs, p)
	s.mu.Unlock()
	return p
}

func (s *system) environ(env map[string]string) []string {
	out := []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + s.dir, "MILLRACE_REDIS_URL=" + s.url, "MILLRACE_HEARTBEAT_TTL=3s",
		"MILLRACE_HEARTBEAT_INTERVAL=1s", "MILLRACE_LEASE_TTL=12s", "MILLRACE_SCAN_INTERVAL=1s", "MILLRACE_HOLD_LIMIT=30s",
		"MILLRACE_SERVER=" + s.server, "MILLRACE_LOG_LEVEL=info",
	}
	for _, m := range []map[string]string{s.env, env} {
		for k, v := range m {
			out = append(out, "MILLRACE_"+k+"="+v)
		}
	}
	return out
}

// dispatcher starts one more; the first is the one that the CLI asks.
func (s *system) dispatcher() *service {
	s.t.Helper()
	p := s.start("dispatcher", map[string]string{"HTTP_ADDR": "127.0.0.1:0", "CONTROL_ADDR": "127.0.0.1:0"})
	line := p.await("dispatcher started")
	for f := range strings.FieldsSeq(line) {
		if at, ok := strings.CutPrefix(f, "http="); ok && s.server == "" {
			s.server = "http://" + at
		}
	}
	return p
}

// agent starts an agent and waits until it is known.
func (s *system) agent(name string, slots int, env ...string) *service {
	s.t.Helper()
	m := map[string]string{"AGENT_NAME": name, "SLOTS": fmt.Sprint(slots), "STATE_DIR": filepath.Join(s.dir, "state"), "DRAIN_TIMEOUT": "30s"}
	for i := 0; i+1 < len(env); i += 2 {
		m[env[i]] = env[i+1]
	}
	p := s.start("agent", m)
	p.await("agent started")
	return p
}

// await waits for a line of the log with these words and returns it.
func (p *service) await(words string) string {
	p.s.t.Helper()
	timeout := time.After(patience)
	for {
		for line := range strings.Lines(p.output()) {
			if strings.Contains(line, words) {
				return line
			}
		}
		select {
		case <-p.more:
		case <-p.done:
			if !strings.Contains(p.output(), words) {
				p.s.t.Fatalf("%s ended without saying %q:\n%s", p.verb, words, p.output())
			}
		case <-timeout:
			p.s.t.Fatalf("%s did not say %q:\n%s", p.verb, words, p.output())
		}
	}
}

func (p *service) signal(sig syscall.Signal) { _ = p.cmd.Process.Signal(sig) }

// kill is kill -9 of the process that was started, which for an agent is its guard.
func (p *service) kill() { p.signal(syscall.SIGKILL); <-p.done }

// term stops it in order and returns the exit code.
func (p *service) term() int {
	p.s.t.Helper()
	p.signal(syscall.SIGTERM)
	return p.exit()
}

func (p *service) exit() int {
	p.s.t.Helper()
	select {
	case <-p.done:
	case <-time.After(patience):
		p.signal(syscall.SIGKILL)
		p.s.t.Fatalf("%s does not end:\n%s", p.verb, p.output())
	}
	return p.cmd.ProcessState.ExitCode()
}

// stopAll ends what is left and checks that no process of any task is.
func (s *system) stopAll() {
	s.mu.Lock()
	procs := s.procs
	s.mu.Unlock()
	for _, verb := range []string{"agent", "", "dispatcher"} {
		for _, p := range procs {
			if verb == "" && (p.verb == "agent" || p.verb == "dispatcher") || verb != "" && p.verb != verb {
				continue
			}
			select {
			case <-p.done:
				continue
			default:
			}
			p.signal(syscall.SIGCONT)
			p.signal(syscall.SIGTERM)
			if p.verb == "agent" {
				p.signal(syscall.SIGTERM) // no need to let tasks finish
			}
			select {
			case <-p.done:
			case <-time.After(30 * time.Second):
				s.t.Errorf("%s does not stop:\n%s", p.verb, p.output())
				p.kill()
			}
		}
	}
	if s.t.Failed() {
		for _, p := range procs {
			s.t.Logf("--- %s (pid %d)\n%s", p.verb, p.cmd.Process.Pid, tail(p.output(), 4000))
		}
	}
}

func tail(s string, n int) string {
	if len(s) > n {
		return "…" + s[len(s)-n:]
	}
	return s
}

// result of a client verb.
type result struct {
	out, err string
	code     int
}

// cli runs a client verb to its end.
func (s *system) cli(args ...string) result {
	s.t.Helper()
	return s.cliIn("", args...)
}

func (s *system) cliIn(stdin string, args ...string) result {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Env = s.environ(nil)
	cmd.Stdin = strings.NewReader(stdin)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Run()
	var ee *exec.ExitError
	if err != nil && !errors.As(err, &ee) {
		s.t.Fatalf("millrace %v: %v", args, err)
	}
	return result{out.String(), errOut.String(), cmd.ProcessState.ExitCode()}
}

// submit returns the id of a new task.
func (s *system) submit(args ...string) string {
	s.t.Helper()
	r := s.cli(append([]string{"submit"}, args...)...)
	if r.code != 0 {
		s.t.Fatalf("submit %v: %d %s", args, r.code, r.err)
	}
	return strings.TrimSpace(r.out)
}

// sh submits a shell script.
func (s *system) sh(script string, flags ...string) string {
	s.t.Helper()
	return s.submit(append(append([]string{}, flags...), "--", "sh", "-c", script)...)
}

// view is what `show --json` says.
type view struct {
	ID, State, Reason, Signal, Worker, Message string
	Attempt, ExitCode                          int
	Failures, Lost                             int
	Attempts                                   []struct {
		Attempt                         int
		Worker, Reason, Signal, Message string
		ExitCode                        int
		Killed                          bool
		Survivors                       []string
		StartedAt, EndedAt              time.Time
	}
	Log struct {
		Complete bool
		Bytes    int64
	}
}

func (s *system) show(id string) view {
	s.t.Helper()
	r := s.cli("show", id, "--json")
	if r.code != 0 {
		s.t.Fatalf("show %s: %s", id, r.err)
	}
	var v view
	if err := json.Unmarshal([]byte(r.out), &v); err != nil {
		s.t.Fatalf("show %s: %v in %s", id, err, r.out)
	}
	return v
}

// until waits for a state that nobody signals.
func (s *system) until(what string, check func() bool) {
	s.t.Helper()
	for end := time.Now().Add(patience); !check(); {
		if time.Now().After(end) {
			s.t.Fatalf("waited in vain: %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (s *system) state(id string) task.State {
	s.t.Helper()
	sn, err := s.st.Snapshots(context.Background(), []task.ID{task.ID(id)})
	if err != nil {
		return task.None // Redis may be away on purpose
	}
	return sn[0].State
}

func (s *system) running(id string) {
	s.t.Helper()
	s.until(id+" runs", func() bool { return s.state(id) == task.Running })
}

// final waits for the end of tasks.
func (s *system) final(ids ...string) {
	s.t.Helper()
	for _, id := range ids {
		s.until(id+" ends", func() bool { return s.state(id).Final() })
	}
}

// settled checks what must hold when all tasks have ended: one result each, nothing pending, nothing indexed.
func (s *system) settled(ids ...string) {
	s.t.Helper()
	ctx := context.Background()
	s.final(ids...)
	c := s.st.Client()
	count := map[string]int{}
	msgs, err := c.XRange(ctx, "results", "-", "+").Result()
	if err != nil {
		s.t.Fatal(err)
	}
	for _, m := range msgs {
		raw, _ := m.Values["r"].(string)
		r := &millracev1.Result{}
		if err := proto.Unmarshal([]byte(raw), r); err != nil {
			s.t.Fatal(err)
		}
		count[r.GetId()]++
	}
	for _, id := range ids {
		if count[id] != 1 {
			s.t.Errorf("%s has %d results", id, count[id])
		}
	}
	s.until("nothing is left in streams and indexes", func() bool {
		for _, l := range []string{"default:high", "default:normal", "default:low"} {
			if n, err := c.XLen(ctx, "dispatch:"+l).Result(); err != nil || n != 0 {
				return false
			}
			if p, err := c.XPending(ctx, "dispatch:"+l, "agents").Result(); err == nil && p.Count != 0 {
				return false
			}
		}
		for _, z := range []string{"running", "delayed"} {
			if n, err := c.ZCard(ctx, z).Result(); err != nil || n != 0 {
				return false
			}
		}
		n, err := c.XLen(ctx, "tasks").Result()
		return err == nil && n == 0
	})
}

// trees lists the live processes of a task by the marker in their environment.
func trees(id string) (pids []int) {
	dirs, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, f := range dirs {
		raw, err := os.ReadFile(f)
		if err != nil || !bytes.Contains(raw, []byte("MILLRACE_MARKER=")) || !bytes.Contains(raw, []byte("/"+id+"/")) {
			continue
		}
		var pid int
		_, _ = fmt.Sscanf(f, "/proc/%d/environ", &pid)
		pids = append(pids, pid)
	}
	return pids
}

func (s *system) noTree(id string) {
	s.t.Helper()
	s.until("no process of "+id+" is left", func() bool { return len(trees(id)) == 0 })
}

func (s *system) xadd(field, value string) string {
	s.t.Helper()
	id, err := s.st.Client().XAdd(context.Background(), &redis.XAddArgs{Stream: "tasks", Values: []any{field, value}}).Result()
	if err != nil {
		s.t.Fatal(err)
	}
	return id
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}
