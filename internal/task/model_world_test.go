package task

import "fmt"

// The model: one task, everything around it that its moves touch, and actors that may stop between any two steps.
// It holds no rule of its own about the record: those come from Table through Select, fits, Apply and Does.
// Stream entries, indexes and marks change only as the scripts of internal/store change them.

// guess is the record as an actor read it some time ago. As in store.Do the entry is taken from it when the rest
// still is what was read, and from Redis otherwise.
type guess struct {
	rec   Record8
	entry uint8
}

// Record8 is Record in small comparable fields.
type Record8 struct {
	state          State
	attempt, owner uint8
	cancel         bool
	failures, lost uint8
}

func (r Record8) record() Record {
	return Record{
		State: r.state, Attempt: uint32(r.attempt), Owner: workerName(r.owner), Cancel: r.cancel,
		Failures: uint32(r.failures), Lost: uint32(r.lost),
	}
}

func small(r Record) Record8 {
	return Record8{
		state: r.State, attempt: uint8(r.Attempt), owner: workerNumber(r.Owner), cancel: r.Cancel,
		failures: uint8(r.Failures), lost: uint8(r.Lost),
	}
}

func workerName(n uint8) WorkerID {
	if n == 0 {
		return ""
	}
	return WorkerID([]byte{'w', '0' + n})
}

func workerNumber(w WorkerID) uint8 {
	if w == "" {
		return 0
	}
	return w[1] - '0'
}

// entry of the dispatch stream. Its id is never used again; pel is the consumer that it is pending for.
type entry struct{ id, attempt, pel uint8 }

// reaperName is the consumer that adopted entries are pending for.
const reaperName = 9

type mode uint8

const (
	alive mode = iota
	frozen
	crashed
)

// What a worker has to tell about its attempt.
const (
	outNone uint8 = iota
	outGood
	outBad
	outCancelled
	outRelease
)

// machine is a place where one incarnation of an agent lives at a time.
type machine struct {
	id   uint8 // worker id
	mode mode
	// lapsed: its own deadline passed, so it or its guard has killed what ran. It is shorter than the heartbeat's TTL.
	lapsed bool
	reply  entry // the answer to a claim is under way
	belief uint8 // attempt that it knows it owns
	entry  uint8 // that attempt's entry
	proc   uint8 // attempt whose processes exist
	out    uint8
	// echo is what it has told without hearing the answer, and will tell once more, while its slot is free again.
	echo echo
}

type echo struct{ attempt, entry, out uint8 }

// What a dispatcher, the reaper or the canceller is about to apply.
const (
	opNone uint8 = iota
	opAdmit
	opPromote
	opExpire
	opForget
	opLose
	opDrop
	opRequeue
	opCancel
)

// actor has read something and will apply it later, or never.
type actor struct {
	op    uint8
	entry uint8 // what it works on: an entry of `tasks` or of the dispatch stream
	from  uint8 // whose task the reaper is losing
	about uint8 // the attempt that the adopted entry is about
	guess guess
}

const (
	maxEntries = 4
	maxWorker  = 6
)

// world is one state. It is comparable, so a map of worlds is the set of states.
type world struct {
	rec     Record8
	current uint8 // the record's entry
	entries [maxEntries]entry
	lastID  uint8
	tasks   [2]bool // entries in `tasks`, pending for some dispatcher
	sent    uint8   // how many the producer has added
	copies  uint8   // how many it may add
	second  bool    // there is a second dispatcher
	delayed bool
	running bool
	results uint8
	outcome State // the first final state

	beat, dead, buried uint8            // sets of worker ids
	given              [maxWorker]uint8 // attempt -> worker that claimed it
	lastWorker         uint8

	machines   [2]machine
	dispatch   [2]actor
	reaper     actor
	audit      actor
	canceller  actor
	faults     uint8 // left: crashes, freezes, cuts
	losses     uint8 // left: lost replies
	drains     uint8 // left
	expires    bool
	streamLoss bool // left: an entry nobody has read may vanish
	twice      bool // left: an entry nobody has read may be doubled
}

func set(m *uint8, id uint8)        { *m |= 1 << id }
func clearBit(m *uint8, id uint8)   { *m &^= 1 << id }
func member(m uint8, id uint8) bool { return m&(1<<id) != 0 }
func (w *world) deadOrGone(id uint8) bool {
	return id == reaperName || member(w.dead, id) || member(w.buried, id)
}

func (w *world) find(id uint8) *entry {
	if id == 0 {
		return nil
	}
	for i := range w.entries {
		if w.entries[i].id == id {
			return &w.entries[i]
		}
	}
	return nil
}

func (w *world) remove(id uint8) {
	n := 0
	for _, e := range w.entries {
		if e.id != 0 && e.id != id {
			w.entries[n] = e
			n++
		}
	}
	for ; n < maxEntries; n++ {
		w.entries[n] = entry{}
	}
}

func (w *world) addEntry(attempt uint8) uint8 {
	for i := range w.entries {
		if w.entries[i].id == 0 {
			w.lastID++
			w.entries[i] = entry{id: w.lastID, attempt: attempt}
			return w.lastID
		}
	}
	panic("model: no room for another entry")
}

