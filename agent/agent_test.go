package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/guard"
	"github.com/millrace/millrace/internal/redistest"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/storetest"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// TestMain allows for the threads that start children, which live as long as the process.
func TestMain(m *testing.M) {
	redistest.Main(m, goleak.IgnoreAnyFunction("github.com/millrace/millrace/internal/proc.forkLoop"))
}

func testConfig(t *testing.T) Config {
	t.Helper()
	return Config{
		Queues: []string{"default"}, Slots: 4, StateDir: t.TempDir(), Name: "test", DrainTimeout: 100 * time.Millisecond, KeepWork: time.Hour,
		LogLimit: 1 << 20, SpoolLimit: 16 << 20,
		Timing: config.Timing{
			HeartbeatInterval: 500 * time.Millisecond, HeartbeatTTL: 3 * time.Second, LeaseTTL: 12 * time.Second,
			ScanInterval: time.Second, HoldLimit: 0,
		},
	}
}

// start runs an agent that may run processes too; without a dispatcher it watches Redis itself.
func start(t *testing.T, st *store.Store, cfg Config, opts ...Option) (stop func()) {
	t.Helper()
	a, err := New(cfg, Deps{Store: st, NoGuard: true}, opts...)
	if err != nil {
		t.Fatal(err)
	}
	stop = storetest.Run(t, a.Run)
	if err := a.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	return stop
}

func admit(t *testing.T, st *store.Store, id task.ID, spec *millracev1.Task) {
	t.Helper()
	raw, err := proto.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	out, err := st.Do(t.Context(), []*store.Change{{
		Move: task.Admit, ID: id, In: task.Input{To: task.Queued}, Spec: spec, SpecBytes: raw,
		Guess: store.Snapshot{Record: task.Record{State: task.None}}, Created: time.Now(),
	}})
	if err != nil || !out[0].Done {
		t.Fatalf("admit: %+v, %v", out, err)
	}
}

func callTask(handler, payload string) *millracev1.Task {
	return &millracev1.Task{Work: &millracev1.Task_Call{Call: &millracev1.Call{Handler: handler, Payload: []byte(payload)}}}
}

func shTask(script string) *millracev1.Task {
	return &millracev1.Task{Work: &millracev1.Task_Command{Command: &millracev1.Command{Argv: []string{"sh", "-c", script}}}}
}

