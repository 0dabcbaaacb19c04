package store

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// Change is one move that somebody asks for, with all that its effects may need.
type Change struct {
	Move task.Move
	ID   task.ID
	In   task.Input

	// Guess is the record as the mover believes it is; a wrong guess costs one more round.
	Guess Snapshot

	// End of the attempt, for moves that leave running; its retry_at is filled in from Due.
	End *millracev1.AttemptEnd
	// Ends are the earlier attempts, for the story in a dead letter.
	Ends []*millracev1.AttemptEnd
	// Due is when a delayed task becomes due; the zero time means now.
	Due time.Time
	// Reason of a task that becomes final without an attempt's end.
	Reason millracev1.Reason
	// Spec of the task: for AddEntry, AddResult and Admit. Admit stores SpecBytes.
	Spec      *millracev1.Task
	SpecBytes []byte
	Retention time.Duration
	Created   time.Time

	// Took names the stream entry that brought the task, acknowledged by Admit.
	Took Entry
	// LateBefore lets Lose take a task of a living worker whose lease ended before this time.
	LateBefore time.Time
}

// Outcome of a Change.
type Outcome struct {
	// Done: this call changed the record. Otherwise Now tells what it is.
	Done bool
	Rule task.Rule
	Now  Snapshot
	Err  error // of this change alone
}

// maxRounds bounds the loop of choosing and applying. Each lost round means that somebody else moved the same task.
const maxRounds = 8

// Do runs the changes, batched, each to its own outcome. A returned error means that Redis could not be asked and
// that nothing is known about any change that is not marked Done.
func (s *Store) Do(ctx context.Context, changes []*Change) ([]Outcome, error) {
	changes = slices.Clone(changes) // replaced below by what Redis has denied
	out := make([]Outcome, len(changes))
	todo := make([]int, len(changes))
	for i := range changes {
		todo[i] = i
		out[i].Now = changes[i].Guess
	}
	if err := s.lookUp(ctx, changes, out); err != nil {
		return out, err
	}
	for round := 0; len(todo) > 0; round++ {
		if round == maxRounds {
			for _, i := range todo {
				out[i].Err = fmt.Errorf("%s %s: the record changed %d times meanwhile", changes[i].Move, changes[i].ID, maxRounds)
			}
			break
		}
		items := make([]*item, 0, len(todo))
		live := todo[:0]
		for _, i := range todo {
			rule, ok := task.Select(changes[i].Move, out[i].Now.Record, changes[i].In)
			if !ok {
				continue // no row fits: Now is the answer
			}
			out[i].Rule = rule
			items = append(items, s.compose(changes[i], rule, out[i].Now))
			live = append(live, i)
		}
		verdicts, err := s.apply(ctx, items)
		if err != nil {
			return out, err
		}
		todo = todo[:0]
		for k, v := range verdicts {
			i := live[k]
			switch {
			case v.err != nil:
				out[i].Err = fmt.Errorf("%s: %w", changes[i].Move, v.err)
			case v.done:
				out[i].Done = true
				out[i].Now.Record = out[i].Rule.Apply(out[i].Now.Record, changes[i].In)
				if c := changes[i]; c.Spec != nil {
					out[i].Now.Lane = LaneOf(c.Spec)
				}
			case same(v.now, out[i].Now):
				// The record is as expected, so a question beside it said no: the entry is not pending any more, or
				// the worker is not dead. Without that yes no row fits.
				out[i].Now = v.now
				if changes[i].Move != task.Admit {
					denied := *changes[i]
					denied.In.Acked, denied.In.Dead = false, false
					changes[i] = &denied
					todo = append(todo, i)
				}
			default:
				out[i].Now = v.now
				todo = append(todo, i)
			}
		}
	}
	return out, nil
}

// lookUp reads the records of those changes for which no row fits the guess: a guess may be old, and is no answer.
func (s *Store) lookUp(ctx context.Context, changes []*Change, out []Outcome) error {
	var ids []task.ID
	var of []int
	for i, c := range changes {
		if _, ok := task.Select(c.Move, c.Guess.Record, c.In); !ok {
			ids, of = append(ids, c.ID), append(of, i)
		}
	}
	snaps, err := s.Snapshots(ctx, ids)
	for k, sn := range snaps {
		out[of[k]].Now = sn
	}
	return err
}

