package store

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func TestAppendLogStopsAtTheLimit(t *testing.T) {
	t.Parallel()
	s := setup(t)
	ctx := t.Context()
	var chunks [][]byte
	for i := range 600 {
		chunks = append(chunks, fmt.Appendf(nil, "chunk %d", i))
	}
	for i, want := range []int{600, LogShardLimit - 600, 0} {
		if n, err := s.AppendLog(ctx, 1, chunks); err != nil || n != want {
			t.Fatalf("append %d took %d, %v, want %d", i, n, err, want)
		}
	}
	// The group is made by the first read, which gives nothing back; nothing is skipped.
	if e, err := s.ReadLogs(ctx, []int{0, 1}, 10, time.Millisecond); err != nil || len(e) > 0 {
		t.Fatalf("first read = %v, %v", e, err)
	}
	read, err := s.ReadLogs(ctx, []int{0, 1}, 5, time.Millisecond)
	must(t, err)
	if len(read) != 5 || string(read[0].Chunk) != "chunk 0" || read[0].Shard != 1 {
		t.Fatalf("read %d entries, the first %+v", len(read), read[0])
	}
	// Unfinished ones are the history of whoever comes next.
	old, err := s.PendingLogs(ctx, 1, 100)
	must(t, err)
	if len(old) != 5 || old[4].ID != read[4].ID {
		t.Errorf("%d are pending, want 5", len(old))
	}
	must(t, s.AckLogs(ctx, 1, []string{read[0].ID, read[1].ID, read[1].ID}))
	if n, err := s.LogBacklog(ctx, 1); err != nil || n != LogShardLimit-2 {
		t.Errorf("%d are left, %v", n, err)
	}
	if n, err := s.AppendLog(ctx, 1, chunks); err != nil || n != 2 {
		t.Errorf("append took %d, %v, want the 2 that fit", n, err)
	}
	// A body that somebody deleted is told apart from an empty one.
	must(t, s.cmd.XDel(ctx, s.keys.Logs("1"), read[2].ID).Err())
	old, err = s.PendingLogs(ctx, 1, 1)
	must(t, err)
	if len(old) != 1 || !old[0].Gone {
		t.Errorf("a deleted entry reads as %+v", old)
	}
}

func TestLogShardsAreFixedOnce(t *testing.T) {
	t.Parallel()
	s := setup(t)
	ctx := t.Context()
	if n, err := s.LogShards(ctx); err != nil || n != DefaultLogShards {
		t.Errorf("shards = %d, %v", n, err)
	}
	must(t, s.cmd.HSet(ctx, s.keys.Conf(), "log_shards", 7).Err())
	if n, err := s.LogShards(ctx); err != nil || n != 7 {
		t.Errorf("shards = %d, %v, want the 7 that were set", n, err)
	}
	must(t, s.cmd.HSet(ctx, s.keys.Conf(), "log_shards", "many").Err())
	if _, err := s.LogShards(ctx); err == nil {
		t.Error("a number that is none was taken")
	}
}

func TestLogLeases(t *testing.T) {
	t.Parallel()
	s := setup(t)
	ctx := t.Context()
	lease := func(id string, wishes ...LeaseWish) []string {
		t.Helper()
		h, err := s.LeaseLogShards(ctx, id, time.Minute, wishes)
		must(t, err)
		return h
	}
	steps := []struct {
		id     string
		wishes []LeaseWish
		want   []string
	}{
		{"a", []LeaseWish{LeaseTake, LeaseTake, LeaseLook}, []string{"a", "a", ""}},
		{"b", []LeaseWish{LeaseTake, LeaseDrop, LeaseTake}, []string{"a", "a", "b"}},
		{"a", []LeaseWish{LeaseDrop, LeaseTake, LeaseTake}, []string{"", "a", "b"}},
		{"b", []LeaseWish{LeaseTake, LeaseTake, LeaseTake}, []string{"b", "a", "b"}},
	}
	for i, st := range steps {
		if d := cmp.Diff(st.want, lease(st.id, st.wishes...)); d != "" {
			t.Errorf("step %d: %s", i, d)
		}
	}
	if id, err := s.LogShardOwner(ctx, 0); err != nil || id != "b" {
		t.Errorf("owner = %q, %v", id, err)
	}
	if ttl := s.cmd.PTTL(ctx, s.keys.LogLease("0")).Val(); ttl <= 0 || ttl > time.Minute {
		t.Errorf("the lease lasts %v", ttl)
	}
}

