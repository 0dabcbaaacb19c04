//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/millrace/millrace/internal/redistest"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// Agents share work fairly, and join and leave while it runs.
func TestFairShare(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.dispatcher()
	s.start("reaper", nil)
	for _, n := range []string{"a", "b", "c"} {
		s.agent(n, 4)
	}
	var ids []string
	for i := range 200 {
		id := fmt.Sprintf("t%d", i)
		ids = append(ids, id)
		s.xadd("json", fmt.Sprintf(`{"id":%q,"command":{"argv":["sleep","0.1"]}}`, id))
	}
	d := s.agent("d", 4)
	s.until("a part has run", func() bool { n, _ := s.st.Length(context.Background(), "results"); return n > 100 })
	if code := d.term(); code != 0 {
		t.Errorf("leaving agent: exit code %d", code)
	}
	s.settled(ids...)
	share := map[string]int{}
	for _, id := range ids {
		r, err := s.st.Record(t.Context(), task.ID(id))
		if err != nil {
			t.Fatal(err)
		}
		share[string(r.Owner)[:1]]++
	}
	for _, n := range []string{"a", "b", "c"} {
		if share[n] < 25 {
			t.Errorf("shares %v", share)
		}
	}
}

// The door: JSON, Protobuf, and what does not fit.
func TestDoor(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.agent("a", 2)
	entry := s.xadd("json", `{"command":{"argv":["echo","hi"]}}`)
	raw, err := proto.Marshal(&millracev1.Task{Id: "binary", Work: &millracev1.Task_Command{Command: &millracev1.Command{Argv: []string{"echo", "ho"}}}})
	if err != nil {
		t.Fatal(err)
	}
	s.xadd("task", string(raw))
	s.xadd("json", `{"comand":{"argv":["echo"]}}`)
	s.xadd("task", "\x01\x02garbage")
	s.settled("binary")
	if r := s.cli("logs", "-f", "binary"); r.out != "ho\n" {
		t.Errorf("%+v", r)
	}
	s.until("two dead letters", func() bool { d, err := s.st.Dead(context.Background(), 10); return err == nil && len(d) == 2 })
	if r := s.cli("dead"); !strings.Contains(r.out, "comand") {
		t.Errorf("dead: %s", r.out)
	}
	r := s.cli("ps", "--json")
	if !strings.Contains(r.out, `"succeeded"`) || entry == "" {
		t.Errorf("ps: %s", r.out)
	}
}

// The Python example adds a task with redis-py and waits for it.
func TestPythonExample(t *testing.T) {
	t.Parallel()
	py := os.Getenv("MILLRACE_TEST_PYTHON")
	if py == "" {
		py = "/usr/bin/python3"
	}
	if exec.Command(py, "-c", "import redis").Run() != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("python3-redis is missing: apt-get install python3-redis")
		}
		t.Skip("python3-redis is not installed: apt-get install python3-redis")
	}
	s := newSystem(t)
	s.agent("a", 1)
	cmd := exec.Command(py, "../../examples/python/submit.py", "echo", "from python")
	cmd.Env = append(s.environ(nil), "REDIS_URL="+s.url)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	s.until("it succeeded", func() bool {
		n, err := s.st.Length(context.Background(), "results")
		return err == nil && n == 1
	})
}

// With the control port blocked everything works, a little later.
func TestControlBlocked(t *testing.T) {
	t.Parallel()
	s := bare(t)
	blocked := redistest.NewProxy(t, freePort(t))
	blocked.Cut()
	p := s.start("dispatcher", map[string]string{"HTTP_ADDR": "127.0.0.1:0", "CONTROL_ADDR": "127.0.0.1:0", "ADVERTISE_ADDR": blocked.Addr()})
	for f := range strings.FieldsSeq(p.await("dispatcher started")) {
		if at, ok := strings.CutPrefix(f, "http="); ok {
			s.server = "http://" + at
		}
	}
	s.start("reaper", nil)
	s.start("logsink", map[string]string{"LOG_DIR": filepath.Join(s.dir, "logs"), "LOGSINK_ADDR": "127.0.0.1:0"})
	s.agent("a", 2)
	begun := time.Now()
	s.settled(s.sh("exit 0"))
	if d := time.Since(begun); d > 10*time.Second {
		t.Errorf("a task took %v", d)
	}
	id := s.sh("sleep 600")
	s.running(id)
	begun = time.Now()
	s.cli("cancel", id)
	s.settled(id)
	if d := time.Since(begun); d > 10*time.Second {
		t.Errorf("the cancel took %v", d)
	}
	if v := s.show(id); v.State != "cancelled" {
		t.Errorf("%+v", v)
	}
}

