package store

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/redistest"
	"github.com/millrace/millrace/internal/task"
)

// TestReaderReadsItsHistoryAfterLostReply: what Redis delivered into a broken connection is read again.
func TestReaderReadsItsHistoryAfterLostReply(t *testing.T) {
	t.Parallel()
	srv := redistest.Shared(t)
	p := redistest.NewProxy(t, srv.Addr())
	s := open(t, p.URL(), srv.Prefix(t))
	direct := open(t, srv.URL(), s.opts.Namespace)
	ctx := t.Context()
	stream := s.keys.Tasks()
	r := s.NewReader(stream, GroupDispatcher, "d")
	must(t, s.EnsureGroup(ctx, stream, GroupDispatcher))
	if _, err := r.Read(ctx, 10, time.Millisecond); err != nil { // drains the history, keeps the connection
		t.Fatal(err)
	}
	if _, err := r.Read(ctx, 10, time.Millisecond); err != nil {
		t.Fatal(err)
	}
	must(t, direct.cmd.XAdd(ctx, &redis.XAddArgs{Stream: stream, Values: []any{"task", "1"}}).Err())
	p.Blackhole(redistest.ToClient)
	done := make(chan error)
	go func() {
		_, err := r.Read(ctx, 10, time.Millisecond)
		done <- err
	}()
	for {
		x, err := direct.cmd.XPending(ctx, stream, GroupDispatcher).Result()
		must(t, err)
		if x.Count == 1 {
			break // delivered, and the reply is held back
		}
		time.Sleep(time.Millisecond)
	}
	p.Reset()
	if err := <-done; err == nil {
		t.Fatal("the reply was not lost")
	}
	p.Restore()
	got, err := r.Read(ctx, 10, time.Millisecond)
	must(t, err)
	if len(got) != 1 || got[0].Fields["task"] != "1" {
		t.Errorf("read %v, want the entry of the lost reply", got)
	}
}

func TestReaderMakesLostGroupAgain(t *testing.T) {
	t.Parallel()
	s := setup(t)
	ctx := t.Context()
	must(t, s.cmd.XAdd(ctx, &redis.XAddArgs{Stream: s.keys.Tasks(), Values: []any{"task", "1"}}).Err())
	r := s.NewReader(s.keys.Tasks(), GroupDispatcher, "d")
	for range 3 {
		got, err := r.Read(ctx, 10, time.Millisecond)
		must(t, err)
		if len(got) == 1 {
			return
		}
	}
	t.Error("an entry from before the group was made is not read")
}

func TestTrimResultsKeepsUnread(t *testing.T) {
	t.Parallel()
	s := setup(t)
	ctx := t.Context()
	key := s.keys.Results()
	ago := func(d time.Duration) string { return fmt.Sprintf("%d-0", s.Now().Add(-d).UnixMilli()) }
	ids := []string{ago(50 * time.Minute), ago(40 * time.Minute), ago(30 * time.Minute), ago(20 * time.Minute), ago(time.Second)}
	for _, id := range ids {
		must(t, s.cmd.XAdd(ctx, &redis.XAddArgs{Stream: key, ID: id, Values: []any{"r", "x"}}).Err())
	}
	must(t, s.EnsureGroup(ctx, key, GroupDispatcher))
	must(t, s.EnsureGroup(ctx, key, "billing"))
	read := func(group string, n int, ack bool) {
		got, err := s.cmd.XReadGroup(ctx, &redis.XReadGroupArgs{Group: group, Consumer: "c", Streams: []string{key, ">"}, Count: int64(n), Block: -1}).Result()
		must(t, err)
		for _, m := range got[0].Messages {
			if ack {
				must(t, s.cmd.XAck(ctx, key, group, m.ID).Err())
			}
		}
	}
	left := func() (out []string) {
		stale, err := s.TrimResults(ctx, time.Minute)
		must(t, err)
		if len(stale) > 0 {
			t.Errorf("removed groups %v", stale)
		}
		msgs, err := s.cmd.XRange(ctx, key, "-", "+").Result()
		must(t, err)
		for _, m := range msgs {
			out = append(out, m.ID)
		}
		return out
	}
	read(GroupDispatcher, 5, true)
	if d := cmp.Diff(ids, left()); d != "" {
		t.Errorf("billing has read nothing:\n%s", d)
	}
	read("billing", 2, true)
	read("billing", 2, false)
	// Up to the newest that everybody is through with; that one itself may stay.
	if got := left(); len(got) < 3 || got[len(got)-3] != ids[2] {
		t.Errorf("billing still works on %v, left are %v", ids[2:4], got)
	}
	must(t, s.cmd.XAck(ctx, key, "billing", ids[2], ids[3]).Err())
	if got := left(); len(got) > 2 || got[len(got)-1] != ids[4] {
		t.Errorf("left are %v, want the young one and at most the last read", got)
	}
}

