package store

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/redistest"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func TestFinishRepeated(t *testing.T) {
	t.Parallel()
	s := setup(t)
	join(t, s, "w")
	join(t, s, "other")
	admit(t, s, "a")
	c := claim(t, s, "w", 1)[0]
	foreign := c.move(task.Finish, task.Failed)
	foreign.In.Worker = "other"
	if o := try(t, s, foreign); o.Done || o.Now.Owner != "w" {
		t.Errorf("another worker's finish: %+v", o)
	}
	one(t, s, c.move(task.Finish, task.Succeeded))
	if o := try(t, s, c.move(task.Finish, task.Failed)); o.Done || o.Now.State != task.Succeeded {
		t.Errorf("repeated finish: done %v, state %s", o.Done, o.Now.State)
	}
	if end, err := s.AttemptEnd(t.Context(), "a", 1); err != nil || end == nil {
		t.Errorf("end of attempt 1: %v %v, want it to answer the repeat", end, err)
	}
	if n, _ := s.Length(t.Context(), s.keys.Results()); n != 1 {
		t.Errorf("%d results", n)
	}
}

func TestStaleGuessIsNoAnswer(t *testing.T) {
	t.Parallel()
	s := setup(t)
	admit(t, s, "a")
	o := try(t, s, &Change{Move: task.Cancel, ID: "a", In: task.Input{Attempt: 1}, Guess: Snapshot{Record: task.Record{State: task.None}}})
	if !o.Done {
		t.Errorf("cancel on an old guess was not done: %+v", o.Now)
	}
}

func TestCancelBeatsRetry(t *testing.T) {
	t.Parallel()
	s := setup(t)
	join(t, s, "w")
	admit(t, s, "a")
	c := claim(t, s, "w", 1)[0]
	one(t, s, &Change{Move: task.Cancel, ID: "a", In: task.Input{Attempt: 1}, Guess: c.At})
	m := c.move(task.Retry, 0) // its guess does not know of the mark
	m.End = ended(millracev1.Reason_REASON_EXIT, 1)
	m.End.ExitCode = 3
	if o := one(t, s, m); o.Now.State != task.Cancelled {
		t.Fatalf("state %s, want cancelled", o.Now.State)
	}
	end, err := s.AttemptEnd(t.Context(), "a", 1)
	must(t, err)
	if end.Reason != millracev1.Reason_REASON_CANCELLED || end.ExitCode != 3 || end.RetryAt != nil {
		t.Errorf("end %v, want cancelled with exit code 3 and no retry", end)
	}
}

func TestLoseByTwoReapers(t *testing.T) {
	t.Parallel()
	s := setup(t)
	join(t, s, "w")
	admit(t, s, "a")
	c := claim(t, s, "w", 1)[0]
	if o := try(t, s, &Change{Move: task.Lose, ID: "a", In: task.Input{Attempt: 1, Worker: "w", Dead: true}, Guess: c.At}); o.Done {
		t.Fatal("lost a task of a living worker")
	}
	die(t, s, "w")
	var won atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			out, err := s.Do(t.Context(), []*Change{{
				Move: task.Lose, ID: "a", In: task.Input{Attempt: 1, Worker: "w", Dead: true},
				Guess: c.At, End: ended(millracev1.Reason_REASON_WORKER_LOST, 1),
			}})
			if err != nil {
				t.Error(err)
			} else if out[0].Done {
				won.Add(1)
			}
		})
	}
	wg.Wait()
	if sn := snap(t, s, "a"); won.Load() != 1 || sn.Attempt != 2 || sn.Lost != 1 || sn.Failures != 0 {
		t.Errorf("%d reapers won; record %+v", won.Load(), sn)
	}
}

func TestLoseLateLeaseOfLivingWorker(t *testing.T) {
	t.Parallel()
	s := setup(t)
	join(t, s, "w")
	admit(t, s, "a")
	c := claim(t, s, "w", 1)[0] // its lease is a minute
	lose := func(before time.Time) Outcome {
		return try(t, s, &Change{Move: task.Lose, ID: "a", In: task.Input{Attempt: 1, Worker: "w", Dead: true}, Guess: c.At, LateBefore: before})
	}
	if o := lose(s.Now()); o.Done {
		t.Error("lost a task whose lease is valid")
	}
	if o := lose(s.Now().Add(2 * time.Minute)); !o.Done {
		t.Errorf("did not lose a task whose lease ended long ago: %+v", o.Now)
	}
}

