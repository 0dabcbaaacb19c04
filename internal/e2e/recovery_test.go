//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/redistest"
	"github.com/millrace/millrace/internal/task"
)

// S01: the owner is killed; another agent starts attempt 2 within TTL + scan + 1 s.
func TestS01OwnerKilled(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	agents := map[string]*service{"a": s.agent("a", 2), "b": s.agent("b", 2)}
	marks := filepath.Join(s.dir, "marks")
	id := s.sh(`echo $MILLRACE_ATTEMPT $(date +%s%N) >> ` + marks + `; [ $MILLRACE_ATTEMPT = 1 ] && sleep 600; exit 0`)
	s.running(id)
	s.until("attempt 1 writes", func() bool { b, _ := os.ReadFile(marks); return len(b) > 0 })
	owner := s.show(id).Worker
	killed := time.Now()
	agents[owner[:1]].kill()
	s.settled(id)
	v := s.show(id)
	if v.State != "succeeded" || v.Attempt != 2 || v.Lost != 1 || v.Attempts[0].Reason != "worker_lost" || v.Worker == owner {
		t.Errorf("%+v", v)
	}
	raw, _ := os.ReadFile(marks)
	var attempt, at int64
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	_, _ = fmt.Sscan(lines[len(lines)-1], &attempt, &at)
	if attempt != 2 || len(lines) != 2 {
		t.Fatalf("runs: %q", lines)
	}
	if d := time.Unix(0, at).Sub(killed); d > ttl+scan+time.Second+2*time.Second { // 2 s for a noisy machine
		t.Errorf("attempt 2 began %v after the kill", d)
	}
	s.noTree(id)
}

// S02: a task longer than every TTL stays with its living owner.
func TestS02LongTaskIsNeverTaken(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.agent("a", 1)
	s.agent("b", 1)
	id := s.sh(`end=$(($(date +%s)+15)); while [ $(date +%s) -lt $end ]; do :; done`)
	s.settled(id)
	if v := s.show(id); v.State != "succeeded" || v.Attempt != 1 {
		t.Errorf("%+v", v)
	}
}

// S03: an agent with ten claimed tasks is killed and comes back under a new id; all ten run.
func TestS03ClaimedTasksSurvive(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	a := s.agent("a", 10)
	var ids []string
	for range 10 {
		ids = append(ids, s.sh(`[ $MILLRACE_ATTEMPT = 1 ] && sleep 600; exit 0`))
	}
	for _, id := range ids {
		s.running(id)
	}
	a.kill()
	s.agent("a", 10)
	s.settled(ids...)
	for _, id := range ids {
		if v := s.show(id); v.State != "succeeded" || v.Attempt != 2 {
			t.Errorf("%+v", v)
		}
	}
	s.until("the dead worker is buried", func() bool {
		ws, err := s.st.Workers(context.Background())
		return err == nil && len(ws) == 1
	})
}

// S04: one of two reapers is killed and the other frozen for a while; orphans are recovered all the same.
func TestS04ReaperKilled(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	second := s.start("reaper", nil)
	second.await("reaper started")
	a := s.agent("a", 2)
	id := s.sh(`[ $MILLRACE_ATTEMPT = 1 ] && sleep 600; exit 0`)
	s.running(id)
	a.kill()
	second.kill()
	s.agent("b", 2)
	s.settled(id)
}