func (w *world) read() guess { return guess{w.rec, w.current} }

// rules is how the model asks the table; a mutation replaces it.
type rules struct {
	table []Rule // nil: the real one, through Select
	// The rest weakens the world around the table.
	reuseIDs    bool // a restarted agent keeps its worker id
	sleeper     bool // no deadline of its own: nothing is killed before the heartbeat runs out
	blindForget bool // a dispatcher whose promote was refused takes the task out of `delayed` in a second step
	declareBeat bool // declared although the heartbeat is there
	adoptAny    bool // the reaper takes entries of anybody, as one that goes by their age does
}

func (u *rules) choose(m Move, r Record, in Input) (Rule, bool) {
	if u.table == nil {
		return Select(m, r, in)
	}
	for _, rule := range u.table {
		if rule.Move == m && rule.fits(r, in) {
			return rule, true
		}
	}
	return Rule{}, false
}

// apply is one guarded script. It reports whether a row was applied.
func (u *rules) apply(w *world, m Move, in Input, g guess) (bool, error) {
	e := w.current
	if g.rec.state == w.rec.state && g.rec.attempt == w.rec.attempt && g.rec.owner == w.rec.owner && g.rec.cancel == w.rec.cancel {
		e = g.entry
	}
	pending := w.find(e)
	in.Acked = pending != nil && pending.pel != 0
	rule, ok := u.choose(m, w.rec.record(), in)
	if !ok {
		return false, nil
	}
	before := w.rec
	w.rec = small(rule.Apply(w.rec.record(), in))
	if rule.Does(DropEntry, in) {
		w.remove(e)
		w.current = 0
	}
	if rule.Does(DropDelayed, in) {
		w.delayed = false
	}
	if rule.Does(DropRunning, in) {
		w.running = false
	}
	if rule.Does(AddEntry, in) {
		w.current = w.addEntry(w.rec.attempt)
	}
	if rule.Does(AddDelayed, in) {
		w.delayed = true
	}
	if rule.Does(AddRunning, in) {
		w.running = true
	}
	if rule.Does(AddResult, in) {
		w.results++
		if w.outcome == 0 {
			w.outcome = w.rec.state
		}
	}
	return true, checkMove(m, before, w.rec)
}

// checkMove holds what must be true of every single move.
func checkMove(m Move, before, after Record8) error {
	switch {
	case before.state.Final():
		return fmt.Errorf("%s changed a final task (%s)", m, before.state)
	case (m == Lose || m == LoseFinal || m == Release) && after.failures != before.failures:
		return fmt.Errorf("%s counted as a failure", m)
	case m != Lose && m != LoseFinal && after.lost != before.lost:
		return fmt.Errorf("%s counted as a loss", m)
	case after.attempt < before.attempt || after.attempt > before.attempt+1:
		return fmt.Errorf("%s made attempt %d out of %d", m, after.attempt, before.attempt)
	case before.cancel && !after.cancel:
		return fmt.Errorf("%s took back a cancel mark", m)
	}
	return nil
}

// check holds what must be true of every state.
func (w *world) check() error {
	r := w.rec
	procs, owners := 0, 0
	for _, m := range w.machines {
		if m.proc != 0 {
			procs++
		}
		if m.belief != 0 && m.out == outNone && !m.lapsed {
			owners++
		}
	}
	switch {
	case procs > 1:
		return fmt.Errorf("two live copies run")
	case owners > 1:
		return fmt.Errorf("two workers within their deadline believe that they own the task")
	case w.results > 1:
		return fmt.Errorf("%d results", w.results)
	case r.state.Final() != (w.results == 1):
		return fmt.Errorf("%s with %d results", r.state, w.results)
	case w.outcome != 0 && w.outcome != r.state:
		return fmt.Errorf("outcome %s became %s", w.outcome, r.state)
	case r.cancel && (r.state == Queued || r.state == Delayed):
		return fmt.Errorf("%s with a standing cancel mark", r.state)
	case r.cancel && r.state.Final() && r.state != Cancelled:
		return fmt.Errorf("%s in spite of a cancel mark", r.state)
	case w.delayed != (r.state == Delayed):
		return fmt.Errorf("%s, in `delayed`: %v", r.state, w.delayed)
	case w.running != (r.state == Running):
		return fmt.Errorf("%s, in `running`: %v", r.state, w.running)
	}
	e := w.find(w.current)
	switch {
	case r.state == Running && (e == nil || e.attempt != r.attempt || e.pel != r.owner && e.pel != reaperName):
		return fmt.Errorf("running without a pending entry of its owner or the reaper")
	case (r.state.Final() || r.state == Delayed) && w.current != 0:
		return fmt.Errorf("%s with an entry", r.state)
	}
	return nil
}

// settled is the end that every run must be able to reach: final, nothing pending, nothing left to claim, no copy alive.
func (w *world) settled() bool {
	if !w.rec.state.Final() || w.delayed || w.running || w.tasks[0] || w.tasks[1] {
		return false
	}
	for _, e := range w.entries {
		if e.id != 0 {
			return false
		}
	}
	return w.machines[0].proc == 0 && w.machines[1].proc == 0
}