func same(a, b Snapshot) bool {
	return a.State == b.State && a.Attempt == b.Attempt && a.Owner == b.Owner && a.Cancel == b.Cancel
}

// compose turns a row of the table into questions and commands. Removals come first and additions last.
func (s *Store) compose(c *Change, u task.Rule, now Snapshot) *item {
	k := s.keys
	id := string(c.ID)
	rec := k.Task(id)
	it := &item{rec: rec, expect: now.Record, anyOwner: u.Asks&task.SameOwner == 0, anyCancel: u.Asks&(task.NoCancel|task.HasCancel) == 0}
	next := u.Apply(now.Record, c.In)
	lane := now.Lane
	if c.Spec != nil {
		lane = LaneOf(c.Spec)
	}

	if u.Asks&task.DeadOwner != 0 {
		if c.LateBefore.IsZero() {
			it.asks = append(it.asks, ask{"dead", k.WorkerMeta(string(c.In.Worker)), nil})
		} else {
			it.asks = append(it.asks, ask{"late", k.Running(), []any{id, c.LateBefore.UnixMilli()}})
		}
	}
	if u.Move == task.Admit && c.Took.ID != "" {
		it.asks = append(it.asks, ask{"ack", c.Took.Stream, []any{GroupDispatcher, c.Took.ID}})
	}
	if u.Asks&task.Acked != 0 {
		it.asks = append(it.asks, ask{"ack", k.Dispatch(lane), []any{GroupAgents, now.Entry}})
	}

	do := func(name, key string, words ...any) {
		it.cmds = append(it.cmds, cmd{name: name, key: key, words: words})
	}
	does := func(e task.Effect) bool { return u.Does(e, c.In) }
	nowTime := s.Now()

	if u.Move == task.Admit && c.Took.ID != "" {
		do("XDEL", c.Took.Stream, c.Took.ID)
	}
	if does(task.DropEntry) && now.Entry != "" {
		if u.Asks&task.Acked == 0 {
			do("XACK", k.Dispatch(lane), GroupAgents, now.Entry)
		}
		do("XDEL", k.Dispatch(lane), now.Entry)
	}
	if does(task.DropDelayed) {
		do("ZREM", k.Delayed(), id)
	}
	if does(task.DropRunning) {
		do("ZREM", k.Running(), id)
	}

	fields := []any{"s", string(next.State)}
	set := func(name string, v any) { fields = append(fields, name, v) }
	if next.Attempt != now.Attempt {
		set("a", next.Attempt)
	}
	if next.Failures != now.Failures {
		set("f", next.Failures)
	}
	if next.Lost != now.Lost {
		set("l", next.Lost)
	}
	if does(task.MarkCancel) {
		set("c", nowTime.UnixMilli())
	}
	due := c.Due
	if due.IsZero() {
		due = nowTime
	}
	if does(task.AddDelayed) {
		set("d", due.UnixMilli())
	}
	if u.Move == task.Admit {
		set("p", c.SpecBytes)
		set("q", lane)
		set("t", c.Created.UnixMilli())
		if x := c.Spec.GetExpiresAt(); x != nil {
			set("x", x.AsTime().UnixMilli())
		}
	}
	end := c.End
	if does(task.KeepEnd) && end != nil {
		if next.State == task.Cancelled && end.Reason != millracev1.Reason_REASON_CANCELLED {
			// A standing cancel mark decides, whatever the attempt did of itself; its exit code is kept.
			end = proto.CloneOf(end)
			end.Reason = millracev1.Reason_REASON_CANCELLED
		}
		if does(task.AddDelayed) {
			end = proto.CloneOf(end) // the caller's may be used for another row when this one turns out not to fit
			end.RetryAt = timestamppb.New(due)
		}
		set("h"+strconv.FormatUint(uint64(now.Attempt), 10), encode(end))
	}
	if next.State.Final() {
		set("z", nowTime.UnixMilli())
		if r := finalReason(c, next.State, end); r != 0 {
			set("r", int(r))
		}
	}

	if len(it.cmds) == 0 && u.Move != task.Admit {
		// At its memory limit Redis refuses a script's first write if that could need memory. This one cannot, and does
		// nothing: only the records of final tasks have a lifetime.
		do("PERSIST", rec)
	}
	addEntry := does(task.AddEntry)
	if addEntry {
		words := []any{"*", "i", id, "a", next.Attempt}
		if d := dispatchOf(c, nowTime); d != nil {
			words = append(words, "d", d)
		}
		do("XADD", k.Dispatch(lane), words...)
		fields = append(fields, "e")
		it.cmds = append(it.cmds, cmd{name: "HSET", key: rec, bind: true, words: fields})
	} else {
		if does(task.DropEntry) && now.Entry != "" {
			do("HDEL", rec, "e")
		}
		do("HSET", rec, fields...)
	}
	if does(task.KeepEnd) && now.Attempt > keptEnds {
		do("HDEL", rec, "h"+strconv.FormatUint(uint64(now.Attempt-keptEnds), 10))
	}
	if does(task.AddDelayed) {
		do("ZADD", k.Delayed(), due.UnixMilli(), id)
		if !due.After(nowTime) {
			do("PUBLISH", "", k.Hints(), "due")
		}
	}
	if u.Move == task.Admit && c.Spec.GetExpiresAt() != nil {
		do("ZADD", k.Expiring(), c.Spec.GetExpiresAt().AsTime().UnixMilli(), id)
	}
	if does(task.AddDead) {
		do("XADD", k.Dead(), "*", "d", encode(c.story(id, now, end, nowTime)))
	}
	if does(task.AddResult) {
		do("XADD", k.Results(), "*", "r", encode(resultOf(c, next, end, nowTime)))
		do("ZADD", k.Done(), nowTime.UnixMilli(), id)
		do("PEXPIRE", rec, max(c.Retention, time.Millisecond).Milliseconds())
	}
	return it
}