// TestWrongTypeStaysAlone: one record that is no hash must not stop the others of its batch.
func TestWrongTypeStaysAlone(t *testing.T) {
	t.Parallel()
	s := setup(t)
	must(t, s.cmd.Set(t.Context(), s.keys.Task("odd"), "x", 0).Err())
	out, err := s.Do(t.Context(), []*Change{admission("a", task.Queued, nil), admission("odd", task.Queued, nil), admission("b", task.Delayed, nil)})
	must(t, err)
	if !out[0].Done || !out[2].Done || out[0].Err != nil || out[2].Err != nil {
		t.Errorf("neighbours: %+v %+v", out[0], out[2])
	}
	if out[1].Done || out[1].Err == nil || !strings.Contains(out[1].Err.Error(), "WRONGTYPE") {
		t.Errorf("odd: done %v, err %v", out[1].Done, out[1].Err)
	}
}

// TestBatchOverOneTask: several moves of one task in one batch each find what the one before left.
func TestBatchOverOneTask(t *testing.T) {
	t.Parallel()
	s := setup(t)
	out, err := s.Do(t.Context(), []*Change{admission("a", task.Queued, nil), admission("a", task.Queued, nil)})
	must(t, err)
	if !out[0].Done || out[1].Done || out[1].Now.State != task.Queued {
		t.Errorf("%+v", out)
	}
}

// TestMovesAtMemoryLimit: what is queued can be worked off when nothing more fits in.
func TestMovesAtMemoryLimit(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t)
	s := open(t, srv.URL(), "")
	join(t, s, "w")
	admit(t, s, "done", "cancelled", "retried", "lost")
	one(t, s, admission("promoted", task.Delayed, nil))
	srv.Config(t, "maxmemory", "1mb") // less than an empty server uses
	if _, err := s.cmd.Set(t.Context(), "x", "y", 0).Result(); !IsOutOfMemory(err) {
		t.Fatalf("the server is not full: %v", err)
	}
	join(t, s, "w2")
	got := claim(t, s, "w", 4)
	if len(got) != 4 {
		t.Fatalf("claimed %d", len(got))
	}
	_, err := s.Renew(t.Context(), RenewFor{Worker: "w", Beat: "x", TTL: time.Minute, Lease: time.Minute, Held: []Held{{"done", 1}}, Lanes: []string{testLane}})
	must(t, err)
	one(t, s, &Change{Move: task.Promote, ID: "promoted", In: task.Input{Attempt: 1}, Guess: snap(t, s, "promoted")})
	one(t, s, got[0].move(task.Finish, task.Succeeded))
	one(t, s, &Change{Move: task.Cancel, ID: "cancelled", In: task.Input{Attempt: 1}, Guess: got[1].At})
	one(t, s, got[2].move(task.Retry, 0))
	die(t, s, "w")
	one(t, s, &Change{Move: task.Lose, ID: "lost", In: task.Input{Attempt: 1, Worker: "w", Dead: true}, Guess: got[3].At})
	// The door is closed: nothing is half admitted.
	out, err := s.Do(t.Context(), []*Change{admission("new", task.Queued, nil)})
	must(t, err)
	if out[0].Done || !IsOutOfMemory(out[0].Err) {
		t.Errorf("admission at the limit: done %v, err %v", out[0].Done, out[0].Err)
	}
	if sn := snap(t, s, "new"); sn.State != task.None {
		t.Errorf("new is %s", sn.State)
	}
}

func TestKeptEnds(t *testing.T) {
	t.Parallel()
	s := setup(t)
	join(t, s, "w")
	admit(t, s, "a")
	for i := range keptEnds + 3 {
		c := claim(t, s, "w", 1)[0]
		one(t, s, c.move(task.Release, 0))
		one(t, s, &Change{Move: task.Promote, ID: "a", In: task.Input{Attempt: uint32(i) + 2}, Guess: snap(t, s, "a")})
	}
	r, err := s.Record(t.Context(), "a")
	must(t, err)
	if len(r.Ends) != keptEnds || r.Ends[0].Attempt != 4 {
		t.Errorf("%d ends from attempt %d on", len(r.Ends), r.Ends[0].Attempt)
	}
	if f := fmt.Sprint(r.Failures, r.Lost); f != "0 0" {
		t.Errorf("failures and losses %s after releases", f)
	}
}
