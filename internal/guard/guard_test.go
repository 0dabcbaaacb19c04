package guard_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/guard"
	"github.com/millrace/millrace/internal/proc"
)

// roleEnv makes the test binary a guarded agent instead; its value is what the agent does.
const roleEnv = "MILLRACE_GUARD_TEST_ROLE"

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		os.Exit(guarded(role))
	}
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/millrace/millrace/internal/proc.forkLoop"))
}

// guarded is main of an agent in small.
func guarded(role string) int {
	code, link, err := guard.Supervise(guard.Options{StuckAfter: 500 * time.Millisecond})
	if link == nil {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		return code
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1)
	prefix := os.Getenv("PREFIX")
	if err := link.Announce(prefix); err != nil {
		fmt.Println("announce:", err)
		return 1
	}
	tasks := startTasks(prefix)
	link.Extend(guard.Now().Add(time.Hour))
	if role == "late" {
		link.Extend(guard.Now().Add(300 * time.Millisecond))
	}
	fmt.Println("agent", os.Getpid(), os.Getppid())
	for {
		select {
		case sig := <-signals:
			fmt.Println("signal", sig)
			if sig == syscall.SIGTERM {
				return 42
			}
			if sig == syscall.SIGHUP { // come back
				link.Disarm()
			}
		case <-link.Lost():
			for _, p := range tasks {
				p.Stop(syscall.SIGKILL, 0)
				p.Wait()
			}
			fmt.Println("lost")
			return 3
		}
	}
}

// tree has a child in the session and a daemon outside of it.
const tree = `
import os, time
if os.fork() and os.fork(): time.sleep(600)
os.setsid()
if os.fork(): os._exit(0)
time.sleep(600)
`

func startTasks(prefix string) (tasks []*proc.Process) {
	for i := range 2 {
		p, err := proc.Start(proc.Spec{
			Argv: []string{"sh", "-c", `sleep 600 & python3 -c "$0"`, tree}, Env: os.Environ(), Marker: prefix + strconv.Itoa(i),
		})
		if err != nil {
			fmt.Println("start:", err)
			os.Exit(1)
		}
		tasks = append(tasks, p)
	}
	return tasks
}

// system is a guard with an agent with two trees.
type system struct {
	cmd          *exec.Cmd
	lines        *bufio.Reader
	guard, agent int
	prefix       string
}

func start(t *testing.T, role string) *system {
	t.Helper()
	s := &system{prefix: fmt.Sprintf("guardtest-%d-%s/", os.Getpid(), strings.ReplaceAll(t.Name(), "/", "-"))}
	s.cmd = exec.Command("/proc/self/exe")
	s.cmd.Env = append(os.Environ(), roleEnv+"="+role, "PREFIX="+s.prefix)
	s.cmd.Stderr = t.Output()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	s.cmd.Stdout = w
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
		if s.agent != 0 {
			_ = syscall.Kill(s.agent, syscall.SIGKILL)
		}
		_, _ = io.Copy(io.Discard, r)
		r.Close()
		_, _ = proc.Sweep(s.mine)
	})
	s.lines = bufio.NewReader(r)
	if _, err := fmt.Sscanf(s.line(t), "agent %d %d", &s.agent, &s.guard); err != nil {
		t.Fatal(err)
	}
	if s.guard != s.cmd.Process.Pid {
		t.Fatalf("the agent's parent is %d, not the guard %d", s.guard, s.cmd.Process.Pid)
	}
	return s
}

func (s *system) mine(marker string) bool { return strings.HasPrefix(marker, s.prefix) }

func (s *system) line(t *testing.T) string {
	t.Helper()
	line, err := s.lines.ReadString('\n')
	if err != nil {
		t.Fatalf("agent's output ended: %v", err)
	}
	return line
}

// code waits for the guard's end.
func (s *system) code() int {
	_ = s.cmd.Wait()
	return s.cmd.ProcessState.ExitCode()
}

// alive counts the tasks' processes by their marker.
func (s *system) alive() (n int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		env, err := os.ReadFile("/proc/" + e.Name() + "/environ")
		if err == nil && strings.Contains("\x00"+string(env), "\x00"+proc.MarkerEnv+"="+s.prefix) {
			n++
		}
	}
	return n
}

// dead waits until no process of the tasks is left.
func (s *system) dead(t *testing.T, limit time.Duration) {
	t.Helper()
	begin := time.Now()
	for s.alive() > 0 {
		if time.Since(begin) > limit {
			t.Fatalf("%d processes are left after %s", s.alive(), limit)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// grown waits until both trees are complete: sh, sleep, python, its two children and the daemon's.
func (s *system) grown(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); s.alive() < 10; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("only %d processes", s.alive())
		}
	}
}

func TestCleanEnd(t *testing.T) {
	t.Parallel()
	s := start(t, "wait")
	s.grown(t)
	if err := syscall.Kill(s.guard, syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	if got := s.line(t); got != "signal user defined signal 1\n" {
		t.Error(got)
	}
	if err := syscall.Kill(s.guard, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if got := s.code(); got != 42 {
		t.Errorf("exit code %d", got)
	}
	s.dead(t, 0)
}

func TestAgentKilled(t *testing.T) {
	t.Parallel()
	s := start(t, "wait")
	s.grown(t)
	if err := syscall.Kill(s.agent, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if got := s.code(); got != 137 {
		t.Errorf("exit code %d", got)
	}
	s.dead(t, 0)
}

func TestAgentStopped(t *testing.T) {
	t.Parallel()
	s := start(t, "late")
	if err := syscall.Kill(s.agent, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	s.dead(t, 2*time.Second)
	if got := s.code(); got != 137 {
		t.Errorf("exit code %d", got)
	}
}

func TestAgentLateComesBack(t *testing.T) {
	t.Parallel()
	s := start(t, "late")
	s.dead(t, 2*time.Second)
	if err := syscall.Kill(s.agent, syscall.SIGHUP); err != nil { // makes it disarm
		t.Fatal(err)
	}
	s.line(t)
	time.Sleep(time.Second) // twice as long as a stuck agent may live
	if err := syscall.Kill(s.guard, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if got := s.code(); got != 42 {
		t.Errorf("exit code %d", got)
	}
}

func TestGuardKilled(t *testing.T) {
	t.Parallel()
	s := start(t, "wait")
	s.grown(t)
	if err := syscall.Kill(s.guard, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if got := s.line(t); got != "lost\n" {
		t.Error(got)
	}
	s.dead(t, time.Second)
}

func TestBothKilledThenSweep(t *testing.T) {
	t.Parallel()
	s := start(t, "wait")
	s.grown(t)
	for _, pid := range []int{s.guard, s.agent} {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil { // so that neither sees the other die
			t.Fatal(err)
		}
	}
	for _, pid := range []int{s.guard, s.agent} {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	s.code()
	killed, err := proc.Sweep(s.mine)
	if err != nil || len(killed) == 0 {
		t.Errorf("swept %+v (%v)", killed, err)
	}
	s.dead(t, 0)
}
