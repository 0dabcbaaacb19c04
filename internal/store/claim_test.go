package store

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func names(cs []Claimed) (ids []task.ID) {
	for _, c := range cs {
		ids = append(ids, c.ID)
	}
	return ids
}

// TestClaimTakesExactlyInOrder: COUNT of a read is per stream, so a claim over several must not take more than asked.
func TestClaimTakesExactlyInOrder(t *testing.T) {
	t.Parallel()
	s := setup(t)
	join(t, s, "w")
	for _, p := range []string{"low", "normal", "high"} {
		for i := range 3 {
			one(t, s, admission(task.ID(fmt.Sprintf("%s%d", p, i)), task.Queued, &millracev1.Task{Priority: p}))
		}
	}
	lanes := []string{"default:high", "default:normal", "default:low"}
	if d := cmp.Diff([]task.ID{"high0"}, names(claim(t, s, "w", 1, lanes...))); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]task.ID{"high1", "high2", "normal0", "normal1"}, names(claim(t, s, "w", 4, lanes...))); d != "" {
		t.Error(d)
	}
	got := claim(t, s, "w", 100, lanes...)
	if d := cmp.Diff([]task.ID{"normal2", "low0", "low1", "low2"}, names(got)); d != "" {
		t.Error(d)
	}
	if l := got[3].At.Lane; l != "default:low" {
		t.Errorf("lane %q, want default:low", l)
	}
}

func TestClaimDropsStaleAndBuriesUnknown(t *testing.T) {
	t.Parallel()
	s := setup(t)
	ctx := t.Context()
	join(t, s, "w")
	key := s.keys.Dispatch(testLane)
	admit(t, s, "a")
	for _, e := range [][]any{{"i", "a", "a", 7}, {"i", "nobody", "a", 1}, {"x", "y"}, {"i", "odd", "a", 1}} {
		must(t, s.cmd.Do(ctx, append([]any{"XADD", key, "*"}, e...)...).Err())
	}
	must(t, s.cmd.Set(ctx, s.keys.Task("odd"), "not a hash", 0).Err())
	admit(t, s, "b")
	if d := cmp.Diff([]task.ID{"a", "b"}, names(claim(t, s, "w", 10))); d != "" {
		t.Error(d)
	}
	if n, _ := s.Length(ctx, key); n != 2 {
		t.Errorf("%d entries left, want the two that run", n)
	}
	dead, err := s.Dead(ctx, 10)
	must(t, err)
	var codes []string
	for _, d := range dead {
		codes = append(codes, d.Letter.Code+" "+d.Letter.Task)
	}
	if d := cmp.Diff([]string{"bad_entry odd", "record_missing ", "record_missing nobody"}, codes); d != "" {
		t.Error(d)
	}
}

func TestClaimOfDeadWorkerIsFenced(t *testing.T) {
	t.Parallel()
	s := setup(t)
	join(t, s, "w")
	admit(t, s, "a")
	die(t, s, "w")
	for _, w := range []task.WorkerID{"w", "never-registered"} {
		if _, err := s.Claim(t.Context(), ClaimFor{Worker: w, Lanes: []string{testLane}, Want: 1}); !errors.Is(err, ErrFenced) {
			t.Errorf("claim by %s: %v, want fenced", w, err)
		}
		if _, err := s.Renew(t.Context(), RenewFor{Worker: w, TTL: time.Second, Lease: time.Second}); !errors.Is(err, ErrFenced) {
			t.Errorf("renewal by %s: %v, want fenced", w, err)
		}
	}
	if sn := snap(t, s, "a"); sn.State != task.Queued {
		t.Errorf("a is %s", sn.State)
	}
}

func TestClaimMakesLostGroupAgain(t *testing.T) {
	t.Parallel()
	s := setup(t)
	join(t, s, "w")
	admit(t, s, "a", "b")
	claim(t, s, "w", 1)
	must(t, s.cmd.XGroupDestroy(t.Context(), s.keys.Dispatch(testLane), GroupAgents).Err())
	// The entry of a comes again and is a stale copy, because a runs.
	if d := cmp.Diff([]task.ID{"b"}, names(claim(t, s, "w", 5))); d != "" {
		t.Error(d)
	}
}

func TestClaimShowsExpired(t *testing.T) {
	t.Parallel()
	s := setup(t)
	join(t, s, "w")
	one(t, s, admission("late", task.Queued, &millracev1.Task{ExpiresAt: timestamppb.New(time.Now().Add(-time.Minute))}))
	got := claim(t, s, "w", 1)
	if len(got) != 1 || !got[0].Expired {
		t.Fatalf("claimed %+v, want one that expired", got)
	}
	c := got[0].move(task.Expire, 0)
	c.End = nil
	one(t, s, c)
	if n, _ := s.Length(t.Context(), s.keys.Dispatch(testLane)); n != 0 {
		t.Errorf("%d entries left", n)
	}
}

func TestRenewTellsWhatRedisBelieves(t *testing.T) {
	t.Parallel()
	s := setup(t)
	ctx := t.Context()
	join(t, s, "w")
	admit(t, s, "ours", "cancelled", "unknown")
	got := claim(t, s, "w", 3)
	one(t, s, &Change{Move: task.Cancel, ID: "cancelled", In: task.Input{Attempt: 1}, Guess: got[1].At})
	must(t, s.cmd.Del(ctx, s.keys.WorkerBeat("w")).Err()) // ran out
	r, err := s.Renew(ctx, RenewFor{
		Worker: "w", Beat: "host", TTL: time.Minute, Lease: time.Minute, Lanes: []string{testLane, "default:low"},
		Held: []Held{{"ours", 1}, {"cancelled", 1}, {"ours", 2}, {"nobody", 1}},
	})
	must(t, err)
	if d := cmp.Diff([]Status{Ours, OursCancel, NotOurs, NotOurs}, r.Status); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([][]string{{got[0].At.Entry, got[1].At.Entry, got[2].At.Entry}, nil}, r.Pending); d != "" {
		t.Error(d)
	}
	if h, ok, err := s.EntryTask(ctx, testLane, got[2].At.Entry); err != nil || !ok || h != (Held{"unknown", 1}) {
		t.Errorf("entry is about %v %v %v", h, ok, err)
	}
	if v, err := s.cmd.Get(ctx, s.keys.WorkerBeat("w")).Result(); err != nil || v != "host" {
		t.Errorf("heartbeat %q %v, want it back", v, err)
	}
	if dead, err := s.Declare(ctx, "w", false); err != nil || dead {
		t.Errorf("declared a beating worker: %v %v", dead, err)
	}
}

func TestScriptsSurviveFlush(t *testing.T) {
	t.Parallel()
	s := setup(t)
	join(t, s, "w")
	admit(t, s, "a")
	must(t, s.cmd.ScriptFlush(t.Context()).Err())
	c := claim(t, s, "w", 1)[0]
	must(t, s.cmd.ScriptFlush(t.Context()).Err())
	one(t, s, c.move(task.Finish, task.Succeeded))
}
