package reaper

import (
	"fmt"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/redistest"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/storetest"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"

	"google.golang.org/protobuf/proto"
)

func TestMain(m *testing.M) { redistest.Main(m) }

func testConfig() Config {
	return Config{Timing: config.Timing{
		HeartbeatInterval: 100 * time.Millisecond, HeartbeatTTL: 300 * time.Millisecond,
		LeaseTTL: time.Second, ScanInterval: 100 * time.Millisecond, HoldLimit: time.Second,
	}}
}

type bundle struct {
	t  *testing.T
	st *store.Store
	r  *Reaper
}

func setup(t *testing.T) bundle {
	t.Helper()
	st := storetest.Open(t)
	r, err := New(testConfig(), Deps{Store: st})
	if err != nil {
		t.Fatal(err)
	}
	// The server was started for this test binary; nothing here is about its restarts.
	if err := st.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.watch.runID = st.Server().RunID
	return bundle{t, st, r}
}

func (b bundle) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b bundle) join(w task.WorkerID) {
	b.t.Helper()
	b.must(b.st.Register(b.t.Context(), store.WorkerMeta{ID: w, Slots: 10, Queues: []string{"default"}}, time.Hour))
}

// die takes a worker's heartbeat away.
func (b bundle) die(w task.WorkerID) {
	b.t.Helper()
	b.must(b.st.Client().Del(b.t.Context(), b.st.Keys().WorkerBeat(string(w))).Err())
}

func (b bundle) admit(t *millracev1.Task, ids ...task.ID) {
	b.t.Helper()
	if t == nil {
		t = &millracev1.Task{Work: &millracev1.Task_Command{Command: &millracev1.Command{Argv: []string{"true"}}}}
	}
	raw, err := proto.Marshal(t)
	b.must(err)
	for _, id := range ids {
		out, err := b.st.Do(b.t.Context(), []*store.Change{{
			Move: task.Admit, ID: id, In: task.Input{To: task.Queued}, Spec: t, SpecBytes: raw,
			Guess: store.Snapshot{Record: task.Record{State: task.None}}, Created: time.Now(),
		}})
		b.must(err)
		if !out[0].Done {
			b.t.Fatalf("%s not admitted: %+v", id, out[0])
		}
	}
}

func (b bundle) claim(w task.WorkerID, n int) []store.Claimed {
	b.t.Helper()
	got, err := b.st.Claim(b.t.Context(), store.ClaimFor{Worker: w, Lanes: []string{"default:normal"}, Want: n, Lease: time.Second})
	b.must(err)
	if len(got) != n {
		b.t.Fatalf("claimed %d, want %d", len(got), n)
	}
	return got
}

// scanUntil scans until the check holds.
func (b bundle) scanUntil(what string, check func() bool) {
	b.t.Helper()
	storetest.Until(b.t, what, func() bool {
		_, err := b.r.scanOnce(b.t.Context())
		b.must(err)
		return check()
	})
}

func (b bundle) state(id task.ID) task.State { return storetest.State(b.t, b.st, id) }

func TestLosesTasksOfADeadWorker(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.join("w")
	b.admit(nil, "a", "b")
	b.claim("w", 2)
	res, err := b.r.scanOnce(t.Context())
	b.must(err)
	if res.declared != 0 || b.state("a") != task.Running {
		t.Fatalf("a living worker lost its task: %+v", res)
	}
	b.die("w")
	b.scanUntil("both are delayed", func() bool { return b.state("a") == task.Delayed && b.state("b") == task.Delayed })
	rec, err := b.st.Record(t.Context(), "a")
	b.must(err)
	if rec.Attempt != 2 || rec.Lost != 1 || rec.Failures != 0 || len(rec.Ends) != 1 || rec.Ends[0].GetReason() != millracev1.Reason_REASON_WORKER_LOST {
		t.Errorf("record %+v", rec)
	}
	b.scanUntil("w is buried", func() bool { ws, err := b.st.Workers(t.Context()); b.must(err); return len(ws) == 0 })
}

func TestPoisonEndsInTheDeadLetters(t *testing.T) {
	t.Parallel()
	b := setup(t)
	budget := uint32(2)
	b.admit(&millracev1.Task{Retry: &millracev1.Retry{MaxLost: &budget}, Work: &millracev1.Task_Command{Command: &millracev1.Command{Argv: []string{"true"}}}}, "p")
	for i := range 2 {
		w := task.WorkerID(fmt.Sprintf("w%d", i))
		b.join(w)
		b.claim(w, 1)
		b.die(w)
		b.scanUntil("lost", func() bool { return b.state("p") != task.Running })
		if b.state("p") == task.Delayed {
			rec, err := b.st.Record(t.Context(), "p")
			b.must(err)
			out, err := b.st.Do(t.Context(), []*store.Change{{Move: task.Promote, ID: "p", Guess: rec.Snapshot, In: task.Input{Attempt: rec.Attempt}}})
			b.must(err)
			if !out[0].Done {
				t.Fatal("not promoted")
			}
		}
	}
	if b.state("p") != task.Failed {
		t.Fatalf("state %v", b.state("p"))
	}
	dead, err := b.st.Dead(t.Context(), 10)
	b.must(err)
	if len(dead) != 1 || dead[0].Letter.GetTask() != "p" || len(dead[0].Letter.GetAttempts()) != 2 {
		t.Errorf("dead letters %v", dead)
	}
}

func TestCancelMarkWinsOverLoss(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.join("w")
	b.admit(nil, "c")
	got := b.claim("w", 1)
	_, err := b.st.Do(t.Context(), []*store.Change{{Move: task.Cancel, ID: "c", Guess: got[0].At, In: task.Input{Attempt: 1}}})
	b.must(err)
	b.die("w")
	b.scanUntil("cancelled", func() bool { return b.state("c") == task.Cancelled })
}