func TestResolve(t *testing.T) {
	t.Parallel()
	s := setup(t)
	ctx := t.Context()
	join(t, s, "w")
	admit(t, s, "run-1", "wait-1", "wait-2", "twin", "twin-2")
	one(t, s, admission("later-1", task.Delayed, nil))
	claim(t, s, "w", 1)
	// The index of final tasks may still name some whose record has gone.
	for i := range 5 {
		must(t, s.cmd.ZAdd(ctx, s.keys.Done(), redis.Z{Score: 1, Member: fmt.Sprintf("later-%d", 100+i)}).Err())
	}
	must(t, s.cmd.Set(ctx, s.keys.TaskWorker("run-1"), "w", 0).Err())
	for prefix, want := range map[string]task.ID{"run": "run-1", "wait-2": "wait-2", "later": "later-1", "twin": "twin", "twin-": "twin-2"} {
		if got, err := s.Resolve(ctx, prefix); err != nil || got != want {
			t.Errorf("%q resolves to %q, %v; want %q", prefix, got, err, want)
		}
	}
	for _, prefix := range []string{"", "nobody", "*", "later-100", "run-1:workerId"} {
		if got, err := s.Resolve(ctx, prefix); !errors.Is(err, ErrNotFound) {
			t.Errorf("%q resolves to %q, %v; want not found", prefix, got, err)
		}
	}
	_, err := s.Resolve(ctx, "wait")
	if a, ok := errors.AsType[*AmbiguousError](err); !ok || len(a.Examples) != 2 {
		t.Errorf("wait resolves with %v, want two examples", err)
	}
}

// TestUnreadableIsNotMissing: a Redis that refuses to answer has not said that there is no record.
func TestUnreadableIsNotMissing(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t)
	s := open(t, srv.URL(), "")
	admit(t, s, "a")
	srv.Do(t, "ACL", "SETUSER", "default", "-hmget", "-hgetall")
	if sn, err := s.Snapshots(t.Context(), []task.ID{"a"}); err == nil {
		t.Errorf("snapshot %+v without an error", sn[0])
	}
	if r, err := s.Records(t.Context(), []task.ID{"a"}); err == nil {
		t.Errorf("record %v without an error", r[0])
	}
}

func TestKeyNames(t *testing.T) {
	t.Parallel()
	k, n := NewKeys(""), NewKeys("ns")
	for got, want := range map[string]string{
		k.Tasks(): "tasks", k.Results(): "results", k.Dead(): "dead", k.Dispatch("q:high"): "dispatch:q:high", k.Logs("3"): "logs:3",
		k.Task("x"): "task:x", k.TaskOf() + "x": "task:x", k.TaskWorker("x"): "task:x:workerId",
		k.WorkerBeat("w"): "worker:w:hb", k.WorkerTasks("w"): "worker:w:task", k.WorkerMeta("w"): "worker:w:meta",
		k.Dispatcher("d"): "dispatcher:d", k.Dispatchers(): "dispatchers", k.Workers(): "workers", k.Queues(): "queues", k.Logsinks(): "logsinks",
		k.Delayed(): "delayed", k.Running(): "running", k.Done(): "done", k.Expiring(): "expiring", k.Conf(): "conf",
		n.Tasks(): "ns:tasks", n.Task("x"): "ns:task:x", n.WorkerBeat("w"): "ns:worker:w:hb", n.Dispatch("q:gpu2:low"): "ns:dispatch:q:gpu2:low",
	} {
		if got != want {
			t.Errorf("key %q, want %q", got, want)
		}
	}
	for lane, want := range map[string][2]string{"q:high": {"q", "high"}, "q:gpu2:low": {"q", "low"}} {
		if q, p := SplitLane(lane); q != want[0] || p != want[1] {
			t.Errorf("lane %q is %q, %q", lane, q, p)
		}
	}
	if Shard("g.1", 16) != Shard("g.2", 16) || Shard("anything", 1) != 0 {
		t.Error("members of a group lie in different shards")
	}
}
