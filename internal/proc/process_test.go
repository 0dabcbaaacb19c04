package proc_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/proc"
)

func run(t *testing.T, spec proc.Spec) (string, proc.Outcome) {
	t.Helper()
	out := newSink()
	if spec.Stdout == nil {
		spec.Stdout = out
	}
	spec.Marker = marker()
	spec.Env = append(spec.Env, "PATH="+os.Getenv("PATH"))
	p, err := proc.Start(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Stop(syscall.SIGKILL, 0); p.Wait() })
	got := attempt{Process: p, out: out, marker: spec.Marker}.wait(t, 10*time.Second)
	return out.String(), got
}

func TestStdin(t *testing.T) {
	t.Parallel()
	big := bytes.Repeat([]byte("0123456789abcde\n"), 1<<16) // far more than a pipe holds
	out, _ := run(t, proc.Spec{Argv: []string{"cat"}, Stdin: big})
	if out != string(big) {
		t.Errorf("%d bytes came back of %d", len(out), len(big))
	}
	if _, got := run(t, proc.Spec{Argv: []string{"true"}, Stdin: big}); got.ExitCode != 0 {
		t.Errorf("unread stdin: %+v", got)
	}
	if out, _ := run(t, proc.Spec{Argv: []string{"cat"}}); out != "" {
		t.Errorf("no stdin gave %q", out)
	}
}

func TestOrderOfOneAndTwoPipes(t *testing.T) {
	t.Parallel()
	argv := []string{"sh", "-c", `for i in 1 2 3 4 5; do echo o$i; echo e$i >&2; done`}
	out, _ := run(t, proc.Spec{Argv: argv})
	if want := "o1\ne1\no2\ne2\no3\ne3\no4\ne4\no5\ne5\n"; out != want {
		t.Errorf("%q", out)
	}
	errOut := newSink()
	out, _ = run(t, proc.Spec{Argv: argv, Stderr: errOut})
	if out != "o1\no2\no3\no4\no5\n" || errOut.String() != "e1\ne2\ne3\ne4\ne5\n" {
		t.Errorf("%q and %q", out, errOut.String())
	}
}

// R28: what the task can see of the agent is its own environment and three descriptors.
func TestR28NothingLeaksIn(t *testing.T) {
	t.Parallel()
	out, _ := run(t, proc.Spec{
		Argv: []string{"sh", "-c", "env; ls -l /proc/self/fd"},
		Env:  []string{"A=1", proc.MarkerEnv + "=somebody else's"},
	})
	for line := range strings.SplitSeq(out, "\n") {
		name, _, isVar := strings.Cut(line, "=")
		if isVar && !slices.Contains([]string{"A", "PATH", "PWD", "OLDPWD", "SHLVL", "_", proc.MarkerEnv}, name) {
			t.Errorf("variable %s", line)
		}
		if strings.Contains(line, "else's") {
			t.Errorf("foreign marker: %s", line)
		}
	}
	if n := strings.Count(out, " -> "); n != 4 { // 0, 1, 2 and the directory that ls itself reads
		t.Errorf("descriptors:\n%s", out)
	}
}

func TestSessionAndDirectory(t *testing.T) {
	t.Parallel()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	out, _ := run(t, proc.Spec{Argv: []string{"sh", "-c", `pwd; echo $$; cut -d" " -f5,6 /proc/self/stat`}, Dir: dir})
	f := strings.Fields(out)
	if len(f) != 4 || f[0] != dir || f[1] != f[2] || f[1] != f[3] {
		t.Errorf("directory, pid, group and session: %q", f)
	}
}

func TestRelativeProgramIsBelowDir(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "prog"), []byte("#!/bin/sh\necho here\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, spec := range []proc.Spec{
		{Argv: []string{"./prog"}, Dir: dir},
		{Argv: []string{"prog"}, Dir: dir, Env: []string{"PATH=/no/such:."}},
	} {
		spec.Env = append([]string{"PATH=/bin"}, spec.Env...)
		p, err := proc.Start(spec)
		if err != nil {
			t.Fatal(err)
		}
		if got := p.Wait(); got.ExitCode != 0 {
			t.Errorf("%v: %+v", spec.Argv, got)
		}
	}
}

func TestUsage(t *testing.T) {
	t.Parallel()
	_, got := run(t, proc.Spec{Argv: []string{"python3", "-c", "x = bytearray(64 << 20)\nfor i in range(3000000): pass"}})
	if got.MaxRSSBytes < 64<<20 || got.UserCPU <= 0 || got.SystemCPU <= 0 || !got.Ended.After(got.Started) {
		t.Errorf("%+v", got)
	}
}

