package task

import "testing"

// newWorld has two living workers and nothing submitted.
func newWorld() world {
	w := world{rec: Record8{state: None}, lastWorker: 2, copies: 1}
	for i := range w.machines {
		id := uint8(i + 1)
		w.machines[i].id = id
		set(&w.beat, id)
	}
	return w
}

// The worlds that are explored. One with everything in it would be too large, so each turns on what belongs together.
var modelWorlds = []struct {
	name  string
	long  bool // not under -short
	build func(w *world)
}{
	{"entry twice, two dispatchers, cancel", false, func(w *world) {
		w.copies, w.second, w.canceller.entry = 2, true, cancelWanted
	}},
	{"entry twice, two dispatchers, one fault", true, func(w *world) {
		w.copies, w.second, w.faults = 2, true, 1
	}},
	{"dispatch entry twice, one fault, lost reply", true, func(w *world) {
		w.twice, w.faults, w.losses = true, 1, 1
	}},
	{"one fault, cancel, lost reply", false, func(w *world) {
		w.faults, w.losses, w.canceller.entry = 1, 1, cancelWanted
	}},
	{"one fault, drain, cancel", false, func(w *world) {
		w.faults, w.drains, w.canceller.entry = 1, 1, cancelWanted
	}},
	{"expiry, one fault, two dispatchers, cancel", false, func(w *world) {
		w.faults, w.expires, w.second, w.canceller.entry = 1, true, true, cancelWanted
	}},
	{"dispatch entry twice, stream lost, drain", false, func(w *world) {
		w.twice, w.streamLoss, w.drains = true, true, 1
	}},
	{"stream lost, one fault, two dispatchers", false, func(w *world) {
		w.faults, w.streamLoss, w.second = 1, true, true
	}},
	{"two faults", true, func(w *world) { w.faults = 2 }},
	{"two faults, lost reply", true, func(w *world) { w.faults, w.losses = 2, 1 }},
	{"two faults, cancel", true, func(w *world) { w.faults, w.canceller.entry = 2, cancelWanted }},
	{"two faults, drain", true, func(w *world) { w.faults, w.drains = 2, 1 }},
}

func TestModelOfTable(t *testing.T) {
	t.Parallel()
	for _, m := range modelWorlds {
		t.Run(m.name, func(t *testing.T) {
			if m.long && testing.Short() {
				t.Skip("a large world")
			}
			w := newWorld()
			m.build(&w)
			got := explore(&rules{}, w, true)
			t.Logf("%d states", got.states)
			if got.broken != nil {
				t.Errorf("after %d states:\n%v", got.states, got.broken)
			}
		})
	}
}

// without returns the table with some questions not asked by the rows of some moves.
func without(asks Ask, moves ...Move) []Rule {
	var out []Rule
	for _, r := range Table {
		for _, m := range moves {
			if r.Move == m {
				r.Asks &^= asks
			}
		}
		out = append(out, r)
	}
	return out
}

// TestModelFindsWeakerRules shows that the model would notice: each weaker rule has a way to fail.
func TestModelFindsWeakerRules(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name     string
		u        rules
		progress bool
		build    func(w *world)
	}{
		{"worker id used again", rules{reuseIDs: true}, false, func(w *world) { w.faults = 1 }},
		{"lose compares neither owner nor attempt", rules{table: without(SameOwner|SameAttempt, Lose, LoseFinal)}, false, func(w *world) { w.faults = 2 }},
		{"finish does not compare the attempt", rules{table: without(SameAttempt, Finish, Retry, Release)}, false, func(w *world) { w.losses, w.drains = 1, 1 }},
		{"finish compares neither", rules{table: without(SameAttempt|SameOwner, Finish, Retry)}, false, func(w *world) { w.faults = 1 }},
		{"claim does not compare the attempt", rules{table: without(SameAttempt, Claim)}, false, func(w *world) { w.twice, w.drains = true, 1 }},
		{"lose without dead mark", rules{table: without(DeadOwner, Lose, LoseFinal), adoptAny: true}, false, func(*world) {}},
		{"declared although it beats", rules{declareBeat: true}, false, func(*world) {}},
		{"release ignores the cancel mark", rules{table: without(NoCancel, Release)}, false, func(w *world) { w.drains, w.canceller.entry = 1, cancelWanted }},
		{"retry ignores the cancel mark", rules{table: without(NoCancel, Retry)}, false, func(w *world) { w.canceller.entry = cancelWanted }},
		{"lose ignores the cancel mark", rules{table: without(NoCancel, Lose, LoseFinal)}, false, func(w *world) { w.faults, w.canceller.entry = 1, cancelWanted }},
		{"a worker that slept past its death", rules{sleeper: true}, false, func(w *world) { w.faults = 1 }},
		{"refused promote forgets in a second step", rules{blindForget: true}, true, func(w *world) { w.second, w.drains = true, 1 }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld()
			tt.build(&w)
			got := explore(&tt.u, w, tt.progress)
			if got.broken == nil {
				t.Fatalf("%d states and nothing wrong", got.states)
			}
			t.Logf("%d states\n%v", got.states, got.broken)
		})
	}
}
