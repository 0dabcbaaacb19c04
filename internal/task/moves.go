package task

import "slices"

// Move is a change of a task's record. Every move is one guarded script: nobody changes a record otherwise.
type Move string

// The moves; docs/states.md draws them.
const (
	Admit     Move = "admit"      // a producer's task gets its record
	Promote   Move = "promote"    // a delayed task is due
	Expire    Move = "expire"     // expires_at has passed
	Claim     Move = "claim"      // an agent takes a queued task
	Renew     Move = "renew"      // its owner is alive
	Finish    Move = "finish"     // its owner tells the final outcome
	Retry     Move = "retry"      // its owner tells an outcome that the retry rule forgives
	Release   Move = "release"    // its owner gives it back
	Lose      Move = "lose"       // its owner is dead, the budget of losses is not spent
	LoseFinal Move = "lose_final" // its owner is dead, the budget of losses is spent
	Cancel    Move = "cancel"     // somebody wants it to end
	Requeue   Move = "requeue"    // the audit found a queued record whose entry is gone
)

// Ask is a condition on the record or beside it that a rule demands.
type Ask uint16

// The conditions.
const (
	// SameAttempt: the record's attempt is the one the mover names. It is the fencing token.
	SameAttempt Ask = 1 << iota
	// SameOwner: the record's owner is the worker the mover names.
	SameOwner
	// NoCancel: no cancel mark stands.
	NoCancel
	// HasCancel: a cancel mark stands.
	HasCancel
	// DeadOwner: the worker that is losing the task carries the dead mark, or its lease on a task ran out a whole lease ago.
	DeadOwner
	// Acked: XACK of the entry that the mover works on returned 1.
	Acked
)

// Effect is something a rule does beside setting the state.
type Effect uint32

// The effects. Those that remove are executed before those that add, so that moves work at the memory limit.
const (
	// DropEntry removes the task's current entry: XACK and XDEL in a dispatch stream.
	DropEntry Effect = 1 << iota
	// DropDelayed removes the task from `delayed`.
	DropDelayed
	// DropRunning removes it from `running`.
	DropRunning
	// NextAttempt adds one to the attempt. No attempt number is ever given to two workers.
	NextAttempt
	// CountFailure adds one to the failures.
	CountFailure
	// CountLoss adds one to the losses.
	CountLoss
	// TakeOwner makes the mover the owner.
	TakeOwner
	// MarkCancel sets the cancel mark.
	MarkCancel
	// AddEntry adds an entry to the dispatch stream.
	AddEntry
	// AddDelayed puts the task into `delayed` with its due time.
	AddDelayed
	// AddRunning puts or moves the task in `running` with its lease deadline.
	AddRunning
	// AddResult adds to `results` and to `done`, and starts the record's retention.
	AddResult
	// AddDead adds a dead letter with the story of the task.
	AddDead
	// KeepEnd stores the AttemptEnd of the attempt.
	KeepEnd
)

// ToGiven as a rule's To means that the mover chooses the state, within Choice.
const ToGiven State = 0

// Rule is one row of the table: in these states, if all of Asks hold, the move leads To with Effects.
type Rule struct {
	Move    Move
	From    []State
	Asks    Ask
	To      State
	Choice  []State // what ToGiven may be
	Effects Effect
}

var open = []State{Waiting, Delayed, Queued}

// leave is what every move away from running does.
const leave = DropEntry | DropRunning | KeepEnd