// final waits for the end of a task and returns its record.
func final(t *testing.T, st *store.Store, id task.ID) *store.Record {
	t.Helper()
	storetest.Until(t, string(id)+" ends", func() bool { return storetest.State(t, st, id).Final() })
	r, err := st.Record(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func last(t *testing.T, r *store.Record) *millracev1.AttemptEnd {
	t.Helper()
	if len(r.Ends) == 0 {
		t.Fatalf("%s has no attempt", r.ID)
	}
	return r.Ends[len(r.Ends)-1]
}

func TestHandlerOutcomes(t *testing.T) {
	t.Parallel()
	st := storetest.Open(t)
	start(t, st, testConfig(t),
		Handle("ok", func(_ context.Context, c *Call) ([]byte, error) {
			return append([]byte("did "), c.Payload...), nil
		}),
		Handle("fails", func(context.Context, *Call) ([]byte, error) { return nil, errors.New("no luck") }),
		Handle("panics", func(context.Context, *Call) ([]byte, error) { panic("oh") }),
		Handle("large", func(context.Context, *Call) ([]byte, error) { return make([]byte, maxOutput+1), nil }),
		Handle("slow", func(ctx context.Context, _ *Call) ([]byte, error) { <-ctx.Done(); return nil, context.Cause(ctx) }))
	slow := callTask("slow", "")
	slow.Timeout = durationpb.New(100 * time.Millisecond)
	for id, spec := range map[task.ID]*millracev1.Task{
		"ok": callTask("ok", "it"), "fails": callTask("fails", ""), "panics": callTask("panics", ""),
		"large": callTask("large", ""), "slow": slow, "unknown": callTask("nobody", ""),
	} {
		admit(t, st, id, spec)
	}
	if r := final(t, st, "ok"); r.State != task.Succeeded || string(last(t, r).GetOutput()) != "did it" {
		t.Errorf("ok: %v %v", r.State, last(t, r))
	}
	for id, want := range map[task.ID]struct {
		reason millracev1.Reason
		word   string
	}{
		"fails": {millracev1.Reason_REASON_EXIT, "no luck"}, "panics": {millracev1.Reason_REASON_EXIT, "panic: oh"},
		"large": {millracev1.Reason_REASON_EXIT, "65537 bytes"}, "slow": {millracev1.Reason_REASON_TIMEOUT, "timeout"},
		"unknown": {millracev1.Reason_REASON_REFUSED, "nobody"},
	} {
		r := final(t, st, id)
		if e := last(t, r); r.State != task.Failed || e.GetReason() != want.reason || !strings.Contains(e.GetMessage(), want.word) {
			t.Errorf("%s: %v %v", id, r.State, e)
		}
	}
}

func TestRetriesWithBackoff(t *testing.T) {
	t.Parallel()
	st := storetest.Open(t)
	var runs atomic.Int32
	start(t, st, testConfig(t), Handle("third", func(_ context.Context, c *Call) ([]byte, error) {
		if runs.Add(1) < 3 {
			return nil, errors.New("not yet")
		}
		return nil, nil
	}))
	zero := 0.0
	spec := callTask("third", "")
	spec.Retry = &millracev1.Retry{MaxAttempts: 3, Backoff: &millracev1.Backoff{Initial: durationpb.New(10 * time.Millisecond), Jitter: &zero}}
	admit(t, st, "r", spec)
	for a := uint32(1); a < 3; a++ { // no dispatcher here: promote by hand
		storetest.Until(t, "delayed", func() bool {
			r, err := st.Record(t.Context(), "r")
			return err == nil && r.State == task.Delayed && r.Attempt == a+1
		})
		promote(t, st, "r")
	}
	r := final(t, st, "r")
	if r.State != task.Succeeded || r.Attempt != 3 || r.Failures != 2 || len(r.Ends) != 3 {
		t.Errorf("%+v", r)
	}
}

func promote(t *testing.T, st *store.Store, id task.ID) {
	t.Helper()
	r, err := st.Record(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	out, err := st.Do(t.Context(), []*store.Change{{Move: task.Promote, ID: id, Guess: r.Snapshot, In: task.Input{Attempt: r.Attempt}}})
	if err != nil || !out[0].Done {
		t.Fatalf("promote: %+v, %v", out, err)
	}
}

func TestCommandOutcomes(t *testing.T) {
	t.Parallel()
	st := storetest.Open(t)
	cfg := testConfig(t)
	start(t, st, cfg)
	missing := &millracev1.Task{Work: &millracev1.Task_Command{Command: &millracev1.Command{Argv: []string{"/no/such/program"}}}}
	baddir := shTask("true")
	baddir.GetCommand().Dir = "/no/such/dir"
	slow := shTask("sleep 600 & wait")
	slow.Timeout, slow.Grace = durationpb.New(200*time.Millisecond), durationpb.New(time.Second)
	for id, spec := range map[task.ID]*millracev1.Task{"zero": shTask("exit 0"), "three": shTask("exit 3"), "term": shTask("kill -TERM $$"), "missing": missing, "baddir": baddir, "slow": slow} {
		admit(t, st, id, spec)
	}
	for id, want := range map[task.ID]struct {
		state  task.State
		reason millracev1.Reason
		code   int32
		signal string
	}{
		"zero": {task.Succeeded, 0, 0, ""}, "three": {task.Failed, millracev1.Reason_REASON_EXIT, 3, ""},
		"term":    {task.Failed, millracev1.Reason_REASON_SIGNAL, 143, "TERM"},
		"missing": {task.Failed, millracev1.Reason_REASON_REFUSED, 127, ""}, "baddir": {task.Failed, millracev1.Reason_REASON_REFUSED, 126, ""},
		"slow": {task.Failed, millracev1.Reason_REASON_TIMEOUT, 143, "TERM"},
	} {
		r := final(t, st, id)
		e := last(t, r)
		if r.State != want.state || e.GetReason() != want.reason || e.GetExitCode() != want.code || e.GetSignal() != want.signal {
			t.Errorf("%s: %v %v", id, r.State, e)
		}
	}
	storetest.Until(t, "working directories of what succeeded are removed", func() bool {
		_, err := os.Stat(filepath.Join(cfg.StateDir, "work", "zero"))
		return errors.Is(err, os.ErrNotExist)
	})
}

func TestEnvironmentIsClean(t *testing.T) {
	t.Setenv("MILLRACE_TOKEN", "t0ken")
	t.Setenv("MILLRACE_REDIS_URL", "redis://secret")
	t.Setenv("SOMETHING_ELSE", "x")
	st := storetest.Open(t)
	out := filepath.Join(t.TempDir(), "env")
	start(t, st, testConfig(t))
	spec := shTask("env > $OUT")
	spec.Name = "n"
	spec.GetCommand().Env = map[string]string{"OUT": out}
	admit(t, st, "env", spec)
	final(t, st, "env")
	raw, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	for _, no := range []string{"t0ken", "redis://", "SOMETHING_ELSE"} {
		if strings.Contains(string(raw), no) {
			t.Errorf("the task sees %s", no)
		}
	}
	for _, yes := range []string{"MILLRACE_TASK_ID=env\n", "MILLRACE_TASK_NAME=n\n", "MILLRACE_ATTEMPT=1\n", "PYTHONUNBUFFERED=1\n", "MILLRACE_CHECKPOINT_DIR=/"} {
		if !strings.Contains(string(raw), yes) {
			t.Errorf("the task does not see %s", yes)
		}
	}
}

// A cancel that comes by the record alone, without any dispatcher, is seen at a renewal.
func TestCancelThroughRedisAlone(t *testing.T) {
	t.Parallel()
	st := storetest.Open(t)
	start(t, st, testConfig(t))
	spec := shTask("sleep 600")
	spec.Grace = durationpb.New(time.Second)
	admit(t, st, "c", spec)
	storetest.Until(t, "runs", func() bool { return storetest.State(t, st, "c") == task.Running })
	sn, err := st.Snapshots(t.Context(), []task.ID{"c"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := st.Do(t.Context(), []*store.Change{{Move: task.Cancel, ID: "c", Guess: sn[0], In: task.Input{Attempt: 1}}}); err != nil {
		t.Fatal(err)
	}
	r := final(t, st, "c")
	if e := last(t, r); r.State != task.Cancelled || e.GetReason() != millracev1.Reason_REASON_CANCELLED {
		t.Errorf("%v %v", r.State, e)
	}
}

func TestDrainHandsBack(t *testing.T) {
	t.Parallel()
	st := storetest.Open(t)
	stop := start(t, st, testConfig(t))
	spec := shTask("sleep 600")
	spec.Grace = durationpb.New(time.Second)
	admit(t, st, "d", spec)
	storetest.Until(t, "runs", func() bool { return storetest.State(t, st, "d") == task.Running })
	stop()
	r, err := st.Record(context.Background(), "d")
	if err != nil {
		t.Fatal(err)
	}
	if r.State != task.Delayed || r.Attempt != 2 || r.Failures != 0 || r.Lost != 0 || last(t, r).GetReason() != millracev1.Reason_REASON_PREEMPTED {
		t.Errorf("%+v %v", r.Snapshot, last(t, r))
	}
	if ws, err := st.Workers(context.Background()); err != nil || len(ws) != 0 {
		t.Errorf("workers left behind: %v %v", ws, err)
	}
}

func TestDrainLetsShortTasksFinish(t *testing.T) {
	t.Parallel()
	st := storetest.Open(t)
	cfg := testConfig(t)
	cfg.DrainTimeout = time.Minute
	begun, end := make(chan struct{}), make(chan struct{})
	stop := start(t, st, cfg, Handle("h", func(context.Context, *Call) ([]byte, error) { close(begun); <-end; return nil, nil }))
	admit(t, st, "h", callTask("h", ""))
	<-begun
	admit(t, st, "after", callTask("h", ""))
	go func() { time.Sleep(50 * time.Millisecond); close(end) }()
	stop()
	if got := storetest.State(t, st, "h"); got != task.Succeeded {
		t.Errorf("running one: %v", got)
	}
}

// A worker that was declared dead stops what it runs, whose outcome does not count, and goes on under a new id.
func TestFencedWorkerGoesOnUnderANewID(t *testing.T) {
	t.Parallel()
	st := storetest.Open(t)
	start(t, st, testConfig(t), Handle("wait", func(ctx context.Context, c *Call) ([]byte, error) {
		if c.Attempt == 1 {
			<-ctx.Done()
			return nil, context.Cause(ctx)
		}
		return []byte("second"), nil
	}))
	admit(t, st, "f", callTask("wait", ""))
	storetest.Until(t, "runs", func() bool { return storetest.State(t, st, "f") == task.Running })
	r, err := st.Record(t.Context(), "f")
	if err != nil {
		t.Fatal(err)
	}
	old := r.Owner
	if dead, err := st.Declare(t.Context(), old, true); err != nil || !dead {
		t.Fatal(dead, err)
	}
	var now *store.WorkerMeta
	storetest.Until(t, "a new worker", func() bool {
		ws, err := st.Workers(t.Context())
		for _, w := range ws {
			if w.ID != old {
				now = &w
			}
		}
		return err == nil && now != nil
	})
	if got := storetest.State(t, st, "f"); got != task.Running {
		t.Fatalf("the outcome of a fenced worker counted: %v", got)
	}
	out, err := st.Do(t.Context(), []*store.Change{{
		Move: task.Lose, ID: "f", Guess: r.Snapshot, In: task.Input{Attempt: 1, Worker: old, Dead: true},
		End: &millracev1.AttemptEnd{Attempt: 1, Worker: string(old), Reason: millracev1.Reason_REASON_WORKER_LOST},
	}})
	if err != nil || !out[0].Done {
		t.Fatalf("%+v %v", out, err)
	}
	promote(t, st, "f")
	if r := final(t, st, "f"); r.State != task.Succeeded || r.Owner != now.ID || string(last(t, r).GetOutput()) != "second" {
		t.Errorf("%+v %v", r.Snapshot, last(t, r))
	}
}

// A claim whose answer got lost leaves a task with a worker that does not know it: it gives it back.
func TestGivesBackWhatItDoesNotKnow(t *testing.T) {
	t.Parallel()
	st := storetest.Open(t)
	block := make(chan struct{})
	cfg := testConfig(t)
	cfg.Slots = 1
	stop := start(t, st, cfg, Handle("block", func(context.Context, *Call) ([]byte, error) { <-block; return nil, nil }))
	defer stop()
	defer close(block)
	admit(t, st, "busy", callTask("block", ""))
	storetest.Until(t, "busy", func() bool { return storetest.State(t, st, "busy") == task.Running })
	r, err := st.Record(t.Context(), "busy")
	if err != nil {
		t.Fatal(err)
	}
	admit(t, st, "lost", callTask("block", ""))
	got, err := st.Claim(t.Context(), store.ClaimFor{Worker: r.Owner, Lanes: []string{"default:normal"}, Want: 1, Lease: time.Minute})
	if err != nil || len(got) != 1 {
		t.Fatal(got, err)
	}
	storetest.Until(t, "given back", func() bool { return storetest.State(t, st, "lost") == task.Delayed })
	if lr, _ := st.Record(t.Context(), "lost"); lr.Failures != 0 || lr.Lost != 0 || last(t, lr).GetReason() != millracev1.Reason_REASON_NEVER_STARTED {
		t.Errorf("%+v", lr)
	}
}

// The state directory's lock proves that the agent before is dead: its tasks are dispatched again at once.
func TestSuccessorDeclaresPredecessorDead(t *testing.T) {
	t.Parallel()
	st := storetest.Open(t)
	cfg := testConfig(t)
	h, err := openHome(cfg.StateDir, cfg.Name)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.remember("test-before"); err != nil {
		t.Fatal(err)
	}
	h.close() // as the kernel does for a process that was killed
	if err := st.Register(t.Context(), store.WorkerMeta{ID: "test-before", Slots: 1, Queues: []string{"default"}}, time.Hour); err != nil {
		t.Fatal(err)
	}
	start(t, st, cfg)
	ws, err := st.Workers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dead := false
	for _, w := range ws {
		dead = dead || w.ID == "test-before" && w.Dead
	}
	if !dead {
		t.Errorf("not declared: %+v", ws)
	}
}

func TestFetchOrderNeverStarves(t *testing.T) {
	t.Parallel()
	st := storetest.Open(t)
	cfg := testConfig(t)
	cfg.Queues = []string{"a", "b"}
	a, err := New(cfg, Deps{Store: st})
	if err != nil {
		t.Fatal(err)
	}
	l, err := newLife(a, "w")
	if err != nil {
		t.Fatal(err)
	}
	first := map[string]int{}
	for n := range uint64(32) {
		o := l.order(n)
		if len(o) != 6 {
			t.Fatalf("order %v", o)
		}
		_, p := store.SplitLane(o[0])
		first[p]++
	}
	if first["high"] != 28 || first["normal"] != 2 || first["low"] != 2 {
		t.Errorf("of 32 fetches %v begin there", first)
	}
}

func TestManyHandlersEndOnce(t *testing.T) {
	t.Parallel()
	st := storetest.Open(t)
	cfg := testConfig(t)
	cfg.Slots = 50
	var runs atomic.Int32
	start(t, st, cfg, Handle("n", func(context.Context, *Call) ([]byte, error) { runs.Add(1); return nil, nil }))
	const n = 1000
	for i := range n {
		admit(t, st, task.ID(fmt.Sprint(i)), callTask("n", ""))
	}
	storetest.Until(t, "all results", func() bool {
		got, err := st.Length(t.Context(), st.Keys().Results())
		return err == nil && got == n
	})
	if runs.Load() != n {
		t.Errorf("%d runs for %d tasks", runs.Load(), n)
	}
}

func TestSweepsOnlyWhatHasEnded(t *testing.T) {
	t.Parallel()
	st := storetest.Open(t)
	cfg := testConfig(t)
	cfg.KeepWork = time.Nanosecond
	a, err := New(cfg, Deps{Store: st})
	if err != nil {
		t.Fatal(err)
	}
	if a.home, err = openHome(cfg.StateDir, "x"); err != nil {
		t.Fatal(err)
	}
	defer a.home.close()
	admit(t, st, "waits", callTask("x", ""))
	for _, id := range []string{"waits", "gone"} {
		if err := os.MkdirAll(a.home.workDir(id, 1), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.sweepLeftoversOnce(t.Context()); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]bool{"waits": true, "gone": false} {
		if _, err := os.Stat(a.home.workDir(id, 1)); (err == nil) != want {
			t.Errorf("%s: %v", id, err)
		}
	}
}

// What a claim under way may still bring is not unknown, however slow its answer is: giving it back and then starting it
// would make two copies.
func TestSlowClaimIsNotALostOne(t *testing.T) {
	t.Parallel()
	st := storetest.Open(t)
	ctx := t.Context()
	a, err := New(testConfig(t), Deps{Store: st})
	if err != nil {
		t.Fatal(err)
	}
	l, err := newLife(a, "slow")
	if err != nil {
		t.Fatal(err)
	}
	if err := st.Register(ctx, a.meta("slow", "h", 1), time.Hour); err != nil {
		t.Fatal(err)
	}
	admit(t, st, "s", callTask("x", ""))
	got, err := st.Claim(ctx, store.ClaimFor{Worker: "slow", Lanes: l.lanes, Want: 1, Lease: time.Minute})
	if err != nil || len(got) != 1 {
		t.Fatal(got, err)
	}
	renew := func() {
		t.Helper()
		if err := l.renewOnce(ctx, guard.Now()); err != nil {
			t.Fatal(err)
		}
	}
	l.claiming.Store(true)
	for range 5 {
		renew()
	}
	if got := storetest.State(t, st, "s"); got != task.Running {
		t.Fatalf("given back while its claim was under way: %v", got)
	}
	l.claiming.Store(false)
	renew()
	if got := storetest.State(t, st, "s"); got != task.Running {
		t.Fatalf("given back at first sight: %v", got)
	}
	renew()
	if got := storetest.State(t, st, "s"); got != task.Delayed {
		t.Errorf("not given back: %v", got)
	}
}

// A refused task has no log to wait for.
func TestRefusedHasNoOutput(t *testing.T) {
	t.Parallel()
	st := storetest.Open(t)
	start(t, st, testConfig(t))
	spec := shTask("true")
	spec.Resources = &millracev1.Resources{Slots: 99}
	admit(t, st, "wide", spec)
	if e := last(t, final(t, st, "wide")); e.GetReason() != millracev1.Reason_REASON_REFUSED || !e.GetNoOutput() {
		t.Errorf("%v", e)
	}
}