func TestLogsinkRegistry(t *testing.T) {
	t.Parallel()
	s := setup(t)
	ctx := t.Context()
	must(t, s.RegisterLogsink(ctx, "one", "host:1", time.Minute))
	must(t, s.RegisterLogsink(ctx, "two", "host:2", time.Minute))
	must(t, s.cmd.Del(ctx, s.keys.Logsink("two")).Err()) // as when it died
	addrs, err := s.LogsinkAddrs(ctx)
	must(t, err)
	if d := cmp.Diff(map[string]string{"one": "host:1"}, addrs); d != "" {
		t.Error(d)
	}
	must(t, s.UnregisterLogsink(ctx, "one"))
	if addrs, err := s.LogsinkAddrs(ctx); err != nil || len(addrs) > 0 {
		t.Errorf("still %v, %v", addrs, err)
	}
}

func TestCheckLogs(t *testing.T) {
	t.Parallel()
	s := setup(t)
	ctx := t.Context()
	must(t, s.cmd.HSet(ctx, s.keys.Task("runs"), "s", string(rune(task.Running)), "a", 30, "w", "w-2",
		"h29", encode(&millracev1.AttemptEnd{Attempt: 29, Worker: "w-1"}), "h28", "garbage").Err())
	tests := []struct {
		claim LogClaim
		want  LogVerdict
	}{
		{LogClaim{"runs", 30, "w-2"}, LogOwned},
		{LogClaim{"runs", 30, "w-1"}, LogForeign},
		{LogClaim{"runs", 29, "w-1"}, LogOwned},
		{LogClaim{"runs", 29, "w-2"}, LogForeign},
		{LogClaim{"runs", 28, "w-1"}, LogForeign},
		{LogClaim{"runs", 31, "w-2"}, LogForeign},
		{LogClaim{"runs", 3, "w-1"}, LogNoRecord},
		{LogClaim{"gone", 1, "w-1"}, LogNoRecord},
	}
	var claims []LogClaim
	for _, tt := range tests {
		claims = append(claims, tt.claim)
	}
	got, err := s.CheckLogs(ctx, claims)
	must(t, err)
	for i, tt := range tests {
		if got[i] != tt.want {
			t.Errorf("%+v = %d, want %d", tt.claim, got[i], tt.want)
		}
	}
}

func TestLogStates(t *testing.T) {
	t.Parallel()
	s := setup(t)
	ctx := t.Context()
	must(t, s.cmd.HSet(ctx, s.keys.Task("kept"), "s", "r", "g1", "old").Err())
	must(t, s.SetLogStates(ctx, []LogState{
		{"kept", 21, &millracev1.LogView{Bytes: 5, Complete: true}},
		{"gone", 1, &millracev1.LogView{Bytes: 5}},
	}))
	v, err := s.LogView(ctx, "kept", 21)
	must(t, err)
	if v.GetBytes() != 5 || !v.GetComplete() {
		t.Errorf("state = %v", v)
	}
	if s.cmd.HExists(ctx, s.keys.Task("kept"), "g1").Val() {
		t.Error("the state of an attempt that is forgotten was kept")
	}
	if s.cmd.Exists(ctx, s.keys.Task("gone")).Val() != 0 {
		t.Error("a record was made")
	}
	if v, err := s.LogView(ctx, "kept", 2); v != nil || err != nil {
		t.Errorf("an unknown state is %v, %v", v, err)
	}
}