// Table holds every legal move. For a move, the first row that fits is taken; when none fits the record stays as it is.
var Table = []Rule{
	{Move: Admit, From: []State{None}, To: ToGiven, Choice: []State{Queued, Delayed}, Effects: NextAttempt | AddEntry | AddDelayed},

	{Move: Promote, From: []State{Delayed}, Asks: SameAttempt, To: Queued, Effects: DropDelayed | AddEntry},

	{Move: Expire, From: open, Asks: SameAttempt, To: Expired, Effects: DropEntry | DropDelayed | AddResult},

	{Move: Claim, From: []State{Queued}, Asks: SameAttempt, To: Running, Effects: TakeOwner | AddRunning},

	{Move: Renew, From: []State{Running}, Asks: SameAttempt | SameOwner, To: Running, Effects: AddRunning},

	{
		Move: Finish, From: []State{Running}, Asks: SameAttempt | SameOwner | NoCancel, To: ToGiven,
		Choice: []State{Succeeded, Failed, Cancelled}, Effects: leave | CountFailure | AddResult,
	},
	{Move: Finish, From: []State{Running}, Asks: SameAttempt | SameOwner | HasCancel, To: Cancelled, Effects: leave | AddResult},

	{
		Move: Retry, From: []State{Running}, Asks: SameAttempt | SameOwner | NoCancel, To: Delayed,
		Effects: leave | CountFailure | NextAttempt | AddDelayed,
	},
	{Move: Retry, From: []State{Running}, Asks: SameAttempt | SameOwner | HasCancel, To: Cancelled, Effects: leave | AddResult},

	{
		Move: Release, From: []State{Running}, Asks: SameAttempt | SameOwner | NoCancel, To: Delayed,
		Effects: leave | NextAttempt | AddDelayed,
	},
	{Move: Release, From: []State{Running}, Asks: SameAttempt | SameOwner | HasCancel, To: Cancelled, Effects: leave | AddResult},

	{
		Move: Lose, From: []State{Running}, Asks: SameAttempt | SameOwner | NoCancel | DeadOwner, To: Delayed,
		Effects: leave | CountLoss | NextAttempt | AddDelayed,
	},
	{Move: Lose, From: []State{Running}, Asks: SameAttempt | SameOwner | HasCancel | DeadOwner, To: Cancelled, Effects: leave | AddResult},
	{Move: Lose, From: []State{Queued}, Asks: SameAttempt | NoCancel | DeadOwner | Acked, To: Delayed, Effects: DropEntry | AddDelayed},

	{
		Move: LoseFinal, From: []State{Running}, Asks: SameAttempt | SameOwner | NoCancel | DeadOwner, To: Failed,
		Effects: leave | CountLoss | AddResult | AddDead,
	},
	{Move: LoseFinal, From: []State{Running}, Asks: SameAttempt | SameOwner | HasCancel | DeadOwner, To: Cancelled, Effects: leave | AddResult},

	{Move: Cancel, From: open, Asks: SameAttempt, To: Cancelled, Effects: DropEntry | DropDelayed | MarkCancel | AddResult},
	{Move: Cancel, From: []State{Running}, Asks: SameAttempt, To: Running, Effects: MarkCancel},

	{Move: Requeue, From: []State{Queued}, Asks: SameAttempt, To: Delayed, Effects: DropEntry | AddDelayed},
}

// Input is what a mover brings along.
type Input struct {
	Attempt uint32   // the attempt it means
	Worker  WorkerID // the worker it is, or whose task it moves
	To      State    // for ToGiven
	Dead    bool     // as far as the mover knows the worker is dead; the script asks again
	Acked   bool     // as far as the mover knows the entry is pending; the script asks again
}

// Select returns the row that applies to the record, and whether there is one. It is a guess until the script has
// asked the same questions inside Redis.
func Select(m Move, r Record, in Input) (Rule, bool) {
	for _, rule := range Table {
		if rule.Move == m && rule.fits(r, in) {
			return rule, true
		}
	}
	return Rule{}, false
}

func (u Rule) fits(r Record, in Input) bool {
	if !has(u.From, r.State) {
		return false
	}
	if u.To == ToGiven && !has(u.Choice, in.To) {
		return false
	}
	a := u.Asks
	switch {
	case a&SameAttempt != 0 && r.Attempt != in.Attempt,
		a&SameOwner != 0 && r.Owner != in.Worker,
		a&NoCancel != 0 && r.Cancel,
		a&HasCancel != 0 && !r.Cancel,
		a&DeadOwner != 0 && !in.Dead,
		a&Acked != 0 && !in.Acked:
		return false
	}
	return true
}

// Apply returns the record after the rule. The caller has made sure that the rule fits.
func (u Rule) Apply(r Record, in Input) Record {
	r.State = u.Target(in)
	e := u.Effects
	if e&NextAttempt != 0 {
		r.Attempt++
	}
	if e&CountFailure != 0 && r.State != Succeeded && r.State != Cancelled {
		r.Failures++
	}
	if e&CountLoss != 0 {
		r.Lost++
	}
	if e&TakeOwner != 0 {
		r.Owner = in.Worker
	}
	if e&MarkCancel != 0 {
		r.Cancel = true
	}
	return r
}

// Target is the state that the rule leads to.
func (u Rule) Target(in Input) State {
	if u.To == ToGiven {
		return in.To
	}
	return u.To
}

// Does reports whether the rule has the effect, given the state it leads to: an admitted task gets either an entry
// or a place in `delayed`.
func (u Rule) Does(e Effect, in Input) bool {
	if u.Effects&e == 0 {
		return false
	}
	switch e {
	case AddEntry:
		return u.Target(in) == Queued
	case AddDelayed:
		return u.Target(in) == Delayed
	default:
		return true
	}
}

func has(list []State, s State) bool {
	return slices.Contains(list, s)
}