// Usage of a daemon comes from the agent's own reaping, nobody else waits for it.
func TestUsageOfOrphans(t *testing.T) { //nolint:paralleltest // usage of orphans cannot be told apart
	script := `python3 -c "for i in range(6000000): pass" & python3 -c "import time; time.sleep(3)"`
	_, got := run(t, proc.Spec{Argv: []string{"sh", "-c", `(` + script + `) `}})
	if got.UserCPU < 50*time.Millisecond {
		t.Errorf("%+v", got)
	}
}

func TestStopAgainBringsTheEndForward(t *testing.T) {
	t.Parallel()
	a := start(t, "sh", "-c", `trap 'echo got' TERM; echo up; while :; do sleep 0.1; done`)
	a.out.waitFor(t, "up")
	begin := time.Now()
	a.Stop(syscall.SIGTERM, time.Hour)
	a.out.waitFor(t, "got")
	a.Stop(syscall.SIGTERM, 2*time.Hour) // later: no effect
	a.Stop(syscall.SIGTERM, 500*time.Millisecond)
	got := a.wait(t, 3*time.Second)
	if !got.Killed || time.Since(begin) < 500*time.Millisecond || strings.Count(a.out.String(), "got") != 1 {
		t.Errorf("%+v, output %q", got, a.out.String())
	}
	a.Stop(syscall.SIGTERM, 0) // after the end: no effect
	if err := a.Signal(syscall.SIGTERM, false); !errors.Is(err, os.ErrProcessDone) {
		t.Error(err)
	}
	if err := a.Signal(syscall.SIGTERM, true); !errors.Is(err, os.ErrProcessDone) {
		t.Error(err)
	}
}

func TestKillNow(t *testing.T) {
	t.Parallel()
	a := start(t, "sleep", "600")
	a.Stop(syscall.SIGTERM, 0)
	if got := a.wait(t, time.Second); got.Signal != syscall.SIGKILL || !got.Killed {
		t.Errorf("%+v", got)
	}
}

// The main process dies of the signal at once, what it started needs its grace.
func TestChildKeepsItsGrace(t *testing.T) {
	t.Parallel()
	a := start(t, "sh", "-c", `python3 -c "$0" & wait; :`, handler)
	a.out.waitFor(t, "up")
	a.Stop(syscall.SIGTERM, 10*time.Second)
	got := a.wait(t, 5*time.Second)
	if got.Signal != syscall.SIGTERM || got.Killed || len(got.Survivors) != 0 {
		t.Errorf("%+v", got)
	}
}

func TestStoppedTreeGetsItsSignal(t *testing.T) {
	t.Parallel()
	a := start(t, "sh", "-c", `trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.1; done`)
	a.out.waitFor(t, "up")
	if err := a.Signal(syscall.SIGSTOP, true); err != nil {
		t.Fatal(err)
	}
	// It stops when it is next scheduled, or waits in vfork for a child that was stopped before its exec.
	for stat := ""; !strings.Contains(stat, ") T ") && !strings.Contains(stat, ") D "); {
		raw, err := os.ReadFile("/proc/" + strconv.Itoa(a.PID()) + "/stat")
		if err != nil {
			t.Fatal(err)
		}
		stat = string(raw)
	}
	a.Stop(syscall.SIGTERM, 5*time.Second)
	if got := a.wait(t, 3*time.Second); got.ExitCode != 5 || got.Killed {
		t.Errorf("%+v", got)
	}
}

func TestSignalMainOrTree(t *testing.T) {
	t.Parallel()
	const script = `trap 'echo main' USR1; (trap 'echo child' USR1; echo up; while :; do sleep 0.05; done) & while :; do wait; done`
	a := start(t, "sh", "-c", script)
	a.out.waitFor(t, "up")
	if err := a.Signal(syscall.SIGUSR1, false); err != nil {
		t.Fatal(err)
	}
	a.out.waitFor(t, "main")
	if strings.Contains(a.out.String(), "child") {
		t.Error("the child got it too")
	}
}

func TestLeftoverThatIgnoresTerm(t *testing.T) {
	t.Parallel()
	a := start(t, "sh", "-c", `sh -c "trap '' TERM; echo up; while :; do sleep 1; done" & sleep 0.3; exit 3`)
	got := a.wait(t, 4*time.Second)
	if got.ExitCode != 3 || got.Killed || len(got.Survivors) == 0 {
		t.Errorf("%+v", got)
	}
}