// S08: a task that kills its agent each time ends with its story in the dead letters; others finish.
func TestS08Poison(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	stop := make(chan struct{})
	ended := make(chan struct{})
	go func() { // restarts the agent as a supervisor does
		defer close(ended)
		for n := 0; ; n++ {
			p := s.start("agent", map[string]string{"AGENT_NAME": "a", "SLOTS": "2", "STATE_DIR": filepath.Join(s.dir, "state")})
			select {
			case <-p.done:
			case <-stop:
				return
			}
		}
	}()
	defer func() { close(stop); <-ended }()
	s.until("an agent is there", func() bool { ws, _ := s.st.Workers(context.Background()); return len(ws) > 0 })
	poison := s.sh(`kill -9 $PPID; sleep 600`, "--max-lost", "2")
	var ids []string
	for range 20 {
		ids = append(ids, s.sh(`exit 0`, "--max-lost", "100"))
	}
	s.settled(append(ids, poison)...)
	v := s.show(poison)
	if v.State != "failed" || v.Reason != "worker_lost" || v.Lost != 2 {
		t.Errorf("%+v", v)
	}
	dead, err := s.st.Dead(context.Background(), 10)
	if err != nil || len(dead) != 1 || dead[0].Letter.GetTask() != poison || !strings.Contains(dead[0].Letter.GetReason(), "agent lost 2 times") {
		t.Errorf("dead letters: %v %v", dead, err)
	}
	for _, id := range ids {
		if s.state(id) != task.Succeeded {
			t.Errorf("%s %v", id, s.state(id))
		}
	}
}

// S10: no agent; a queued, a delayed and a retried task are cancelled, the dispatcher restarts, an agent comes: none runs.
func TestS10CancelWithoutAgents(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	mark := filepath.Join(s.dir, "ran")
	a := s.agent("a", 1)
	retried := s.sh(`[ $MILLRACE_ATTEMPT = 1 ] || touch `+mark+`; exit 1`, "--max-attempts", "2")
	s.until("in retry", func() bool { return s.state(retried) == task.Delayed || s.state(retried) == task.Queued })
	a.term()
	queued := s.sh(`touch ` + mark)
	delayed := s.sh(`touch `+mark, "--delay", "5s")
	for _, id := range []string{retried, queued, delayed} {
		if r := s.cli("cancel", id); r.code != 0 {
			t.Fatalf("cancel: %s", r.err)
		}
	}
	s.settled(retried, queued, delayed)
	s.agent("b", 4)
	later := s.sh("exit 0", "--priority", "low")
	s.settled(later)
	for _, id := range []string{retried, queued, delayed} {
		if s.state(id) != task.Cancelled {
			t.Errorf("%s %v", id, s.state(id))
		}
	}
	if _, err := os.Stat(mark); err == nil {
		t.Error("a cancelled task ran")
	}
}

// S11: Redis is away for 10 s with tasks running, queued and delayed; everything goes on by itself.
func TestS11RedisRestart(t *testing.T) {
	t.Parallel()
	s := newSystem(t, redistest.WithAOF())
	s.agent("a", 3)
	marks := filepath.Join(s.dir, "marks")
	var ids []string
	for i := range 3 {
		ids = append(ids, s.sh(fmt.Sprintf(`echo r%d >> %s; sleep 14`, i, marks)))
	}
	for _, id := range ids {
		s.running(id)
	}
	for i := range 20 {
		ids = append(ids, s.sh(fmt.Sprintf(`echo q%d >> %s`, i, marks)))
	}
	for i := range 5 {
		ids = append(ids, s.sh(fmt.Sprintf(`echo d%d >> %s`, i, marks), "--delay", "15s"))
	}
	time.Sleep(1500 * time.Millisecond) // what everysec may lose is not what this is about
	s.redis.Kill()
	time.Sleep(10 * time.Second) // the outage
	s.redis.Restart(t)
	s.settled(ids...)
	raw, _ := os.ReadFile(marks)
	seen := map[string]int{}
	for l := range strings.FieldsSeq(string(raw)) {
		seen[l]++
	}
	if len(seen) != 28 {
		t.Errorf("%d of 28 tasks ran", len(seen))
	}
	for k, n := range seen {
		if n != 1 {
			t.Errorf("%s ran %d times", k, n)
		}
	}
}

