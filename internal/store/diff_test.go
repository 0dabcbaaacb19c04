package store

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// The differential test makes random moves on a real Redis and, beside it, on plain Go values that know nothing but
// the table, and compares everything after every step.

type shadowEntry struct {
	Entry    string
	Task     task.ID
	Attempt  uint32
	Consumer string
}

// picture is all that is compared.
type picture struct {
	Records          map[task.ID]Snapshot
	Entries          []shadowEntry
	Delayed, Running []task.ID
	Done             []task.ID
	Results, Dead    int64
}

type shadow struct {
	picture
	beats, dead, gone map[task.WorkerID]bool
}

func (h *shadow) index(set *[]task.ID, id task.ID, in bool) {
	i, found := slices.BinarySearch(*set, id)
	switch {
	case in && !found:
		*set = slices.Insert(*set, i, id)
	case !in && found:
		*set = slices.Delete(*set, i, i+1)
	}
}

func (h *shadow) drop(entry string) {
	h.Entries = slices.DeleteFunc(h.Entries, func(e shadowEntry) bool { return e.Entry == entry })
}

func (h *shadow) find(entry string) *shadowEntry {
	for i := range h.Entries {
		if h.Entries[i].Entry == entry {
			return &h.Entries[i]
		}
	}
	return nil
}

// apply interprets the table. newEntry is what Redis called an added entry.
func (h *shadow) apply(c *Change, newEntry string) bool {
	r, ok := h.Records[c.ID]
	if !ok {
		r.State = task.None
	}
	entry := r.Entry
	if same(r, c.Guess) {
		entry = c.Guess.Entry
	}
	in := c.In
	if e := h.find(entry); in.Acked {
		in.Acked = e != nil && e.Consumer != ""
	}
	in.Dead = in.Dead && (h.dead[in.Worker] || h.gone[in.Worker])
	rule, ok := task.Select(c.Move, r.Record, in)
	if !ok {
		return false
	}
	r.Record = rule.Apply(r.Record, in)
	r.Lane = testLane
	if rule.Does(task.DropEntry, in) && entry != "" {
		h.drop(entry)
		r.Entry = ""
	}
	if rule.Does(task.DropDelayed, in) {
		h.index(&h.Delayed, c.ID, false)
	}
	if rule.Does(task.DropRunning, in) {
		h.index(&h.Running, c.ID, false)
	}
	if rule.Does(task.AddEntry, in) {
		r.Entry = newEntry
		h.Entries = append(h.Entries, shadowEntry{newEntry, c.ID, r.Attempt, ""})
	}
	if rule.Does(task.AddDelayed, in) {
		h.index(&h.Delayed, c.ID, true)
	}
	if rule.Does(task.AddResult, in) {
		h.Results++
		h.index(&h.Done, c.ID, true)
	}
	if rule.Does(task.AddDead, in) {
		h.Dead++
	}
	h.Records[c.ID] = r
	return true
}

func (h *shadow) claim(w task.WorkerID, want int) (ids []task.ID) {
	for i := 0; i < len(h.Entries) && want > 0; {
		e := &h.Entries[i]
		if e.Consumer != "" {
			i++
			continue
		}
		r, ok := h.Records[e.Task]
		rule, fits := task.Select(task.Claim, r.Record, task.Input{Attempt: e.Attempt, Worker: w})
		if !ok || !fits {
			if !ok {
				h.Dead++
			}
			h.drop(e.Entry)
			continue
		}
		r.Record = rule.Apply(r.Record, task.Input{Worker: w})
		r.Entry = e.Entry
		e.Consumer = string(w)
		h.Records[e.Task] = r
		h.index(&h.Running, e.Task, true)
		ids = append(ids, e.Task)
		want--
		i++
	}
	return ids
}

