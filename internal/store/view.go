package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/protobuf/proto"

	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// Record is a whole task record.
type Record struct {
	Snapshot
	ID      task.ID
	Spec    []byte
	Created time.Time
	Started time.Time // present or last claim
	Ended   time.Time
	Due     time.Time
	Reason  millracev1.Reason
	Ends    []*millracev1.AttemptEnd // the newest last
	Log     []byte                   // encoded LogView of the newest attempt that logsink knows
	LogOf   uint32                   // that attempt
}

// Record reads one record; ErrNotFound when there is none.
func (s *Store) Record(ctx context.Context, id task.ID) (*Record, error) {
	m, err := s.cmd.HGetAll(ctx, s.keys.Task(string(id))).Result()
	if err != nil {
		return nil, err
	}
	if len(m) == 0 {
		return nil, ErrNotFound
	}
	return parseRecord(id, m), nil
}

// Records reads many; a missing one is nil.
func (s *Store) Records(ctx context.Context, ids []task.ID) ([]*Record, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	cmds := make([]*redis.MapStringStringCmd, len(ids))
	_, err := s.cmd.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, id := range ids {
			cmds[i] = p.HGetAll(ctx, s.keys.Task(string(id)))
		}
		return nil
	})
	if err != nil && !isReplyError(err) {
		return nil, err
	}
	out := make([]*Record, len(ids))
	for i, c := range cmds {
		if err := unread(c.Err()); err != nil {
			return nil, err
		}
		if m := c.Val(); len(m) > 0 {
			out[i] = parseRecord(ids[i], m)
		}
	}
	return out, nil
}

// unread keeps the errors that say nothing about the key: a Redis that is loading or refuses us has not told that there
// is no record. A key of another type is no record.
func unread(err error) error {
	if err == nil || strings.HasPrefix(err.Error(), "WRONGTYPE") {
		return nil
	}
	return err
}

func parseRecord(id task.ID, m map[string]string) *Record {
	v := make([]any, len(snapshotFields))
	for i, f := range snapshotFields {
		if x, ok := m[f]; ok {
			v[i] = x
		}
	}
	r := &Record{
		Snapshot: snapshot(v), ID: id, Spec: []byte(m["p"]), Created: msTime(m["t"]), Started: msTime(m["b"]),
		Ended: msTime(m["z"]), Due: msTime(m["d"]), Reason: millracev1.Reason(number(m["r"])),
	}
	for f, x := range m {
		switch {
		case len(f) > 1 && f[0] == 'h':
			e := &millracev1.AttemptEnd{}
			if proto.Unmarshal([]byte(x), e) == nil {
				r.Ends = append(r.Ends, e)
			}
		case len(f) > 1 && f[0] == 'g':
			if n := uint32(number(f[1:])); n > r.LogOf {
				r.Log, r.LogOf = []byte(x), n
			}
		}
	}
	sort.Slice(r.Ends, func(i, j int) bool { return r.Ends[i].Attempt < r.Ends[j].Attempt })
	return r
}

func msTime(s string) time.Time {
	if s == "" {
		return time.Time{}
	}
	return time.UnixMilli(number(s))
}

// Snapshots reads the small part of many records; State is None where there is none.
func (s *Store) Snapshots(ctx context.Context, ids []task.ID) ([]Snapshot, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	cmds := make([]*redis.SliceCmd, len(ids))
	_, err := s.cmd.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, id := range ids {
			cmds[i] = p.HMGet(ctx, s.keys.Task(string(id)), snapshotFields...)
		}
		return nil
	})
	if err != nil && !isReplyError(err) {
		return nil, err
	}
	out := make([]Snapshot, len(ids))
	for i, c := range cmds {
		if err := unread(c.Err()); err != nil {
			return nil, err
		}
		out[i] = snapshot(c.Val())
	}
	return out, nil
}

// AttemptEnd returns how an attempt ended, nil when that is not known.
func (s *Store) AttemptEnd(ctx context.Context, id task.ID, attempt uint32) (*millracev1.AttemptEnd, error) {
	b, err := s.cmd.HGet(ctx, s.keys.Task(string(id)), "h"+strconv.FormatUint(uint64(attempt), 10)).Bytes()
	if errors.Is(err, redis.Nil) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	e := &millracev1.AttemptEnd{}
	return e, proto.Unmarshal(b, e)
}

// Index names one of the sorted sets of task ids by time.
type Index string

// The indexes.
const (
	IndexDelayed  Index = "delayed"
	IndexExpiring Index = "expiring"
	IndexRunning  Index = "running"
	IndexDone     Index = "done"
)

func (s *Store) index(i Index) string { return s.keys.prefix + string(i) }