// S12: the dispatch stream is deleted while an agent waits; tasks submitted afterwards run.
func TestS12StreamDeleted(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	a := s.agent("a", 2)
	s.settled(s.sh("exit 0"))
	if err := s.st.Client().Del(t.Context(), "dispatch:default:normal").Err(); err != nil {
		t.Fatal(err)
	}
	before := strings.Count(a.output(), "\n")
	var ids []string
	for range 5 {
		ids = append(ids, s.sh("exit 0"))
	}
	s.settled(ids...)
	if n := strings.Count(a.output(), "\n") - before; n > 15 { // five lines are the tasks' own
		t.Errorf("%d log lines", n)
	}
}

// Queued tasks whose stream is deleted are found by their records and run.
func TestS12QueuedTasksSurviveTheirStream(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.agent("a", 1)
	blocker := s.sh("sleep 3")
	s.running(blocker)
	var ids []string
	for range 5 {
		ids = append(ids, s.sh("exit 0"))
	}
	time.Sleep(1500 * time.Millisecond) // until the reaper has seen the group once
	if err := s.st.Client().Del(t.Context(), "dispatch:default:normal").Err(); err != nil {
		t.Fatal(err)
	}
	s.settled(append(ids, blocker)...)
}

// S14 for the whole system: the entry of a running task is deleted and its owner dies.
func TestS14Ghost(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	a := s.agent("a", 1)
	id := s.sh(`[ $MILLRACE_ATTEMPT = 1 ] && sleep 600; exit 0`)
	s.running(id)
	r, err := s.st.Record(t.Context(), task.ID(id))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.st.Client().XDel(t.Context(), "dispatch:default:normal", r.Entry).Err(); err != nil {
		t.Fatal(err)
	}
	a.kill()
	s.agent("b", 1)
	s.settled(id)
}

// S17: tasks are added before anything of ours has ever run.
func TestS17SubmitBeforeEverything(t *testing.T) {
	t.Parallel()
	s := bare(t)
	out := filepath.Join(s.dir, "out")
	var ids []string
	for i := range 5 {
		id := fmt.Sprintf("early-%d", i)
		ids = append(ids, id)
		s.xadd("json", fmt.Sprintf(`{"id":%q,"command":{"argv":["sh","-c","echo %d >> %s"]}}`, id, i, out))
	}
	s.agent("a", 1)
	s.start("reaper", nil)
	s.dispatcher()
	s.settled(ids...)
	if raw, _ := os.ReadFile(out); string(raw) != "0\n1\n2\n3\n4\n" {
		t.Errorf("order: %q", raw)
	}
}

// S22: a busy agent holds nothing back from an idle one.
func TestS22NoPrefetch(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.agent("a", 2)
	busy := []string{s.sh("sleep 20"), s.sh("sleep 20")}
	for _, id := range busy {
		s.running(id)
	}
	var ids []string
	for range 10 {
		ids = append(ids, s.sh("sleep 0.2"))
	}
	s.agent("b", 10)
	begun := time.Now()
	s.final(ids...)
	if d := time.Since(begun); d > 12*time.Second {
		t.Errorf("took %v", d)
	}
	for _, id := range ids {
		if v := s.show(id); !strings.HasPrefix(v.Worker, "b-") {
			t.Errorf("%s ran on %s", id, v.Worker)
		}
	}
}