// taken looks at Redis.
func taken(t *testing.T, s *Store, ids []task.ID) picture {
	t.Helper()
	ctx := t.Context()
	p := picture{Records: map[task.ID]Snapshot{}}
	snaps, err := s.Snapshots(ctx, ids)
	must(t, err)
	for i, sn := range snaps {
		if sn.State != task.None {
			p.Records[ids[i]] = sn
		}
	}
	key := s.keys.Dispatch(testLane)
	msgs, err := s.cmd.XRange(ctx, key, "-", "+").Result()
	must(t, err)
	owner := map[string]string{}
	pend, err := s.cmd.Do(ctx, "XPENDING", key, GroupAgents, "-", "+", 1000).Slice()
	if err == nil {
		for _, e := range pend {
			owner[e.([]any)[0].(string)] = e.([]any)[1].(string)
		}
	}
	for _, m := range msgs {
		p.Entries = append(p.Entries, shadowEntry{m.ID, task.ID(m.Values["i"].(string)), uint32(number(m.Values["a"].(string))), owner[m.ID]})
		delete(owner, m.ID)
	}
	if len(owner) != 0 {
		t.Errorf("pending entries without a body: %v", owner)
	}
	list := func(i Index) []task.ID {
		v, err := s.Listed(ctx, i, 0, 1000, false)
		must(t, err)
		slices.Sort(v)
		return v
	}
	p.Delayed, p.Running, p.Done = list(IndexDelayed), list(IndexRunning), list(IndexDone)
	p.Results, err = s.Length(ctx, s.keys.Results())
	must(t, err)
	p.Dead, err = s.Length(ctx, s.keys.Dead())
	must(t, err)
	return p
}

// walk is one random run.
type walk struct {
	t       *testing.T
	s       *Store
	h       *shadow
	r       *rand.Rand
	ids     []task.ID
	workers []task.WorkerID
	old     map[task.ID][]Snapshot // what somebody may still believe
	log     []string
	adopts  bool
}

func newWalk(t *testing.T, s *Store, seed uint64) *walk {
	t.Helper()
	w := &walk{t: t, s: s, r: rand.New(rand.NewPCG(seed, 1)), old: map[task.ID][]Snapshot{}, adopts: true}
	w.h = &shadow{picture: picture{Records: map[task.ID]Snapshot{}}, beats: map[task.WorkerID]bool{}, dead: map[task.WorkerID]bool{}, gone: map[task.WorkerID]bool{}}
	for i := range 8 {
		w.ids = append(w.ids, task.ID(fmt.Sprintf("t%d", i)))
	}
	must(t, s.EnsureGroup(t.Context(), s.keys.Dispatch(testLane), GroupAgents))
	w.hire()
	w.hire()
	return w
}

func (w *walk) hire() {
	id := task.WorkerID(fmt.Sprintf("w%d", len(w.workers)))
	join(w.t, w.s, id)
	w.workers = append(w.workers, id)
	w.h.beats[id] = true
}

func (w *walk) worker() task.WorkerID { return w.workers[w.r.IntN(len(w.workers))] }

func (w *walk) note(f string, a ...any) { w.log = append(w.log, fmt.Sprintf(f, a...)) }

// change makes up a move that may or may not be legal, on a belief that may or may not be true.
func (w *walk) change(id task.ID) *Change {
	moves := []task.Move{task.Admit, task.Promote, task.Expire, task.Finish, task.Retry, task.Release, task.Lose, task.LoseFinal, task.Cancel, task.Requeue}
	now := w.h.Records[id]
	c := &Change{Move: moves[w.r.IntN(len(moves))], ID: id, Guess: now, Due: time.Now().Add(time.Hour), Retention: time.Hour}
	if w.r.IntN(3) > 0 { // mostly something that fits
		switch now.State {
		case task.Delayed:
			c.Move = task.Promote
		case task.Running:
			c.Move = []task.Move{task.Finish, task.Retry, task.Release, task.Lose}[w.r.IntN(4)]
		case 0:
			c.Move = task.Admit
		}
	}
	if now.State == 0 {
		c.Guess.State = task.None
	}
	if o := w.old[id]; len(o) > 0 && w.r.IntN(4) == 0 {
		c.Guess = o[w.r.IntN(len(o))]
	}
	c.In = task.Input{Attempt: now.Attempt, Worker: now.Owner, Dead: true, Acked: true, To: task.Queued}
	switch {
	case c.Move == task.Finish:
		c.In.To = []task.State{task.Succeeded, task.Failed, task.Cancelled}[w.r.IntN(3)]
	case c.Move == task.Admit && w.r.IntN(2) == 0:
		c.In.To = task.Delayed
	}
	if w.r.IntN(6) == 0 {
		c.In.Attempt += uint32(w.r.IntN(3)) - 1
	}
	if w.r.IntN(6) == 0 || c.In.Worker == "" {
		c.In.Worker = w.worker()
	}
	if c.Move == task.Admit {
		c.Spec, c.Created = &millracev1.Task{}, time.Now()
		c.SpecBytes = encode(c.Spec)
	}
	c.End = ended(millracev1.Reason_REASON_EXIT, now.Attempt)
	return c
}