// keptEnds is how many AttemptEnds a record keeps.
const keptEnds = 20

func finalReason(c *Change, st task.State, end *millracev1.AttemptEnd) millracev1.Reason {
	switch st {
	case task.Succeeded, task.Expired:
		return 0
	case task.Cancelled:
		return millracev1.Reason_REASON_CANCELLED
	default:
	}
	if end != nil {
		return end.Reason
	}
	return c.Reason
}

func resultOf(c *Change, next task.Record, end *millracev1.AttemptEnd, at time.Time) *millracev1.Result {
	r := &millracev1.Result{
		Id: string(c.ID), State: next.State.Proto(), Attempt: next.Attempt, End: end, At: timestamppb.New(at),
		Reason: finalReason(c, next.State, end), Name: c.Spec.GetName(), Labels: c.Spec.GetLabels(), Group: c.Spec.GetGroup(),
	}
	if end == nil && (next.State == task.Cancelled || next.State == task.Expired) {
		r.Attempt = next.Attempt - 1 // the present attempt never ran
	}
	return r
}

func (c *Change) story(id string, now Snapshot, end *millracev1.AttemptEnd, at time.Time) *millracev1.DeadLetter {
	d := &millracev1.DeadLetter{
		Source: "task", Task: id, Code: "lost_too_often", At: timestamppb.New(at),
		Reason:   fmt.Sprintf("agent lost %d times while it ran this task; see the attempts, then rerun it", now.Lost+1),
		Attempts: c.Ends,
	}
	if end != nil {
		d.Attempts = append(d.Attempts, end)
	}
	if c.SpecBytes != nil {
		d.Fields = map[string][]byte{"task": c.SpecBytes}
	}
	return d
}

func dispatchOf(c *Change, _ time.Time) []byte {
	if c.Spec.GetTraceparent() == "" {
		return nil
	}
	return encode(&millracev1.Dispatch{AdmittedAt: timestamppb.New(c.Created), Traceparent: c.Spec.GetTraceparent()})
}

// LaneOf is the lane that a task waits in.
func LaneOf(t *millracev1.Task) string {
	q, p := t.GetQueue(), t.GetPriority()
	if q == "" {
		q = "default"
	}
	if p == "" {
		p = "normal"
	}
	return Lane(q, p)
}

// encode panics only on messages that cannot be encoded at all, which is a mistake of ours: strings were checked at the door.
func encode(m proto.Message) []byte {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		panic(fmt.Sprintf("encode %T: %v", m, err))
	}
	return b
}

// Backoff sleeps between tries of a loop that lost Redis: 50 ms doubling to 2 s, with jitter. It returns false when ctx ended.
func Backoff(ctx context.Context, tries int) bool {
	d := min(50*time.Millisecond<<min(tries, 6), 2*time.Second)
	d = d/2 + rand.N(d/2+1)
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// ErrNotFound says that there is no record of that id (any more).
var ErrNotFound = errors.New("no such task")
