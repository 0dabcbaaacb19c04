//go:build e2e

package e2e

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/task"
)

// R01 and R26: of two tasks with children by the same script, only the cancelled one's tree dies, all of it.
func TestR01R26CancelKillsOneTree(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.agent("a", 2)
	script := `sh -c "sleep 600; :" & python3 -c "import time;time.sleep(600)" & wait`
	one, two := s.sh(script), s.sh(script)
	for _, id := range []string{one, two} {
		s.until("tree of "+id, func() bool { return len(trees(id)) >= 4 })
	}
	begun := time.Now()
	if r := s.cli("cancel", one); r.code != 0 {
		t.Fatal(r.err)
	}
	s.final(one)
	s.noTree(one)
	if d := time.Since(begun); d > 10*time.Second {
		t.Errorf("took %v, although everything obeys TERM", d)
	}
	if n := len(trees(two)); n < 4 || s.state(two) != task.Running {
		t.Errorf("the other task has %d processes and is %v", n, s.state(two))
	}
	s.cli("cancel", two)
	s.settled(one, two)
}

// R03: a task that ignores TERM, INT and HUP is killed after its grace; the agent takes the next one.
func TestR03IgnoresTerm(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.agent("a", 1)
	id := s.sh(`trap '' TERM INT HUP; while :; do sleep 1; done`, "--grace", "3s")
	s.running(id)
	s.until("trap is set", func() bool { return len(trees(id)) >= 2 })
	begun := time.Now()
	s.cli("cancel", id)
	s.final(id)
	if d := time.Since(begun); d < 2*time.Second || d > 6*time.Second {
		t.Errorf("killed after %v, the grace is 3s", d)
	}
	v := s.show(id)
	if v.State != "cancelled" || v.Attempts[0].Signal != "KILL" || !v.Attempts[0].Killed {
		t.Errorf("%+v", v)
	}
	s.settled(id, s.sh("exit 0"))
}

// R04: a TERM handler that works for a while and exits 7 is let finish; its code is kept.
func TestR04TermHandlerFinishes(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.agent("a", 1)
	file := filepath.Join(s.dir, "file")
	id := s.submit("--grace", "20s", "--", "python3", "-c", `
import signal, sys, time
def term(*_):
    with open(`+fmt.Sprintf("%q", file)+`, "a") as f:
        for i in range(20):
            f.write("line %d\n" % i); f.flush(); time.sleep(0.1)
    sys.exit(7)
signal.signal(signal.SIGTERM, term)
print("ready", flush=True)
time.sleep(600)`)
	s.until("ready", func() bool { return strings.Contains(s.cli("logs", id).out, "ready") })
	s.cli("cancel", id)
	s.settled(id)
	v := s.show(id)
	if v.State != "cancelled" || v.Reason != "cancelled" || v.Attempts[0].ExitCode != 7 || v.Attempts[0].Killed {
		t.Errorf("%+v", v)
	}
	if raw, _ := os.ReadFile(file); strings.Count(string(raw), "\n") != 20 {
		t.Errorf("%d of 20 lines", strings.Count(string(raw), "\n"))
	}
}

// R06: every log ends with its last line, and wait returns only when it is complete.
func TestR06EndsAreKept(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.agent("a", 4)
	const n = 100
	var ids []string
	for i := range n {
		ids = append(ids, s.sh(fmt.Sprintf(`for l in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19; do echo line $l; done; echo END %d`, i)))
	}
	for i, id := range ids {
		if r := s.cli("wait", id); r.code != 0 {
			t.Fatalf("wait %s: %d %s", id, r.code, r.err)
		}
		out := s.cli("logs", id).out
		if !strings.HasSuffix(out, fmt.Sprintf("END %d\n", i)) || strings.Count(out, "\n") != 20 {
			t.Errorf("%s: %q", id, out)
		}
	}
	s.settled(ids...)
}

// R07: a follower sees dots without a line end as they are written.
func TestR07Dots(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.agent("a", 1)
	id := s.sh(`i=0; while [ $i -lt 40 ]; do printf .; sleep 0.1; i=$((i+1)); done`)
	r, w := io.Pipe()
	cmd := exec.Command(binary, "logs", "-f", id)
	cmd.Env, cmd.Stdout = s.environ(nil), w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = cmd.Wait(); _ = w.Close() }() // ends with the follower
	var longest time.Duration
	var got int
	last := time.Time{}
	buf := make([]byte, 1024)
	for {
		n, err := r.Read(buf)
		if now := time.Now(); n > 0 {
			if !last.IsZero() {
				longest = max(longest, now.Sub(last))
			}
			last, got = now, got+n
		}
		if err != nil {
			break
		}
	}
	if got != 40 || longest > 2*time.Second {
		t.Errorf("%d dots, longest silence %v", got, longest)
	}
}