func (w *walk) batch() {
	var changes []*Change
	for _, k := range w.r.Perm(len(w.ids))[:1+w.r.IntN(3)] {
		c := w.change(w.ids[k])
		changes = append(changes, c)
		w.note("%s %s %+v", c.Move, c.ID, c.In)
	}
	var copies []*Change // Do writes into what it is given
	for _, c := range changes {
		x := *c
		copies = append(copies, &x)
	}
	out, err := w.s.Do(w.t.Context(), changes)
	must(w.t, err)
	for i, o := range out {
		must(w.t, o.Err)
		c := copies[i]
		w.old[c.ID] = append(w.old[c.ID], c.Guess)
		if done := w.h.apply(c, snap(w.t, w.s, c.ID).Entry); done != o.Done {
			w.t.Errorf("%s of %s: the table says %v, redis %v", c.Move, c.ID, done, o.Done)
		}
		if want := w.h.Records[c.ID].Record; o.Done && o.Now.Record != want {
			w.t.Errorf("%s of %s returned %+v, want %+v", c.Move, c.ID, o.Now.Record, want)
		}
	}
}

func (w *walk) claim() {
	id, want := w.worker(), 1+w.r.IntN(3)
	w.note("claim %s %d", id, want)
	got, err := w.s.Claim(w.t.Context(), ClaimFor{Worker: id, Lanes: []string{testLane}, Want: want, Lease: time.Minute})
	if w.h.dead[id] || w.h.gone[id] {
		if err == nil {
			w.t.Errorf("%s is dead and claimed %v", id, got)
		}
		return
	}
	must(w.t, err)
	var ids []task.ID
	for _, c := range got {
		ids = append(ids, c.ID)
	}
	if d := cmp.Diff(w.h.claim(id, want), ids, cmpopts.EquateEmpty()); d != "" {
		w.t.Errorf("claimed (-table +redis):\n%s", d)
	}
}

func (w *walk) renew() {
	id := w.worker()
	var held []Held
	var want []Status
	for _, k := range w.r.Perm(len(w.ids))[:w.r.IntN(3)] {
		r := w.h.Records[w.ids[k]]
		h := Held{w.ids[k], r.Attempt}
		if w.r.IntN(4) == 0 {
			h.Attempt++
		}
		st := NotOurs
		if _, ok := task.Select(task.Renew, r.Record, task.Input{Attempt: h.Attempt, Worker: id}); ok {
			if st = Ours; r.Cancel {
				st = OursCancel
			}
		}
		held, want = append(held, h), append(want, st)
	}
	w.note("renew %s %v", id, held)
	got, err := w.s.Renew(w.t.Context(), RenewFor{Worker: id, Beat: "x", TTL: time.Hour, Lease: time.Minute, Held: held, Lanes: []string{testLane}})
	if w.h.dead[id] || w.h.gone[id] {
		if err == nil {
			w.t.Errorf("%s is dead and renewed", id)
		}
		return
	}
	must(w.t, err)
	w.h.beats[id] = true
	if d := cmp.Diff(want, got.Status, cmpopts.EquateEmpty()); d != "" {
		w.t.Errorf("renewed (-table +redis):\n%s", d)
	}
	var pend []string
	for _, e := range w.h.Entries {
		if e.Consumer == string(id) {
			pend = append(pend, e.Entry)
		}
	}
	if d := cmp.Diff([][]string{pend}, got.Pending, cmpopts.EquateEmpty()); d != "" {
		w.t.Errorf("pending for %s (-table +redis):\n%s", id, d)
	}
}

func (w *walk) declare() {
	id := w.worker()
	if w.r.IntN(2) == 0 && len(w.workers) < 6 {
		must(w.t, w.s.cmd.Del(w.t.Context(), w.s.keys.WorkerBeat(string(id))).Err())
		w.h.beats[id] = false
	}
	w.note("declare %s", id)
	dead, err := w.s.Declare(w.t.Context(), id, false)
	must(w.t, err)
	if !w.h.gone[id] && !w.h.beats[id] && !w.h.dead[id] {
		w.h.dead[id] = true
		w.hire()
	}
	if want := w.h.dead[id] || w.h.gone[id]; dead != want {
		w.t.Errorf("declared %s: %v, want %v", id, dead, want)
	}
}