// R21: only the agent itself, not its guard, is killed: no process of the task is left, and it runs again.
func TestR21AgentKilledBehindItsGuard(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	a := s.agent("a", 1)
	id := s.sh(`[ $MILLRACE_ATTEMPT = 1 ] || exit 0; sleep 600 & sleep 600`)
	s.running(id)
	s.until("its tree is there", func() bool { return len(trees(id)) >= 3 })
	child := childOf(t, a.cmd.Process.Pid)
	if err := syscall.Kill(child, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	s.noTree(id)
	a.exit()
	s.agent("b", 1)
	s.settled(id)
	if v := s.show(id); v.Attempt != 2 {
		t.Errorf("%+v", v)
	}
}

// A frozen agent: its tasks are dead before its heartbeat ends, and after the thaw it goes on under a new id.
func TestFrozenAgent(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	a := s.agent("a", 1)
	id := s.sh(`[ $MILLRACE_ATTEMPT = 1 ] || exit 0; sleep 600`)
	s.running(id)
	child := childOf(t, a.cmd.Process.Pid)
	if err := syscall.Kill(child, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	s.noTree(id)
	if st := s.state(id); st != task.Running {
		t.Errorf("its task is %v already when its tree ends", st)
	}
	s.agent("b", 1)
	s.settled(id)
	_ = syscall.Kill(child, syscall.SIGCONT)
}

// An agent that is cut off from Redis and from the dispatchers kills its tasks before anybody starts them again.
func TestCutOffAgentFencesItself(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	proxy := redistest.NewProxy(t, s.redis.Addr())
	marks := filepath.Join(s.dir, "marks")
	cut := s.start("agent", map[string]string{
		"AGENT_NAME": "cut", "SLOTS": "1", "STATE_DIR": filepath.Join(s.dir, "cut"),
		"REDIS_URL": proxy.URL(), "TOKEN": "another-token-so-that-no-dispatcher-welcomes-it",
	})
	cut.await("agent started")
	id := s.sh(`while :; do echo $MILLRACE_ATTEMPT $(date +%s%N) >> ` + marks + `; [ $MILLRACE_ATTEMPT = 2 ] && exit 0; sleep 0.05; done`)
	s.running(id)
	s.until("attempt 1 writes", func() bool { b, _ := os.ReadFile(marks); return len(b) > 0 })
	s.agent("b", 1)
	proxy.Cut()
	s.settled(id)
	raw, _ := os.ReadFile(marks)
	second := false
	for l := range strings.SplitSeq(strings.TrimSpace(string(raw)), "\n") {
		if strings.HasPrefix(l, "2 ") {
			second = true
		} else if second {
			t.Fatal("attempt 1 wrote after attempt 2 had begun")
		}
	}
	if !second {
		t.Error("attempt 2 never ran")
	}
	proxy.Restore()
}

// While Redis is down for all, or hangs, within the hold limit, nothing is killed.
func TestHoldsWhileRedisIsAway(t *testing.T) {
	t.Parallel()
	for name, outage := range map[string]struct {
		begin, end func(*testing.T, *redistest.Server)
	}{
		"down":  {func(_ *testing.T, r *redistest.Server) { r.Kill() }, func(t *testing.T, r *redistest.Server) { t.Helper(); r.Restart(t) }},
		"hangs": {func(_ *testing.T, r *redistest.Server) { r.Freeze() }, func(_ *testing.T, r *redistest.Server) { r.Thaw() }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSystem(t, redistest.WithAOF())
			s.agent("a", 1)
			id := s.sh(`sleep 14; echo done $MILLRACE_ATTEMPT`)
			s.running(id)
			s.until("connected", func() bool {
				ws, err := s.st.Workers(context.Background())
				return err == nil && len(ws) == 1 && len(ws[0].Dispatchers) == 1
			})
			time.Sleep(1500 * time.Millisecond) // what everysec may lose is not what this is about
			outage.begin(t, s.redis)
			time.Sleep(3 * ttl) // the outage
			outage.end(t, s.redis)
			s.settled(id)
			if v := s.show(id); v.State != "succeeded" || v.Attempt != 1 {
				t.Errorf("%+v", v)
			}
			if r := s.cli("logs", id, "-f"); strings.TrimSpace(r.out) != "done 1" {
				t.Errorf("log %q", r.out)
			}
		})
	}
}

func childOf(t *testing.T, pid int) int {
	t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if err != nil {
		t.Fatal(err)
	}
	var child int
	if _, err := fmt.Sscan(string(raw), &child); err != nil {
		all, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
		for _, f := range all {
			if raw, _ := os.ReadFile(f); len(raw) > 0 {
				_, _ = fmt.Sscan(string(raw), &child)
			}
		}
	}
	if child == 0 {
		t.Fatalf("%d has no child", pid)
	}
	return child
}
