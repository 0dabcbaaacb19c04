package proc_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/proc"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/millrace/millrace/internal/proc.forkLoop"))
}

var markers atomic.Int64

func marker() string { return fmt.Sprintf("proctest-%d/%d", os.Getpid(), markers.Add(1)) }

// sink collects output and lets a test wait for a piece of it.
type sink struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	more chan struct{}
}

func newSink() *sink { return &sink{more: make(chan struct{}, 1)} }

func (s *sink) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case s.more <- struct{}{}:
	default:
	}
	return s.buf.Write(b)
}

func (s *sink) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buf.String()
}

// waitFor blocks until the output contains text.
func (s *sink) waitFor(t *testing.T, text string) string {
	t.Helper()
	limit := time.After(10 * time.Second)
	for {
		if got := s.String(); strings.Contains(got, text) {
			return got
		}
		select {
		case <-s.more:
		case <-limit:
			t.Fatalf("output never had %q: %q", text, s.String())
		}
	}
}

type attempt struct {
	*proc.Process
	out    *sink
	marker string
}

// start runs argv and makes sure that the test leaves nothing of it.
func start(t *testing.T, argv ...string) attempt {
	t.Helper()
	a := attempt{out: newSink(), marker: marker()}
	p, err := proc.Start(proc.Spec{Argv: argv, Env: []string{"PATH=" + os.Getenv("PATH")}, Dir: t.TempDir(), Stdout: a.out, Marker: a.marker})
	if err != nil {
		t.Fatal(err)
	}
	a.Process = p
	t.Cleanup(func() {
		p.Stop(syscall.SIGKILL, 0)
		p.Wait()
	})
	return a
}

// wait is Wait with a limit.
func (a attempt) wait(t *testing.T, limit time.Duration) proc.Outcome {
	t.Helper()
	select {
	case <-a.Done():
	case <-time.After(limit):
		t.Fatalf("not over after %s; output so far: %q", limit, a.out.String())
	}
	// Nothing of the tree may be left: a sweep for the marker finds what the package's own looks did not.
	left, err := proc.Sweep(func(m string) bool { return m == a.marker })
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %+v (%v)", left, err)
	}
	return a.Wait()
}

func TestR01TreeIsStopped(t *testing.T) {
	t.Parallel()
	a := start(t, "sh", "-c", `sh -c "sleep 600; :" & python3 -c "import time;print('up',flush=True);time.sleep(600)"; wait`)
	a.out.waitFor(t, "up")
	a.Stop(syscall.SIGTERM, 5*time.Second)
	got := a.wait(t, 2*time.Second)
	if got.Signal != syscall.SIGTERM || got.Killed {
		t.Errorf("outcome %+v", got)
	}
}

func TestR03IgnoresEverySignal(t *testing.T) {
	t.Parallel()
	a := start(t, "sh", "-c", `trap '' TERM INT HUP; echo up; while :; do sleep 1; done`)
	a.out.waitFor(t, "up")
	begin := time.Now()
	a.Stop(syscall.SIGTERM, time.Second)
	got := a.wait(t, 5*time.Second)
	if got.Signal != syscall.SIGKILL || !got.Killed || got.ExitCode != 137 {
		t.Errorf("outcome %+v", got)
	}
	if took := time.Since(begin); took < time.Second || took > 2*time.Second {
		t.Errorf("killed after %s", took)
	}
}

const handler = `
import signal, sys, time
def term(*_):
    with open("file", "w") as f:
        for i in range(5):
            f.write("%d\n" % i); f.flush(); time.sleep(.2)
    sys.exit(7)
signal.signal(signal.SIGTERM, term)
print("up", flush=True)
while True: time.sleep(60)
`

func TestR04HandlerIsLeftAlone(t *testing.T) {
	t.Parallel()
	a := start(t, "sh", "-c", `exec python3 -c "$0"`, handler)
	a.out.waitFor(t, "up")
	a.Stop(syscall.SIGTERM, 10*time.Second)
	a.Stop(syscall.SIGTERM, 10*time.Second) // must not interrupt the handler by a second one
	a.Stop(syscall.SIGTERM, 8*time.Second)
	got := a.wait(t, 5*time.Second)
	if got.ExitCode != 7 || got.Killed || got.Signal != 0 {
		t.Errorf("outcome %+v", got)
	}
}

func TestR09ManyLines(t *testing.T) {
	t.Parallel()
	a := start(t, "seq", "1", "50000")
	a.wait(t, 2*time.Second)
	lines := strings.Split(strings.TrimSpace(a.out.String()), "\n")
	if len(lines) != 50000 || lines[49999] != "50000" {
		t.Errorf("%d lines", len(lines))
	}
}

func TestR11BytesAreKept(t *testing.T) {
	t.Parallel()
	a := start(t, "printf", `\000\200\377\342\202\033[31mred\033[0m text`)
	a.wait(t, 2*time.Second)
	if diff := cmp.Diff("\x00\x80\xff\xe2\x82\x1b[31mred\x1b[0m text", a.out.String()); diff != "" {
		t.Error(diff)
	}
}

func TestR14LeftoverHoldsOutput(t *testing.T) {
	t.Parallel()
	a := start(t, "sh", "-c", `sleep 300 & echo hi; exit 0`)
	got := a.wait(t, 2*time.Second)
	if got.ExitCode != 0 || got.Killed || a.out.String() != "hi\n" {
		t.Errorf("outcome %+v, output %q", got, a.out.String())
	}
	if len(got.Survivors) != 1 || got.Survivors[0].Command != "sleep 300" {
		t.Errorf("survivors %+v", got.Survivors)
	}
}