// High before normal before low; and low is not starved.
func TestPriorities(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	out := filepath.Join(s.dir, "out")
	var ids []string
	for _, p := range []string{"low", "normal", "high"} {
		for range 3 {
			ids = append(ids, s.sh("echo "+p+" >> "+out, "--priority", p))
		}
	}
	s.agent("a", 1)
	s.settled(ids...)
	raw, _ := os.ReadFile(out)
	got := strings.Fields(string(raw))
	if len(got) != 9 || got[0] != "high" {
		t.Fatalf("order %v", got)
	}
	place := map[string]int{}
	for i, p := range got {
		place[p] += i
	}
	if place["high"] >= place["normal"] || place["normal"] >= place["low"] {
		t.Errorf("order %v", got)
	}
}

func TestRetryWithBackoff(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.agent("a", 1)
	out := filepath.Join(s.dir, "out")
	id := s.sh(`date +%s%N >> `+out+`; [ $MILLRACE_ATTEMPT = 3 ]`, "--max-attempts", "3")
	s.settled(id)
	v := s.show(id)
	if v.State != "succeeded" || v.Attempt != 3 || v.Failures != 2 || len(v.Attempts) != 3 {
		t.Errorf("%+v", v)
	}
	raw, _ := os.ReadFile(out)
	var a, b, c int64
	if _, err := fmt.Sscan(string(raw), &a, &b, &c); err != nil {
		t.Fatal(err)
	}
	if first, second := time.Duration(b-a), time.Duration(c-b); first < 700*time.Millisecond || second < 1500*time.Millisecond {
		t.Errorf("pauses %v and %v, want about 1s and 2s", first, second)
	}
	failed := s.sh("exit 9", "--max-attempts", "2")
	s.settled(failed)
	if v := s.show(failed); v.State != "failed" || v.ExitCode != 9 || v.Attempt != 2 {
		t.Errorf("%+v", v)
	}
}

func TestNotBeforeAndExpires(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	expired := s.sh("exit 0", "--expires", "1s")
	s.final(expired)
	if s.state(expired) != task.Expired {
		t.Errorf("%v", s.state(expired))
	}
	if r := s.cli("wait", expired); r.code != 124 {
		t.Errorf("wait of an expired task: %+v", r)
	}
	s.agent("a", 1)
	begun := time.Now()
	later := s.sh("exit 0", "--delay", "2s")
	s.settled(later, expired)
	if d := time.Since(begun); d < 1900*time.Millisecond {
		t.Errorf("ran after %v", d)
	}
}

func TestIdempotentIDs(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.agent("a", 1)
	out := filepath.Join(s.dir, "out")
	for range 3 {
		if id := s.sh("echo x >> "+out, "--id", "once"); id != "once" {
			t.Fatal(id)
		}
	}
	s.settled("once")
	s.sh("echo x >> "+out, "--id", "once")
	if r := s.cli("submit", "--id", "once", "--", "true"); r.code != 125 || !strings.Contains(r.err, "once") {
		t.Errorf("another task of the same id: %+v", r)
	}
	if raw, _ := os.ReadFile(out); string(raw) != "x\n" {
		t.Errorf("ran %q", raw)
	}
}

// Bad input is refused in words, and nothing else suffers.
func TestBadInput(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.agent("a", 2)
	big := strings.Repeat("x", 300<<10)
	labels := map[string]string{}
	for i := range 10000 {
		labels[fmt.Sprint("l", i)] = "v"
	}
	many, _ := json.Marshal(map[string]any{"labels": labels, "command": map[string]any{"argv": []string{"true"}}})
	bad := map[string]string{
		"oversized":      fmt.Sprintf(`{"command":{"argv":["echo",%q]}}`, big),
		"unknown queue":  `{"queue":"nowhere","command":{"argv":["true"]}}`,
		"bad priority":   `{"priority":"urgent","command":{"argv":["true"]}}`,
		"empty argv":     `{"command":{"argv":[]}}`,
		"NUL in argv":    `{"command":{"argv":["a\u0000b"]}}`,
		"10,000 labels":  string(many),
		"a wrong type":   `{"command":{"argv":"true"}}`,
		"not JSON":       `{"command":`,
		"no work at all": `{}`,
	}
	for _, j := range bad {
		s.xadd("json", j)
	}
	s.xadd("task", "\xff\xfe\xfd")
	s.xadd("other", "x")
	id := s.sh("exit 0")
	s.settled(id)
	s.until("all in dead", func() bool {
		d, err := s.st.Dead(context.Background(), 100)
		return err == nil && len(d) == len(bad)+2
	})
	dead, _ := s.st.Dead(t.Context(), 100)
	for _, d := range dead {
		if len(d.Letter.GetReason()) < 10 || d.Letter.GetCode() == "" || len(d.Letter.GetFields()) != 1 {
			t.Errorf("letter %v", d.Letter.GetReason())
		}
	}
}