// R09 and R11: many lines in order, and bytes that are no text, come out as they went in.
func TestR09R11ByteExact(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.agent("a", 2)
	lines := s.submit("--", "seq", "1", "50000")
	odd := s.submit("--", "python3", "-c", `import sys; sys.stdout.buffer.write(b"\x00\x80\xff" + "ü".encode()[:1] + b"\x1b[31mred\x1b[0m\ntext\n")`)
	s.final(lines, odd)
	want, err := exec.Command("seq", "1", "50000").Output()
	if err != nil {
		t.Fatal(err)
	}
	if r := s.cli("logs", "-f", lines); r.out != string(want) {
		t.Errorf("%d bytes, want %d", len(r.out), len(want))
	}
	if r := s.cli("logs", "-f", "--raw", odd); r.out != "\x00\x80\xff\xc3\x1b[31mred\x1b[0m\ntext\n" {
		t.Errorf("%q", r.out)
	}
	if v := s.show(odd); v.State != "succeeded" {
		t.Errorf("%+v", v)
	}
}

// R12: text flushed one byte at a time is not broken.
func TestR12ByteByByte(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.agent("a", 1)
	r := s.cli("run", "--", "python3", "-c", `
import sys, time
for b in "äöü€😀\n".encode():
    sys.stdout.buffer.write(bytes([b])); sys.stdout.buffer.flush(); time.sleep(0.005)`)
	if r.out != "äöü€😀\n" || r.code != 0 {
		t.Errorf("%q %d %s", r.out, r.code, r.err)
	}
}

// R14: a leftover child that holds the output neither keeps the task running nor survives it.
func TestR14Leftover(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.agent("a", 1)
	begun := time.Now()
	r := s.cli("run", "--", "sh", "-c", "sleep 300 & echo hi; exit 0")
	if r.code != 0 || r.out != "hi\n" || time.Since(begun) > 10*time.Second {
		t.Errorf("%+v after %v", r, time.Since(begun))
	}
	id := s.sh("sleep 300 & exit 0")
	s.settled(id)
	s.noTree(id)
	if v := s.show(id); len(v.Attempts[0].Survivors) != 1 {
		t.Errorf("survivors: %+v", v.Attempts[0].Survivors)
	}
}

// R17: logs -f attached while the task is queued follows it to its end; without -f it returns at once.
func TestR17AttachWhileQueued(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	id := s.sh("echo out; exit 4")
	if r := s.cli("logs", "--no-follow", id); r.out != "" || r.code != 0 {
		t.Errorf("no-follow: %+v", r)
	}
	got := make(chan result, 1)
	go func() { got <- s.cli("logs", "-f", id) }()
	s.agent("a", 1)
	select {
	case r := <-got:
		if r.out != "out\n" || !strings.Contains(r.err, "exit 4") {
			t.Errorf("%+v", r)
		}
	case <-time.After(patience):
		t.Fatal("the follower does not end")
	}
}

// R19: every way to end has its code and its words.
func TestR19ExitCodes(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.agent("a", 4)
	plain := filepath.Join(s.dir, "plain")
	if err := os.WriteFile(plain, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args []string
		code int
		word string
	}{
		"zero":           {[]string{"--", "true"}, 0, ""},
		"three":          {[]string{"--", "sh", "-c", "exit 3"}, 3, "exit 3"},
		"255":            {[]string{"--", "sh", "-c", "exit 255"}, 255, "255"},
		"TERM":           {[]string{"--", "sh", "-c", "kill -TERM $$"}, 143, "TERM"},
		"SEGV":           {[]string{"--", "sh", "-c", "kill -SEGV $$"}, 139, "SEGV"},
		"missing":        {[]string{"--", "/no/such/binary"}, 127, "/no/such/binary"},
		"not executable": {[]string{"--", plain}, 126, plain},
		"bad directory":  {[]string{"--dir", "/no/such/dir", "--", "true"}, 126, "/no/such/dir"},
		"timeout":        {[]string{"--timeout", "300ms", "--grace", "1s", "--", "sleep", "600"}, 124, "timed out"},
	} {
		t.Run(name, func(t *testing.T) {
			r := s.cli(append([]string{"submit", "--wait"}, c.args...)...)
			if r.code != c.code || !strings.Contains(r.err, c.word) {
				t.Errorf("code %d, want %d; stderr %q wants %q", r.code, c.code, r.err, c.word)
			}
		})
	}
	id := s.sh("sleep 600")
	got := make(chan result, 1)
	go func() { got <- s.cli("wait", id) }()
	s.running(id)
	s.cli("cancel", id)
	if r := <-got; r.code != 130 {
		t.Errorf("cancelled: %+v", r)
	}
}

