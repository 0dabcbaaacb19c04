package api

import (
	"cmp"
	"context"
	"math"
	"slices"
	"strconv"
	"strings"

	"connectrpc.com/connect"

	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// groups are the parts of a listing in order: what runs, what waits, what is over, each the newest first.
var groups = [][]task.State{
	{task.Running},
	{task.Queued},
	{task.Delayed, task.Waiting},
	{task.Succeeded, task.Failed, task.Cancelled, task.Expired},
}

// page lists on in the cursor's group, until the page is full or the group ends.
func (l *lister) page(ctx context.Context, at cursor) (next cursor, end bool, err error) {
	switch at.Group {
	case 0:
		return l.running(ctx, at)
	case 1:
		return l.queued(ctx, at)
	case 2:
		return l.index(ctx, at, store.IndexDelayed, func(r *store.Record) int64 { return r.Due.UnixMilli() })
	default:
		return l.index(ctx, at, store.IndexDone, func(r *store.Record) int64 { return r.Ended.UnixMilli() })
	}
}

// maxLooked bounds how many records one call reads when a filter lets few of them through; the page is then short,
// and its token goes on from there.
const maxLooked = 5000

// lister collects one page.
type lister struct {
	store  *store.Store
	states map[task.State]bool // nil for all
	queue  string
	limit  int
	first  bool // there was no page before this one

	looked int
	shown  map[task.ID]bool
	out    []*millracev1.TaskView
}

// ListTasks lists tasks: those that run, then those that wait, then those that ended, each the newest first.
func (s *taskService) ListTasks(ctx context.Context, req *connect.Request[millracev1.ListTasksRequest]) (*connect.Response[millracev1.ListTasksResponse], error) {
	at, err := parseCursor(req.Msg.GetPageToken())
	if err != nil {
		return nil, err
	}
	l := &lister{store: s.store, queue: req.Msg.GetQueue(), limit: pageSize(req.Msg.GetLimit()), first: req.Msg.GetPageToken() == "", shown: map[task.ID]bool{}}
	for _, p := range req.Msg.GetStates() {
		if st := task.StateOf(p); st != task.None {
			if l.states == nil {
				l.states = map[task.State]bool{}
			}
			l.states[st] = true
		}
	}
	next, err := l.collect(ctx, at)
	if err != nil {
		return nil, wireError("list tasks", err)
	}
	return connect.NewResponse(&millracev1.ListTasksResponse{Tasks: l.out, NextPageToken: next}), nil
}

// collect fills the page and returns the token of the next one.
func (l *lister) collect(ctx context.Context, at cursor) (string, error) {
	for at.Group < len(groups) {
		if !l.wants(groups[at.Group]) {
			at = cursor{Group: at.Group + 1}
			continue
		}
		next, end, err := l.page(ctx, at)
		if err != nil {
			return "", err
		}
		if at = next; end {
			at = cursor{Group: at.Group + 1}
		}
		if l.full() && at.Group < len(groups) {
			return at.token(), nil
		}
	}
	return "", nil
}

func (l *lister) wants(states []task.State) bool {
	return l.states == nil || slices.ContainsFunc(states, func(s task.State) bool { return l.states[s] })
}

func (l *lister) room() int  { return l.limit - len(l.out) }
func (l *lister) full() bool { return l.room() <= 0 || l.looked >= maxLooked }

// show adds a record if the filter lets it through and it is in one of the states of the group.
func (l *lister) show(group int, r *store.Record) {
	if r == nil || l.shown[r.ID] || l.states != nil && !l.states[r.State] {
		return
	}
	if q, _ := store.SplitLane(r.Lane); l.queue != "" && q != l.queue {
		return
	}
	// A task may have moved since its index was read. It is shown as it is now, unless it may have been shown on an
	// earlier page, in the group that it moved to.
	if !l.first && !slices.Contains(groups[group], r.State) && groupOf(r.State) <= group {
		return
	}
	l.shown[r.ID] = true
	l.out = append(l.out, View(r, false))
}

func groupOf(s task.State) int {
	return slices.IndexFunc(groups, func(states []task.State) bool { return slices.Contains(states, s) })
}

// running lists by id, because the order of the index changes with every renewal. Ids that we made begin with the
// time. There are never more running tasks than the fleet has slots.
func (l *lister) running(ctx context.Context, at cursor) (cursor, bool, error) {
	ids, err := l.store.Listed(ctx, store.IndexRunning, 0, maxRunning, false)
	if err != nil {
		return at, false, err
	}
	slices.SortFunc(ids, func(a, b task.ID) int { return cmp.Compare(b, a) })
	if at.ID != "" {
		i := slices.IndexFunc(ids, func(id task.ID) bool { return id < task.ID(at.ID) })
		if i < 0 {
			return at, true, nil
		}
		ids = ids[i:]
	}
	for len(ids) > 0 && !l.full() {
		page := ids[:min(len(ids), l.step())]
		records, err := l.read(ctx, page)
		if err != nil {
			return at, false, err
		}
		for i, r := range records {
			if l.room() <= 0 {
				break
			}
			l.show(at.Group, r)
			at.ID, ids = string(page[i]), ids[1:]
		}
	}
	return at, len(ids) == 0, nil
}

// step is how many records to read at once: a page, a little more when a filter may drop some.
func (l *lister) step() int {
	n := l.room()
	if l.queue != "" || l.states != nil {
		n = max(n, 200)
	}
	return n
}

func (l *lister) read(ctx context.Context, ids []task.ID) ([]*store.Record, error) {
	l.looked += len(ids)
	return l.store.Records(ctx, ids)
}

// index lists a sorted set from its end. New members push positions back, never forward, so that what a page brings
// again can be told by its score and id, and nothing is passed over.
func (l *lister) index(ctx context.Context, at cursor, ix store.Index, score func(*store.Record) int64) (cursor, bool, error) {
	for !l.full() {
		n := l.step()
		ids, err := l.store.Listed(ctx, ix, at.Pos, int64(n), true)
		if err != nil {
			return at, false, err
		}
		records, err := l.read(ctx, ids)
		if err != nil {
			return at, false, err
		}
		for i, r := range records {
			if l.room() <= 0 {
				return at, false, nil
			}
			at.Pos++
			if r == nil {
				continue // its retention is over, the index is swept now and then
			}
			sc := score(r)
			if at.ID != "" && slices.Contains(groups[at.Group], r.State) && !after(sc, ids[i], at) {
				continue // shown on an earlier page
			}
			l.show(at.Group, r)
			at.ID, at.At = string(ids[i]), sc
		}
		if len(ids) < n {
			return at, true, nil
		}
	}
	return at, false, nil
}

// after reports whether a member comes behind the cursor in descending order.
func after(score int64, id task.ID, at cursor) bool {
	if score != at.At {
		return score < at.At
	}
	return string(id) < at.ID
}

// queued merges the lanes by entry id, the newest first.
func (l *lister) queued(ctx context.Context, at cursor) (cursor, bool, error) {
	lanes, err := l.lanes(ctx)
	if err != nil {
		return at, false, err
	}
	for !l.full() {
		found, horizon, err := l.entries(ctx, lanes, at)
		if err != nil {
			return at, false, err
		}
		for _, e := range found {
			if l.room() <= 0 {
				return at, false, nil
			}
			l.show(at.Group, e.record)
			at.Entry, at.Lane = e.record.Entry, e.record.Lane
		}
		if horizon == "" {
			return at, true, nil
		}
		at.Entry, at.Lane = horizon, "" // "" is behind every lane: all entries with the horizon's id were looked at
	}
	return at, false, nil
}

func (l *lister) lanes(ctx context.Context) ([]string, error) {
	if l.queue == "" {
		return l.store.Lanes(ctx)
	}
	var lanes []string
	for _, p := range store.Priorities {
		lanes = append(lanes, store.Lane(l.queue, p))
	}
	return lanes, nil
}

type queuedEntry struct{ record *store.Record }

// entries returns tasks that wait behind the cursor, in order, and how far down every lane was read: below the
// horizon some lane may have more. It is "" when all lanes were read to their ends.
func (l *lister) entries(ctx context.Context, lanes []string, at cursor) (found []queuedEntry, horizon string, err error) {
	n := l.step()
	for _, lane := range lanes {
		ids, last, err := l.store.Queued(ctx, lane, before(at, lane), n)
		if err != nil {
			return nil, "", err
		}
		records, err := l.read(ctx, ids)
		if err != nil {
			return nil, "", err
		}
		for _, r := range records {
			// Entries of running tasks stay in the stream until their end. On the first page all running tasks were
			// shown by now, but for those that were claimed just now.
			if r != nil && r.Lane == lane && (r.State == task.Queued || l.first && r.State == task.Running && !l.shown[r.ID]) {
				found = append(found, queuedEntry{r})
			}
		}
		if len(ids) >= n && less(horizon, last) {
			horizon = last
		}
	}
	slices.SortFunc(found, func(a, b queuedEntry) int {
		if c := compareEntries(b.record.Entry, a.record.Entry); c != 0 {
			return c
		}
		return cmp.Compare(b.record.Lane, a.record.Lane)
	})
	if horizon != "" {
		found = slices.DeleteFunc(found, func(e queuedEntry) bool { return less(e.record.Entry, horizon) })
	}
	return found, horizon, nil
}

// before is the exclusive upper bound for a lane. Entries of different lanes may have the same id; among those the
// order is by lane, descending: the cursor's lane and those above it are done with that id, those below are not.
func before(at cursor, lane string) string {
	if at.Entry == "" || lane >= at.Lane {
		return at.Entry
	}
	ms, seq := entryParts(at.Entry)
	if seq == math.MaxUint64 {
		return strconv.FormatUint(ms+1, 10) + "-0"
	}
	return strconv.FormatUint(ms, 10) + "-" + strconv.FormatUint(seq+1, 10)
}

func less(a, b string) bool { return a == "" && b != "" || compareEntries(a, b) < 0 }

func compareEntries(a, b string) int {
	am, as := entryParts(a)
	bm, bs := entryParts(b)
	return cmp.Or(cmp.Compare(am, bm), cmp.Compare(as, bs))
}

func entryParts(id string) (ms, seq uint64) {
	m, s, _ := strings.Cut(id, "-")
	ms, _ = strconv.ParseUint(m, 10, 64)
	seq, _ = strconv.ParseUint(s, 10, 64)
	return ms, seq
}