// Due returns up to count ids of an index whose time has come by the server's clock, the earliest first.
func (s *Store) Due(ctx context.Context, i Index, slack time.Duration, count int) ([]task.ID, error) {
	var tm *redis.TimeCmd
	var ids *redis.StringSliceCmd
	_, err := s.cmd.Pipelined(ctx, func(p redis.Pipeliner) error {
		tm = p.Time(ctx)
		ids = p.ZRangeByScore(ctx, s.index(i), &redis.ZRangeBy{Min: "-inf", Max: strconv.FormatInt(s.Now().Add(-slack).UnixMilli(), 10), Count: int64(count)})
		return nil
	})
	if err != nil {
		return nil, err
	}
	s.noteTime(tm.Val().UnixMilli())
	return taskIDs(ids.Val()), nil
}

// NextDue tells when the earliest id of an index is due; ok is false when it is empty.
func (s *Store) NextDue(ctx context.Context, i Index) (at time.Time, ok bool, err error) {
	zs, err := s.cmd.ZRangeWithScores(ctx, s.index(i), 0, 0).Result()
	if err != nil || len(zs) == 0 {
		return time.Time{}, false, err
	}
	return time.UnixMilli(int64(zs[0].Score)), true, nil
}

// Forget takes ids out of an index.
func (s *Store) Forget(ctx context.Context, i Index, ids ...task.ID) error {
	if len(ids) == 0 {
		return nil
	}
	members := make([]any, len(ids))
	for k, id := range ids {
		members[k] = string(id)
	}
	return s.cmd.ZRem(ctx, s.index(i), members...).Err()
}

// forgetScript takes ids out of an index that their records do not belong in, each in one step with the look.
// KEYS: index. ARGV: prefix of records, the state that belongs there, ids.
var forgetScript = redis.NewScript(`
for i = 3, #ARGV do
  local st = redis.pcall('HGET', ARGV[1] .. ARGV[i], 's')
  if st ~= ARGV[2] then redis.call('ZREM', KEYS[1], ARGV[i]) end
end
return 0
`)

// ForgetUnless takes those ids out of an index whose record is not in the state that belongs there.
func (s *Store) ForgetUnless(ctx context.Context, i Index, belongs task.State, ids ...task.ID) error {
	if len(ids) == 0 {
		return nil
	}
	args := make([]any, 0, 2+len(ids))
	args = append(args, s.keys.TaskOf(), string(belongs))
	for _, id := range ids {
		args = append(args, string(id))
	}
	return forgetScript.Run(ctx, s.cmd, []string{s.index(i)}, args...).Err()
}

// Listed returns ids of an index by position, the latest time first when newest.
func (s *Store) Listed(ctx context.Context, i Index, start, count int64, newest bool) ([]task.ID, error) {
	ids, err := s.cmd.ZRangeArgs(ctx, redis.ZRangeArgs{Key: s.index(i), Start: start, Stop: start + count - 1, Rev: newest}).Result()
	return taskIDs(ids), err
}

// Count of ids in an index.
func (s *Store) Count(ctx context.Context, i Index) (int64, error) {
	return s.cmd.ZCard(ctx, s.index(i)).Result()
}

// SweepDone forgets, in the index of final tasks, ids whose record has gone with its retention. It looks at one page
// from cursor on and returns the next cursor, 0 at the end.
func (s *Store) SweepDone(ctx context.Context, cursor uint64, count int64) (removed int, next uint64, err error) {
	pairs, next, err := s.cmd.ZScan(ctx, s.keys.Done(), cursor, "", count).Result()
	if err != nil {
		return 0, cursor, err
	}
	var ids []task.ID
	for i := 0; i+1 < len(pairs); i += 2 {
		ids = append(ids, task.ID(pairs[i]))
	}
	snaps, err := s.Snapshots(ctx, ids)
	if err != nil {
		return 0, cursor, err
	}
	var gone []task.ID
	for i, sn := range snaps {
		if sn.State == task.None {
			gone = append(gone, ids[i])
		}
	}
	return len(gone), next, s.Forget(ctx, IndexDone, gone...)
}

// Queued returns ids that wait in a lane, the newest first, from before an entry id ("" for the end) on.
func (s *Store) Queued(ctx context.Context, lane, before string, count int) (ids []task.ID, last string, err error) {
	if before == "" {
		before = "+"
	} else {
		before = "(" + before
	}
	msgs, err := s.cmd.XRevRangeN(ctx, s.keys.Dispatch(lane), before, "-", int64(count)).Result()
	if err != nil {
		return nil, "", err
	}
	for _, m := range msgs {
		last = m.ID
		if id, ok := m.Values["i"].(string); ok {
			ids = append(ids, task.ID(id))
		}
	}
	return ids, last, nil
}