// R24: a draining agent lets its running task finish and starts nothing; what waits goes elsewhere.
func TestR24Drain(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	a := s.agent("a", 1)
	runs := s.sh("sleep 3; exit 0")
	s.running(runs)
	var ids []string
	for range 5 {
		ids = append(ids, s.sh("exit 0"))
	}
	a.signal(syscall.SIGTERM)
	a.await("draining")
	s.agent("b", 1)
	s.settled(append(ids, runs)...)
	if code := a.exit(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	for _, id := range ids {
		if v := s.show(id); !strings.HasPrefix(v.Worker, "b-") {
			t.Errorf("%s ran on %s", id, v.Worker)
		}
	}
	if v := s.show(runs); v.State != "succeeded" || v.Attempt != 1 {
		t.Errorf("%+v", v)
	}
}

// S29: a drain that does not wait hands the task over, with its budgets as they were and the old tree dead first.
func TestS29HandOver(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	a := s.agent("a", 1, "DRAIN_TIMEOUT", "1s")
	marks := filepath.Join(s.dir, "marks")
	id := s.sh(`while :; do echo $MILLRACE_ATTEMPT >> `+marks+`; [ $MILLRACE_ATTEMPT = 2 ] && exit 0; sleep 0.05; done`, "--grace", "3s")
	s.running(id)
	s.agent("b", 1)
	if code := a.term(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	s.settled(id)
	v := s.show(id)
	if v.State != "succeeded" || v.Attempt != 2 || v.Failures != 0 || v.Lost != 0 || v.Attempts[0].Reason != "preempted" {
		t.Errorf("%+v", v)
	}
	raw, _ := os.ReadFile(marks)
	if i := bytes.Index(raw, []byte("2\n")); i >= 0 && bytes.Contains(raw[i:], []byte("1\n")) {
		t.Error("attempt 1 wrote after attempt 2 had begun")
	}
}

// R34: cancelled while queued, and right after the submit: it never runs, or starts and dies.
func TestR34CancelEarly(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	mark := filepath.Join(s.dir, "ran")
	queued := s.sh("touch " + mark)
	s.cli("cancel", queued)
	s.final(queued)
	s.agent("a", 2)
	var ids []string
	for range 20 {
		id := s.sh("sleep 600", "--grace", "1s")
		if r := s.cli("cancel", id); r.code != 0 {
			t.Fatal(r.err)
		}
		ids = append(ids, id)
	}
	s.settled(append(ids, queued)...)
	for _, id := range append(ids, queued) {
		if s.state(id) != task.Cancelled {
			t.Errorf("%s %v", id, s.state(id))
		}
		s.noTree(id)
	}
	if _, err := os.Stat(mark); err == nil {
		t.Error("cancelled while queued and ran all the same")
	}
}

// 100 MB come out of the API as they went in, also when the logsink is killed in between.
func TestLog100MB(t *testing.T) {
	t.Parallel()
	s := bare(t)
	s.dispatcher()
	s.start("reaper", nil)
	sinkEnv := map[string]string{"LOG_DIR": filepath.Join(s.dir, "logs"), "LOGSINK_ADDR": "127.0.0.1:0", "LOGSINK_LEASE_TTL": "2s"}
	sink := s.start("logsink", sinkEnv)
	s.agent("a", 1)
	file := filepath.Join(s.dir, "data")
	data := make([]byte, 100<<20)
	for i := range data {
		data[i] = byte(i*7 + i>>8*13 + i>>16*31)
		if i%97 == 96 {
			data[i] = '\n'
		}
	}
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	id := s.submit("--", "cat", file)
	s.until("some of it is on disk", func() bool {
		n := int64(0)
		_ = filepath.Walk(filepath.Join(s.dir, "logs"), func(_ string, i os.FileInfo, err error) error {
			if err == nil && i.Mode().IsRegular() {
				n += i.Size()
			}
			return nil
		})
		return n > 1<<20
	})
	sink.kill()
	s.start("logsink", sinkEnv)
	cmd := exec.Command(binary, "logs", "-f", "--raw", id)
	cmd.Env = s.environ(nil)
	sum := sha256.New()
	cmd.Stdout = sum
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if want := sha256.Sum256(data); !bytes.Equal(sum.Sum(nil), want[:]) {
		t.Error("the log differs from what was written")
	}
	found, _ := filepath.Glob(filepath.Join(s.dir, "logs", "*", id, "1.log"))
	if len(found) != 1 {
		t.Fatalf("files: %v", found)
	}
	if got, _ := os.ReadFile(found[0]); !bytes.Equal(got, data) {
		t.Errorf("the file has %d bytes, want %d", len(got), len(data))
	}
	s.settled(id)
}

// The API is usable with nothing but HTTP and JSON.
func TestAPIWithCurl(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.agent("a", 1)
	post := func(method, body string) (int, string) {
		t.Helper()
		resp, err := http.Post(s.server+"/millrace.v1."+method, "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		raw, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(raw)
	}
	code, out := post("TaskService/Submit", `{"task":{"id":"curl","command":{"argv":["echo","hi"]},"timeout":"2m"}}`)
	if code != 200 || !strings.Contains(out, `"id":"curl"`) {
		t.Fatalf("%d %s", code, out)
	}
	code, out = post("TaskService/WaitTask", `{"id":"cur","timeout":"30s","logs":true}`)
	if code != 200 || !strings.Contains(out, `"state":"succeeded"`) {
		t.Errorf("%d %s", code, out)
	}
	if code, out = post("TaskService/Submit", `{"task":{"comand":{}}}`); code != 400 || !strings.Contains(out, "comand") {
		t.Errorf("%d %s", code, out)
	}
	if code, out = post("FleetService/ListWorkers", `{}`); code != 200 || !strings.Contains(out, `"state":"ready"`) {
		t.Errorf("%d %s", code, out)
	}
}