func TestR19Outcomes(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		script string
		code   int
		signal syscall.Signal
	}{
		{"exit 0", 0, 0},
		{"exit 3", 3, 0},
		{"exit 255", 255, 0},
		{"kill -TERM $$", 143, syscall.SIGTERM},
		{"kill -SEGV $$", 139, syscall.SIGSEGV},
	} {
		t.Run(tc.script, func(t *testing.T) {
			t.Parallel()
			got := start(t, "sh", "-c", tc.script).wait(t, 3*time.Second)
			if got.ExitCode != tc.code || got.Signal != tc.signal || got.Killed {
				t.Errorf("outcome %+v", got)
			}
		})
	}
}

func TestR19Refusals(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, content string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	plain := write("plain", "#!/bin/sh\n", 0o644)
	for name, tc := range map[string]struct {
		spec proc.Spec
		code int
		text string
	}{
		"not in PATH":       {proc.Spec{Argv: []string{"no-such-program"}}, 127, "not found in PATH"},
		"no such file":      {proc.Spec{Argv: []string{"/no/such/program"}}, 127, "does not exist"},
		"not executable":    {proc.Spec{Argv: []string{plain}}, 126, "chmod +x"},
		"in PATH, not exec": {proc.Spec{Argv: []string{"plain"}, Env: []string{"PATH=" + dir}}, 126, "chmod +x"},
		"a directory":       {proc.Spec{Argv: []string{dir}}, 126, "is a directory"},
		"bad directory":     {proc.Spec{Argv: []string{"true"}, Dir: "/no/such/dir"}, 126, "working directory"},
		"directory is file": {proc.Spec{Argv: []string{"true"}, Dir: plain}, 126, "not a directory"},
		"NUL in argv":       {proc.Spec{Argv: []string{"echo", "a\x00b"}}, 126, "NUL"},
		"NUL in env":        {proc.Spec{Argv: []string{"true"}, Env: []string{"A=secret\x00b"}}, 126, "NUL"},
		"empty":             {proc.Spec{}, 127, "empty"},
		"too long":          {proc.Spec{Argv: []string{"echo", strings.Repeat("x", 1<<20)}}, 126, "too long"},
		"no format":         {proc.Spec{Argv: []string{write("text", "hello\n", 0o755)}}, 126, "#!/bin/sh"},
		"no interpreter":    {proc.Spec{Argv: []string{write("script", "#!/no/such/sh -e\n", 0o755)}}, 127, "interpreter /no/such/sh does not"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, err := proc.Start(tc.spec)
			if err == nil {
				p.Wait()
			}
			refused, ok := errors.AsType[*proc.RefusedError](err)
			if !ok || refused.Code != tc.code || !strings.Contains(refused.Text, tc.text) {
				t.Fatalf("%#v (%v)", err, err)
			}
			if strings.Contains(refused.Text, "secret") {
				t.Errorf("tells the environment: %s", refused.Text)
			}
		})
	}
}

func TestR26OnlyItsOwnTree(t *testing.T) {
	t.Parallel()
	const script = `for i in 1 2; do sleep 300 & done; echo up; wait`
	a, b := start(t, "sh", "-c", script), start(t, "sh", "-c", script)
	a.out.waitFor(t, "up")
	b.out.waitFor(t, "up")
	a.Stop(syscall.SIGTERM, time.Second)
	a.wait(t, 3*time.Second)
	if err := b.Signal(0, true); err != nil {
		t.Error("the other tree is gone too")
	}
	left, err := proc.Sweep(func(m string) bool { return m == b.marker })
	if err != nil || len(left) != 3 {
		t.Errorf("swept %+v (%v), want sh and two sleeps", left, err)
	}
	if got := b.wait(t, 3*time.Second); got.Killed || got.Signal != syscall.SIGKILL {
		t.Errorf("outcome %+v", got)
	}
}

// daemon leaves the session and the process group twice over.
const daemon = `
import os, sys, time
if os.fork(): time.sleep(float(sys.argv[1])); os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
os.setsid()
if sys.argv[2] == "clean": os.execve("/bin/sleep", ["sleep", "301"], {})
print("up", flush=True)
time.sleep(301)
`

func TestDaemonsAreFound(t *testing.T) { //nolint:paralleltest // says why below
	// One after the other and with no other attempt around: a daemon that keeps neither session nor environment can be
	// told only by being the only attempt's.
	for _, how := range []string{"marked", "clean"} {
		t.Run("after the end "+how, func(t *testing.T) {
			got := start(t, "python3", "-c", daemon, "0.5", how).wait(t, 4*time.Second)
			if got.ExitCode != 0 || len(got.Survivors) != 1 {
				t.Errorf("outcome %+v", got)
			}
		})
	}
	t.Run("on stop", func(t *testing.T) {
		a := start(t, "python3", "-c", daemon, "300", "marked")
		a.out.waitFor(t, "up")
		a.Stop(syscall.SIGTERM, time.Second)
		if got := a.wait(t, 3*time.Second); got.Killed || len(got.Survivors) != 0 {
			t.Errorf("outcome %+v", got)
		}
	})
}
