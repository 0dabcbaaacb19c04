package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/millrace/millrace/internal/api"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/redistest"
	"github.com/millrace/millrace/internal/spec"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/storetest"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func TestMain(m *testing.M) { redistest.Main(m) }

func testConfig() Config {
	return Config{
		ControlAddr: "127.0.0.1:0", HTTPAddr: "127.0.0.1:0", TaskLimit: spec.DefaultLimit, MemoryLimit: 0.8, ResultsAge: time.Minute,
		Timing: config.Timing{HeartbeatInterval: time.Second, HeartbeatTTL: 3 * time.Second, LeaseTTL: 12 * time.Second, ScanInterval: time.Second, HoldLimit: 5 * time.Second},
	}
}

func newService(t *testing.T, st *store.Store) *Service {
	t.Helper()
	s, err := New(testConfig(), Deps{Store: st})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// start runs a dispatcher to the end of the test.
func start(t *testing.T) (*Service, *store.Store) {
	t.Helper()
	st := storetest.Open(t)
	s := newService(t, st)
	storetest.Run(t, s.Run)
	return s, st
}

func xadd(t *testing.T, st *store.Store, field string, value any) {
	t.Helper()
	if err := st.Client().XAdd(t.Context(), &redis.XAddArgs{Stream: st.Keys().Tasks(), Values: []any{field, value}}).Err(); err != nil {
		t.Fatal(err)
	}
}

func echo(id string) *millracev1.Task {
	return &millracev1.Task{Id: id, Work: &millracev1.Task_Command{Command: &millracev1.Command{Argv: []string{"echo", "hi"}}}}
}

func mustDead(t *testing.T, st *store.Store, n int) []store.DeadLetter {
	t.Helper()
	var dead []store.DeadLetter
	storetest.Until(t, fmt.Sprintf("%d dead letters", n), func() bool {
		var err error
		if dead, err = st.Dead(t.Context(), 100); err != nil {
			t.Fatal(err)
		}
		return len(dead) >= n
	})
	return dead
}

func TestDoorAdmitsBothFields(t *testing.T) {
	t.Parallel()
	_, st := start(t)
	raw, err := proto.Marshal(echo("binary"))
	if err != nil {
		t.Fatal(err)
	}
	xadd(t, st, "task", raw)
	xadd(t, st, "json", `{"id":"text","command":{"argv":["echo","hi"]}}`)
	for _, id := range []task.ID{"binary", "text"} {
		storetest.Until(t, string(id)+" queued", func() bool { return storetest.State(t, st, id) == task.Queued })
	}
	if n, _ := st.Length(t.Context(), st.Keys().Tasks()); n != 0 {
		t.Errorf("%d entries are left in tasks", n)
	}
}

func TestDoorDerivesIDFromEntry(t *testing.T) {
	t.Parallel()
	s, st := start(t)
	_ = s
	id, err := st.Client().XAdd(t.Context(), &redis.XAddArgs{Stream: st.Keys().Tasks(), Values: []any{"json", `{"command":{"argv":["true"]}}`}}).Result()
	if err != nil {
		t.Fatal(err)
	}
	want := task.ID(spec.DeriveID(st.Keys().Tasks(), id))
	storetest.Until(t, "derived id queued", func() bool { return storetest.State(t, st, want) == task.Queued })
}

func TestDoorBuriesBadEntries(t *testing.T) {
	t.Parallel()
	_, st := start(t)
	bad := map[string]struct{ field, value, word string }{
		"unknown field": {"json", `{"comand":{"argv":["x"]}}`, "comand"},
		"wrong type":    {"json", `{"command":{"argv":"echo hi"}}`, "argv"},
		"binary junk":   {"task", "\xff\xff\xff", "task"},
		"other field":   {"payload", "x", "payload"},
		"empty argv":    {"json", `{"command":{"argv":[]}}`, "argv"},
		"bad priority":  {"json", `{"priority":"urgent","command":{"argv":["x"]}}`, "urgent"},
		"unknown queue": {"json", `{"queue":"nobody","command":{"argv":["x"]}}`, "nobody"},
		"too large":     {"json", `{"command":{"argv":["` + strings.Repeat("x", 300<<10) + `"]}}`, "262144"},
		"not an object": {"json", `[1,2]`, "object"},
	}
	for _, b := range bad {
		xadd(t, st, b.field, b.value)
	}
	xadd(t, st, "json", `{"id":"good","command":{"argv":["true"]}}`)
	storetest.Until(t, "the good one is admitted", func() bool { return storetest.State(t, st, "good") == task.Queued })
	dead := mustDead(t, st, len(bad))
	for name, b := range bad {
		found := false
		for _, d := range dead {
			if d.Letter.GetSource() == "tasks" && strings.Contains(d.Letter.GetReason(), b.word) && string(d.Letter.GetFields()[b.field]) == b.value {
				found = true
			}
		}
		if !found {
			t.Errorf("%s: no dead letter with its bytes and %q in the reason", name, b.word)
		}
	}
}

func TestSameIDJoinsOrIsRefused(t *testing.T) {
	t.Parallel()
	s, st := start(t)
	ctx := t.Context()
	id, created, err := s.Admit(ctx, echo("one"))
	if err != nil || !created || id != "one" {
		t.Fatalf("first: %q %v %v", id, created, err)
	}
	if _, created, err = s.Admit(ctx, echo("one")); err != nil || created {
		t.Fatalf("the same again: created %v, %v", created, err)
	}
	other := echo("one")
	other.GetCommand().Argv = []string{"echo", "ho"}
	_, _, err = s.Admit(ctx, other)
	var refusal *api.Refusal
	if !errors.As(err, &refusal) || refusal.Code != api.CodeIDTaken {
		t.Fatalf("another task of that id: %v", err)
	}
	xadd(t, st, "json", `{"id":"one","command":{"argv":["echo","hi"]}}`)
	xadd(t, st, "json", `{"id":"one","command":{"argv":["echo","no"]}}`)
	if d := mustDead(t, st, 1)[0].Letter; d.GetCode() != "id_taken" || d.GetTask() != "one" {
		t.Errorf("dead letter %v", d)
	}
	if n, _ := st.Length(ctx, st.Keys().Dispatch("default:normal")); n != 1 {
		t.Errorf("%d dispatch entries for one task", n)
	}
}

func TestDelayedIsPromotedWhenDue(t *testing.T) {
	t.Parallel()
	s, st := start(t)
	due := time.Now().Add(700 * time.Millisecond)
	tk := echo("later")
	tk.NotBefore = timestamppb.New(due)
	if _, _, err := s.Admit(t.Context(), tk); err != nil {
		t.Fatal(err)
	}
	if got := storetest.State(t, st, "later"); got != task.Delayed {
		t.Fatalf("state %v", got)
	}
	storetest.Until(t, "promoted", func() bool { return storetest.State(t, st, "later") == task.Queued })
	if early := time.Until(due); early > 20*time.Millisecond {
		t.Errorf("promoted %v early", early)
	}
}

func TestExpires(t *testing.T) {
	t.Parallel()
	s, st := start(t)
	tk := echo("soon")
	tk.ExpiresAt = timestamppb.New(time.Now().Add(300 * time.Millisecond))
	if _, _, err := s.Admit(t.Context(), tk); err != nil {
		t.Fatal(err)
	}
	storetest.Until(t, "expired", func() bool { return storetest.State(t, st, "soon") == task.Expired })
	checkGone(t, st)
}

func TestCancelQueuedAndDelayed(t *testing.T) {
	t.Parallel()
	s, st := start(t)
	ctx := t.Context()
	late := echo("late")
	late.NotBefore = timestamppb.New(time.Now().Add(time.Hour))
	for _, tk := range []*millracev1.Task{echo("queued"), late} {
		if _, _, err := s.Admit(ctx, tk); err != nil {
			t.Fatal(err)
		}
	}
	for _, id := range []task.ID{"queued", "late"} {
		o, err := s.Cancel(ctx, id)
		if err != nil || !o.Done || o.Now.State != task.Cancelled {
			t.Fatalf("%s: %+v, %v", id, o, err)
		}
		if o, err = s.Cancel(ctx, id); err != nil || o.Done {
			t.Fatalf("%s again: %+v, %v", id, o, err)
		}
	}
	if _, err := s.Cancel(ctx, "nobody"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("unknown id: %v", err)
	}
	if n, _ := st.Length(ctx, st.Keys().Results()); n != 2 {
		t.Errorf("%d results for two cancelled tasks", n)
	}
	checkGone(t, st)
}

func TestCancelRunningSetsMark(t *testing.T) {
	t.Parallel()
	s, st := start(t)
	ctx := t.Context()
	if err := st.Register(ctx, store.WorkerMeta{ID: "w", Slots: 1, Queues: []string{"default"}}, time.Hour); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Admit(ctx, echo("runs")); err != nil {
		t.Fatal(err)
	}
	got, err := st.Claim(ctx, store.ClaimFor{Worker: "w", Lanes: []string{"default:normal"}, Want: 1, Lease: time.Minute})
	if err != nil || len(got) != 1 {
		t.Fatalf("claim: %v, %v", got, err)
	}
	o, err := s.Cancel(ctx, "runs")
	if err != nil || !o.Done || o.Now.State != task.Running || !o.Now.Cancel {
		t.Fatalf("%+v, %v", o, err)
	}
}

// Another dispatcher died between reading an entry and admitting it: the entry is taken over, and the task is one.
func TestTakesOverEntriesOfADeadDispatcher(t *testing.T) {
	t.Parallel()
	st := storetest.Open(t)
	ctx := t.Context()
	xadd(t, st, "json", `{"id":"orphan","command":{"argv":["true"]}}`)
	dead := st.NewReader(st.Keys().Tasks(), store.GroupDispatcher, "dead")
	for {
		got, err := dead.Read(ctx, 10, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if len(got) > 0 {
			break
		}
	}
	s := newService(t, st)
	r := st.NewReader(st.Keys().Tasks(), store.GroupDispatcher, s.ID())
	got, next, err := r.Steal(ctx, 0, "", 10)
	if err != nil || next != "" || len(got) != 1 {
		t.Fatalf("steal: %v %q %v", got, next, err)
	}
	if err := s.take(ctx, got); err != nil {
		t.Fatal(err)
	}
	if err := s.take(ctx, got); err != nil { // a repeat, as after a lost reply
		t.Fatal(err)
	}
	if n, _ := st.Length(ctx, st.Keys().Dispatch("default:normal")); n != 1 {
		t.Errorf("%d dispatch entries", n)
	}
}

func TestRegistrationIsRemovedAtTheEnd(t *testing.T) {
	t.Parallel()
	st := storetest.Open(t)
	s := newService(t, st)
	stop := storetest.Run(t, s.Run)
	storetest.Until(t, "registered", func() bool {
		m, err := st.DispatcherAddrs(t.Context())
		return err == nil && m[s.ID()] != ""
	})
	stop()
	if m, err := st.DispatcherAddrs(context.Background()); err != nil || len(m) != 0 {
		t.Errorf("left behind: %v, %v", m, err)
	}
}

func TestDispatchersShareIntake(t *testing.T) {
	t.Parallel()
	st := storetest.Open(t)
	for range 3 {
		storetest.Run(t, newService(t, st).Run)
	}
	const n = 500
	for i := range n {
		xadd(t, st, "json", fmt.Sprintf(`{"id":"t%d","command":{"argv":["true"]}}`, i))
	}
	storetest.Until(t, "all admitted", func() bool {
		l, err := st.Length(t.Context(), st.Keys().Dispatch("default:normal"))
		return err == nil && l == n
	})
}

func TestConfigReportsEveryProblem(t *testing.T) {
	t.Parallel()
	c := testConfig()
	c.HTTPAddr, c.TaskLimit, c.MemoryLimit = "0.0.0.0:8080", 1, 2
	err := c.Validate()
	for _, w := range []string{"HTTP_ADDR", "TASK_LIMIT", "MEMORY_LIMIT"} {
		if err == nil || !strings.Contains(err.Error(), w) {
			t.Errorf("%v does not name %s", err, w)
		}
	}
}

func TestAdmitRefusesInWords(t *testing.T) {
	t.Parallel()
	s, _ := start(t)
	tk := echo("x")
	tk.Timeout = durationpb.New(-time.Second)
	_, _, err := s.Admit(t.Context(), tk)
	var refusal *api.Refusal
	if !errors.As(err, &refusal) || refusal.Code != spec.CodeBadTask || !strings.Contains(err.Error(), "timeout") {
		t.Errorf("%v", err)
	}
}

// checkGone: nothing of tasks that ended is left but their records.
func checkGone(t *testing.T, st *store.Store) {
	t.Helper()
	ctx := t.Context()
	for _, key := range []string{st.Keys().Delayed(), st.Keys().Running()} {
		if n, err := st.Client().ZCard(ctx, key).Result(); err != nil || n != 0 {
			t.Errorf("%s has %d members, %v", key, n, err)
		}
	}
	if n, err := st.Length(ctx, st.Keys().Dispatch("default:normal")); err != nil || n != 0 {
		t.Errorf("%d dispatch entries, %v", n, err)
	}
}
