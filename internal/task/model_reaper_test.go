package task

import "fmt"

// beats: heartbeats run out of workers that cannot renew, never before the worker's own deadline.
func (s *stepper) beats() {
	for id := uint8(1); id <= s.from.lastWorker; id++ {
		if !member(s.from.beat, id) {
			continue
		}
		held := false
		for _, m := range s.from.machines {
			if m.id == id && !m.lapsed {
				held = true
			}
		}
		if !held {
			s.add(fmt.Sprintf("heartbeat of w%d runs out", id), false, func(w *world) error {
				clearBit(&w.beat, id)
				return nil
			})
		}
	}
}

// reaping: declare, adopt, lose and bury are scripts of their own; the reaper may stop between any two.
func (s *stepper) reaping() {
	w := s.from
	for id := uint8(1); id <= w.lastWorker; id++ {
		if !w.deadOrGone(id) && (!member(w.beat, id) || s.u.declareBeat) {
			s.add(fmt.Sprintf("reaper declares w%d dead", id), false, func(w *world) error {
				set(&w.dead, id)
				return nil
			})
		}
	}
	if w.reaper.op != opNone {
		s.add("reaper applies "+opNames[w.reaper.op], false, s.reaperApplies)
		if w.faults > 0 {
			s.add("reaper crashes", true, func(w *world) error {
				w.faults--
				w.reaper = actor{}
				return nil
			})
		}
		return
	}
	for _, e := range w.entries {
		if e.id != 0 && e.pel != 0 && (s.u.adoptAny || w.deadOrGone(e.pel)) {
			s.add(fmt.Sprintf("reaper adopts entry %d from %s", e.id, consumer(e.pel)), false, func(w *world) error {
				w.find(e.id).pel = reaperName
				w.reaper = actor{op: opLose, entry: e.id, from: e.pel, about: e.attempt, guess: w.read()}
				return nil
			})
		}
	}
	for id := uint8(1); id <= w.lastWorker; id++ {
		if member(w.dead, id) && !w.pendingFor(id) {
			s.add(fmt.Sprintf("reaper buries w%d", id), false, func(w *world) error {
				clearBit(&w.dead, id)
				set(&w.buried, id)
				return nil
			})
		}
	}
	if w.late() {
		s.add("reaper loses a late lease of a living worker", false, func(w *world) error {
			move := loss(w.rec)
			_, err := s.u.apply(w, move, Input{Attempt: uint32(w.rec.attempt), Worker: workerName(w.rec.owner), Dead: true}, w.read())
			return err
		})
	}
}

func consumer(id uint8) string {
	if id == reaperName {
		return "a reaper that stopped"
	}
	return fmt.Sprintf("w%d", id)
}

func (w *world) pendingFor(id uint8) bool {
	for _, e := range w.entries {
		if e.id != 0 && e.pel == id {
			return true
		}
	}
	return false
}

// late: the lease in `running` ended a whole lease ago. That happens only to a worker that does not know the task, or
// whose deadline passed long before: whoever knows it renews it, or kills it first.
func (w *world) late() bool {
	if w.rec.state != Running || member(w.buried, w.rec.owner) {
		return false
	}
	for _, m := range w.machines {
		if m.id == w.rec.owner && !m.lapsed && (m.belief == w.rec.attempt || m.reply.attempt == w.rec.attempt || m.proc != 0) {
			return false
		}
	}
	return true
}

func loss(r Record8) Move {
	if r.lost+1 > maxLost {
		return LoseFinal
	}
	return Lose
}

func (s *stepper) reaperApplies(w *world) error {
	a := w.reaper
	w.reaper = actor{}
	if a.op == opDrop {
		w.remove(a.entry)
		return nil
	}
	from := a.from
	if from == reaperName {
		from = a.guess.rec.owner // adopted before by a reaper that stopped: the record knows whose it was
	}
	in := Input{Attempt: uint32(a.about), Worker: workerName(from), Dead: w.deadOrGone(from)}
	done, err := s.u.apply(w, loss(a.guess.rec), in, a.guess)
	if !done && err == nil {
		done, err = s.u.apply(w, Lose, in, a.guess) // a queued one has no other row
	}
	if !done {
		w.reaper = actor{op: opDrop, entry: a.entry}
	}
	return err
}

// auditing: a queued record whose entry nobody has is delayed again.
func (s *stepper) auditing() {
	w := s.from
	switch {
	case w.audit.op == opRequeue:
		s.add("audit applies requeue", false, func(w *world) error {
			a := w.audit
			w.audit = actor{}
			_, err := s.u.apply(w, Requeue, Input{Attempt: uint32(a.guess.rec.attempt)}, a.guess)
			return err
		})
	case w.rec.state == Queued && w.find(w.current) == nil:
		s.add("audit finds it queued without an entry", false, func(w *world) error {
			w.audit = actor{op: opRequeue, guess: w.read()}
			return nil
		})
	}
}

// cancelWanted in the canceller's entry: somebody wants the task cancelled and has not succeeded.
const cancelWanted = 1

func (s *stepper) cancelling() {
	w := s.from
	switch {
	case w.canceller.op == opCancel:
		s.add("canceller applies cancel", false, func(w *world) error {
			a := w.canceller
			w.canceller = actor{}
			done, err := s.u.apply(w, Cancel, Input{Attempt: uint32(a.guess.rec.attempt)}, a.guess)
			if !done {
				w.canceller.entry = cancelWanted // the task had moved on: look again
			}
			return err
		})
	case w.canceller.entry == cancelWanted && w.rec.state != None && !w.rec.state.Final():
		s.add("canceller reads the record", true, func(w *world) error {
			w.canceller = actor{op: opCancel, guess: w.read()}
			return nil
		})
	}
}