// S06: between listing a dead worker's entries and moving them on, the owner turns out to have finished.
func TestS06FinishedMeanwhileStaysFinished(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.join("w")
	b.admit(nil, "f")
	got := b.claim("w", 1)
	b.die("w")
	dead, err := b.st.Declare(t.Context(), "w", false)
	b.must(err)
	if !dead {
		t.Fatal("not declared")
	}
	time.Sleep(1100 * time.Millisecond) // entries are adopted only when they have been idle for a second
	orphans, _, err := b.st.Adopt(t.Context(), "w", b.r.id, "default:normal", "", 10)
	b.must(err)
	if len(orphans) != 1 {
		t.Fatalf("orphans %v", orphans)
	}
	out, err := b.st.Do(t.Context(), []*store.Change{{
		Move: task.Finish, ID: "f", Guess: got[0].At, In: task.Input{Attempt: 1, Worker: "w", To: task.Succeeded},
		End: &millracev1.AttemptEnd{Attempt: 1, Worker: "w"}, Retention: time.Hour,
	}})
	b.must(err)
	if !out[0].Done {
		t.Fatal("its outcome did not count although it was still its own")
	}
	var res result
	b.must(b.r.loseEntries(t.Context(), "w", "default:normal", orphans, &res))
	if res.lost != 0 || b.state("f") != task.Succeeded {
		t.Errorf("%+v, state %v", res, b.state("f"))
	}
	if n, _ := b.st.Length(t.Context(), b.st.Keys().Results()); n != 1 {
		t.Errorf("%d results", n)
	}
}

// S14: the body of a pending entry is deleted and its owner dies.
func TestGhostIsDispatchedAgain(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.join("w")
	b.admit(nil, "g")
	got := b.claim("w", 1)
	b.must(b.st.Client().XDel(t.Context(), b.st.Keys().Dispatch("default:normal"), got[0].At.Entry).Err())
	b.die("w")
	b.scanUntil("moved on", func() bool { return b.state("g") == task.Delayed })
	b.scanUntil("nothing pending", func() bool {
		p, err := b.st.Client().XPending(t.Context(), b.st.Keys().Dispatch("default:normal"), store.GroupAgents).Result()
		b.must(err)
		return p.Count == 0
	})
}

func TestTwoReapersMoveEachTaskOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.join("w")
	other, err := New(testConfig(), Deps{Store: b.st})
	b.must(err)
	other.watch.runID = b.st.Server().RunID
	var ids []task.ID
	for i := range 10 {
		ids = append(ids, task.ID(fmt.Sprintf("t%d", i)))
	}
	b.admit(nil, ids...)
	b.claim("w", 10)
	b.die("w")
	done := make(chan error, 1)
	go func() { // ends when all are moved
		for {
			if _, err := other.scanOnce(t.Context()); err != nil {
				done <- err
				return
			}
			if b.state(ids[9]) == task.Delayed {
				done <- nil
				return
			}
		}
	}()
	b.scanUntil("all moved", func() bool {
		for _, id := range ids {
			if b.state(id) != task.Delayed {
				return false
			}
		}
		return true
	})
	b.must(<-done)
	for _, id := range ids {
		rec, err := b.st.Record(t.Context(), id)
		b.must(err)
		if rec.Attempt != 2 || rec.Lost != 1 {
			t.Errorf("%s was moved more than once: attempt %d, lost %d", id, rec.Attempt, rec.Lost)
		}
	}
}

func TestAuditRequeuesWithoutEntry(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.admit(nil, "q")
	b.must(b.r.auditOnce(t.Context()))
	if b.state("q") != task.Queued {
		t.Fatalf("a task that is where it belongs was moved: %v", b.state("q"))
	}
	b.must(b.st.Client().Del(t.Context(), b.st.Keys().Dispatch("default:normal")).Err())
	storetest.Until(t, "dispatched again", func() bool { b.must(b.r.auditOnce(t.Context())); return b.state("q") == task.Delayed })
}

func TestAuditMendsIndexes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.join("w")
	b.admit(nil, "r")
	b.claim("w", 1)
	b.must(b.st.Forget(t.Context(), store.IndexRunning, "r"))
	storetest.Until(t, "running index mended", func() bool {
		b.must(b.r.auditOnce(t.Context()))
		n, err := b.st.Count(t.Context(), store.IndexRunning)
		b.must(err)
		return n == 1
	})
}

func TestOverdueLeaseOfALivingWorker(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.join("w")
	b.admit(nil, "o")
	b.claim("w", 1)
	b.must(b.r.overdue(t.Context()))
	if b.state("o") != task.Running {
		t.Fatal("taken although the lease is valid")
	}
	b.must(b.st.Client().ZAdd(t.Context(), b.st.Keys().Running(), zscore("o", time.Now().Add(-10*time.Second))).Err())
	b.must(b.r.overdue(t.Context()))
	if b.state("o") != task.Delayed {
		t.Errorf("state %v", b.state("o"))
	}
}

func TestConsumersWithoutWorkerAreRecovered(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.join("w")
	b.admit(nil, "x")
	b.claim("w", 1)
	ctx := t.Context()
	b.must(b.st.Client().Del(ctx, b.st.Keys().WorkerMeta("w"), b.st.Keys().WorkerBeat("w")).Err())
	b.must(b.st.Client().ZRem(ctx, b.st.Keys().Workers(), "w").Err())
	storetest.Until(t, "moved on", func() bool {
		b.r.audits.consumers = time.Time{}
		_, err := b.r.lookAtConsumers(ctx)
		b.must(err)
		return b.state("x") == task.Delayed
	})
}