// Every generation leaves the session and lives for a moment only.
func TestForkStormIsKilled(t *testing.T) {
	t.Parallel()
	const storm = `
import os, time
print("up", flush=True)
while True:
    if os.fork() == 0:
        os.setsid()
        if os.fork(): os._exit(0)
        time.sleep(0.5)
        os._exit(0)
    time.sleep(0.002)
`
	a := start(t, "python3", "-c", storm)
	a.out.waitFor(t, "up")
	time.Sleep(300 * time.Millisecond) // let it grow
	a.Stop(syscall.SIGTERM, 100*time.Millisecond)
	a.wait(t, 5*time.Second)
}

// A process that is not of the tree, here this one, has got hold of the output over /proc.
func TestEscapedHolderOfTheOutput(t *testing.T) {
	t.Parallel()
	a := start(t, "sh", "-c", "echo up; sleep 1; echo end")
	a.out.waitFor(t, "up")
	holder, err := os.OpenFile("/proc/"+strconv.Itoa(a.PID())+"/fd/1", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Close()
	if got := a.wait(t, 5*time.Second); !got.OutputCut || a.out.String() != "up\nend\n" {
		t.Errorf("%+v, output %q", got, a.out.String())
	}
}

// slowWriter blocks for longer than the end of the output is waited for.
type slowWriter struct{ n int }

func (w *slowWriter) Write(b []byte) (int, error) {
	if w.n == 0 {
		time.Sleep(2500 * time.Millisecond)
	}
	w.n += len(b)
	return len(b), nil
}

// A slow writer delays the end but loses nothing, although the wait for the end of the output is bounded.
func TestSlowWriterLosesNothing(t *testing.T) {
	t.Parallel()
	w := &slowWriter{}
	_, got := run(t, proc.Spec{Argv: []string{"head", "-c", "100000", "/dev/zero"}, Stdout: w})
	if w.n != 100000 || got.OutputCut {
		t.Errorf("%d bytes, %+v", w.n, got)
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, io.ErrShortWrite }

func TestBrokenWriterDoesNotStallTheTask(t *testing.T) {
	t.Parallel()
	_, got := run(t, proc.Spec{Argv: []string{"head", "-c", "1000000", "/dev/zero"}, Stdout: brokenWriter{}})
	if got.ExitCode != 0 || !errors.Is(got.OutputErr, io.ErrShortWrite) {
		t.Errorf("%+v", got)
	}
}

// Other users of os/exec in the agent keep their children.
func TestForeignChildrenAreLeftAlone(t *testing.T) {
	t.Parallel()
	for range 50 {
		cmd := exec.Command("sh", "-c", "sleep 0.02; exit 9")
		a := start(t, "true")
		if err := cmd.Run(); cmd.ProcessState.ExitCode() != 9 {
			t.Fatal(err)
		}
		a.Wait()
	}
}

// A frozen process does not die of KILL. The attempt ends all the same.
func TestUnkillable(t *testing.T) {
	t.Parallel()
	dir := "/sys/fs/cgroup/freezer/millrace-test-" + strconv.Itoa(os.Getpid())
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skip("needs a version 1 freezer cgroup and root")
	}
	t.Cleanup(func() {
		for range 100 {
			if os.Remove(dir) == nil {
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
		t.Error("freezer cgroup could not be removed")
	})
	write := func(file, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0); err != nil {
			t.Error(err)
		}
	}
	p, err := proc.Start(proc.Spec{Argv: []string{"sleep", "600"}, Marker: marker()})
	if err != nil {
		t.Fatal(err)
	}
	write("cgroup.procs", strconv.Itoa(p.PID()))
	write("freezer.state", "FROZEN")
	defer write("freezer.state", "THAWED")
	p.Stop(syscall.SIGTERM, 0)
	got := p.Wait()
	if got.ExitCode != 137 || !got.Killed || len(got.Stuck) != 1 || got.Stuck[0].PID != p.PID() {
		t.Errorf("%+v", got)
	}
}

// The peak of a small process is not the agent's, whose memory it shared until its exec.
func TestMemoryOfASmallTask(t *testing.T) {
	t.Parallel()
	_, got := run(t, proc.Spec{Argv: []string{"sleep", "0.6"}})
	if got.MaxRSSBytes == 0 || got.MaxRSSBytes > 10<<20 {
		t.Errorf("%d bytes for sleep", got.MaxRSSBytes)
	}
}