// reap adopts what a worker had and loses or drops it, as the reaper does.
func (w *walk) reap() {
	id := w.worker()
	w.note("reap %s", id)
	age(w.t, w.s, string(id))
	got, _, err := w.s.Adopt(w.t.Context(), id, "reaper", testLane, "", 100)
	must(w.t, err)
	var want, have []string
	if w.h.dead[id] || w.h.gone[id] {
		for i := range w.h.Entries {
			if e := &w.h.Entries[i]; e.Consumer == string(id) {
				want, e.Consumer = append(want, e.Entry), "reaper"
			}
		}
	}
	for _, o := range got {
		have = append(have, o.Entry)
	}
	if d := cmp.Diff(want, have, cmpopts.EquateEmpty()); d != "" {
		w.t.Errorf("adopted (-table +redis):\n%s", d)
	}
	for _, o := range got {
		c := w.change(o.Task.ID)
		c.Move, c.In = task.Lose, task.Input{Attempt: o.Task.Attempt, Worker: id, Dead: true, Acked: true}
		c.Guess = w.h.Records[o.Task.ID]
		if done := w.h.apply(c, ""); done != try(w.t, w.s, c).Done {
			w.t.Errorf("lose of %s: the table says %v", o.Task.ID, done)
		}
		if w.h.find(o.Entry) != nil {
			w.h.drop(o.Entry)
			must(w.t, w.s.Ack(w.t.Context(), w.s.keys.Dispatch(testLane), GroupAgents, []string{o.Entry}))
		}
	}
}

func (w *walk) bury() {
	id := w.worker()
	w.note("bury %s", id)
	buried, err := w.s.Bury(w.t.Context(), id, []string{testLane})
	must(w.t, err)
	want := w.h.dead[id] || w.h.gone[id]
	for _, e := range w.h.Entries {
		want = want && e.Consumer != string(id)
	}
	if buried != want {
		w.t.Errorf("buried %s: %v, want %v", id, buried, want)
	}
	if want {
		w.h.gone[id] = true
		w.h.dead[id] = false
	}
}

func (w *walk) step() {
	switch n := w.r.IntN(16); {
	case n < 8:
		w.batch()
	case n < 12:
		w.claim()
	case n < 13:
		w.renew()
	case n < 14:
		w.declare()
	case n < 15 && w.adopts:
		w.reap()
	default:
		w.bury()
	}
	if d := cmp.Diff(w.h.picture, taken(w.t, w.s, w.ids), cmpopts.EquateEmpty()); d != "" {
		w.t.Errorf("after it (-table +redis):\n%s", d)
	}
}

// run makes steps until something differs, and then shows how it got there.
func (w *walk) run(seed uint64, steps int) {
	w.t.Helper()
	for range steps {
		w.step()
		if w.t.Failed() {
			for _, l := range w.log[max(len(w.log)-25, 0):] {
				w.t.Log(l)
			}
			w.t.Fatalf("seed %d, after %d moves", seed, len(w.log))
		}
	}
}

func TestScriptsFollowTable(t *testing.T) {
	t.Parallel()
	runs := 60
	if testing.Short() {
		runs = 12
	}
	base := rand.Uint64N(1 << 40)
	t.Logf("seeds %d and on", base)
	for i := range uint64(runs) {
		s := setup(t)
		newWalk(t, s, base+i).run(base+i, 80)
	}
}

// TestScriptsFollowTableInMemory is the same on the server of `millrace dev`, which cannot age entries.
func TestScriptsFollowTableInMemory(t *testing.T) {
	t.Parallel()
	base := rand.Uint64N(1 << 40)
	t.Logf("seeds %d and on", base)
	for i := range uint64(10) {
		m := miniredis.RunT(t)
		s, err := New(Options{URL: "redis://" + m.Addr(), Embedded: true}, nil)
		must(t, err)
		t.Cleanup(func() { _ = s.Close() })
		w := newWalk(t, s, base+i)
		w.adopts = false
		w.run(base+i, 60)
	}
}