// Backlog of a lane: entries that no agent has taken. Exact, because finished entries are deleted.
func (s *Store) Backlog(ctx context.Context, lanes []string) (waiting, pending []int64, err error) {
	lens := make([]*redis.IntCmd, len(lanes))
	pend := make([]*redis.XPendingCmd, len(lanes))
	_, err = s.cmd.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, l := range lanes {
			lens[i] = p.XLen(ctx, s.keys.Dispatch(l))
			pend[i] = p.XPending(ctx, s.keys.Dispatch(l), GroupAgents)
		}
		return nil
	})
	if err != nil && !isReplyError(err) && !errors.Is(err, redis.Nil) {
		return nil, nil, err
	}
	for i := range lanes {
		n, p := lens[i].Val(), int64(0)
		if v := pend[i].Val(); v != nil {
			p = v.Count
		}
		waiting, pending = append(waiting, max(n-p, 0)), append(pending, p)
	}
	return waiting, pending, nil
}

// Length of a stream such as tasks, results or dead.
func (s *Store) Length(ctx context.Context, stream string) (int64, error) {
	return s.cmd.XLen(ctx, stream).Result()
}

// AmbiguousError says that a prefix fits more than one id.
type AmbiguousError struct {
	Prefix   string
	Examples []task.ID
}

func (e *AmbiguousError) Error() string {
	var ex []string
	for _, id := range e.Examples {
		ex = append(ex, string(id))
	}
	return fmt.Sprintf("id prefix %q fits several tasks (%s …): give more of it", e.Prefix, strings.Join(ex, ", "))
}

// Resolve finds the task of an id or of a unique prefix of one: ErrNotFound or *AmbiguousError otherwise. A full id
// costs one command; a prefix walks the indexes and the dispatch streams.
func (s *Store) Resolve(ctx context.Context, prefix string) (task.ID, error) {
	if prefix == "" || strings.ContainsRune(prefix, ':') { // beside records lie keys such as task:<id>:workerId
		return "", ErrNotFound
	}
	n, err := s.cmd.Exists(ctx, s.keys.Task(prefix)).Result()
	if err != nil {
		return "", err
	}
	if n == 1 {
		return task.ID(prefix), nil
	}
	live, err := s.withPrefix(ctx, prefix)
	if err != nil {
		return "", err
	}
	slices.Sort(live)
	switch len(live) {
	case 0:
		return "", ErrNotFound
	case 1:
		return live[0], nil
	default:
		return "", &AmbiguousError{Prefix: prefix, Examples: live[:min(len(live), 3)]}
	}
}

// resolvePage is how many candidates of a prefix are looked at in one go.
const resolvePage = 100

// withPrefix finds up to a few tasks that have a record and begin with prefix. Indexes may still name tasks whose
// record has gone with its retention, so only records count.
func (s *Store) withPrefix(ctx context.Context, prefix string) (live []task.ID, err error) {
	seen := map[task.ID]bool{}
	var page []task.ID
	check := func() {
		snaps, serr := s.Snapshots(ctx, page)
		if serr != nil {
			err = serr
		}
		for i, sn := range snaps {
			if sn.State != task.None {
				live = append(live, page[i])
			}
		}
		page = page[:0]
	}
	werr := s.walk(ctx, globEscape(prefix)+"*", func(id task.ID) bool {
		if !strings.HasPrefix(string(id), prefix) || seen[id] {
			return true
		}
		seen[id] = true
		if page = append(page, id); len(page) == resolvePage {
			check()
		}
		return err == nil && len(live) < 3
	})
	if werr == nil && err == nil {
		check()
	}
	return live, errors.Join(werr, err)
}

// walk shows every indexed id that may match a glob, until yield says no.
func (s *Store) walk(ctx context.Context, glob string, yield func(task.ID) bool) error {
	for _, i := range []Index{IndexRunning, IndexDelayed, IndexDone} {
		for cursor := uint64(0); ; {
			pairs, next, err := s.cmd.ZScan(ctx, s.index(i), cursor, glob, 1000).Result()
			if err != nil {
				return err
			}
			for k := 0; k < len(pairs); k += 2 {
				if !yield(task.ID(pairs[k])) {
					return nil
				}
			}
			if cursor = next; cursor == 0 {
				break
			}
		}
	}
	lanes, err := s.Lanes(ctx)
	if err != nil {
		return err
	}
	for _, l := range lanes {
		for before := ""; ; {
			ids, last, err := s.Queued(ctx, l, before, 1000)
			if err != nil {
				return err
			}
			for _, id := range ids {
				if !yield(id) {
					return nil
				}
			}
			if before = last; last == "" || len(ids) < 1000 {
				break
			}
		}
	}
	return nil
}

func globEscape(p string) string {
	return strings.NewReplacer("*", `\*`, "?", `\?`, "[", `\[`, `\`, `\\`).Replace(p)
}

func taskIDs(v []string) []task.ID {
	out := make([]task.ID, len(v))
	for i, x := range v {
		out[i] = task.ID(x)
	}
	return out
}