func TestRedisNotReachable(t *testing.T) {
	t.Parallel()
	s := bare(t)
	nobody := "redis://" + freePort(t) + "/0"
	for _, verb := range []string{"dispatcher", "reaper", "logsink", "agent"} {
		p := s.start(verb, map[string]string{
			"REDIS_URL": nobody, "WAIT_REDIS": "0s", "HTTP_ADDR": "127.0.0.1:0", "CONTROL_ADDR": "127.0.0.1:0",
			"LOG_DIR": s.dir, "LOGSINK_ADDR": "127.0.0.1:0", "STATE_DIR": filepath.Join(s.dir, "st"),
		})
		if code := p.exit(); code == 0 || !strings.Contains(p.output(), "MILLRACE_REDIS_URL") {
			t.Errorf("%s: %d %s", verb, code, p.output())
		}
	}
	p := s.start("reaper", map[string]string{"REDIS_URL": nobody})
	p.await("waiting for redis")
	if code := p.term(); code != 0 {
		t.Errorf("stopped while waiting: %d\n%s", code, p.output())
	}
}

func TestEvictionPolicy(t *testing.T) {
	t.Parallel()
	s := bare(t, redistest.WithConfig("maxmemory-policy", "allkeys-lru"))
	p := s.start("reaper", nil)
	p.await("allkeys-lru")
	p.await("reaper started")
	strict := s.start("reaper", map[string]string{"STRICT": "true"})
	if code := strict.exit(); code == 0 || !strings.Contains(strict.output(), "noeviction") {
		t.Errorf("%d %s", code, strict.output())
	}
}

func TestTwoOnOnePort(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	p := s.start("dispatcher", map[string]string{"HTTP_ADDR": strings.TrimPrefix(s.server, "http://"), "CONTROL_ADDR": "127.0.0.1:0"})
	if code := p.exit(); code == 0 || !strings.Contains(p.output(), "MILLRACE_HTTP_ADDR") || !strings.Contains(p.output(), "in use") {
		t.Errorf("%d %s", code, p.output())
	}
	s.agent("a", 1)
	s.settled(s.sh("exit 0"))
}

func TestConfigErrorsAllAtOnce(t *testing.T) {
	t.Parallel()
	s := bare(t)
	p := s.start("agent", map[string]string{"SLOTS": "-1", "QUEUES": "BAD!", "HEARTBEAT_TTL": "5000"})
	if code := p.exit(); code != 125 {
		t.Errorf("code %d", code)
	}
	for _, w := range []string{"MILLRACE_SLOTS", "MILLRACE_QUEUES", "MILLRACE_HEARTBEAT_TTL"} {
		if !strings.Contains(p.output(), w) {
			t.Errorf("%s is not named in %s", w, p.output())
		}
	}
}

// The README's main job in small, and what Ctrl-C does.
func TestDev(t *testing.T) {
	t.Parallel()
	for _, memory := range []bool{false, true} {
		t.Run(fmt.Sprintf("memory=%v", memory), func(t *testing.T) {
			t.Parallel()
			s := bare(t)
			args := []string{}
			if memory {
				args = append(args, "--memory")
			}
			p := s.start("dev", nil, append(args, "--", "sh", "-c", "echo from dev; exit 5")...)
			if code := p.exit(); code != 5 || !strings.Contains(p.output(), "from dev") {
				t.Errorf("%d %s", code, p.output())
			}
			ctrlC := s.start("dev", map[string]string{"STATE_DIR": s.dir}, append(args, "--", "sh", "-c", "echo begun; sleep 600")...)
			ctrlC.await("begun")
			ctrlC.signal(syscall.SIGINT)
			if code := ctrlC.exit(); code != 130 {
				t.Errorf("Ctrl-C: %d %s", code, ctrlC.output())
			}
			stay := s.start("dev", nil, append(args, "--http", "127.0.0.1:0")...)
			stay.await("Ctrl-C stops it")
			for _, w := range []string{"API", "millrace run", "XADD tasks"} {
				if !strings.Contains(stay.output(), w) {
					t.Errorf("the banner has no %q: %s", w, stay.output())
				}
			}
			stay.signal(syscall.SIGINT)
			if code := stay.exit(); code != 0 {
				t.Errorf("Ctrl-C: %d %s", code, stay.output())
			}
		})
	}
}

// A second Ctrl-C does not wait for a task that ignores the first.
func TestDevSecondInterrupt(t *testing.T) {
	t.Parallel()
	s := bare(t)
	p := s.start("dev", nil, "--", "sh", "-c", "trap '' TERM INT; echo begun; while :; do sleep 1; done")
	p.await("begun")
	p.signal(syscall.SIGINT)
	p.await("once more")
	begun := time.Now()
	p.signal(syscall.SIGINT)
	p.exit()
	if d := time.Since(begun); d > 5*time.Second {
		t.Errorf("took %v", d)
	}
	s.until("no process is left", func() bool {
		out, _ := exec.Command("pgrep", "-f", "trap '' TERM INT; echo begun").Output()
		return len(strings.Fields(string(out))) == 0
	})
}
