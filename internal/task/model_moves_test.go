package task

import "fmt"

// limits of the model's task.
const (
	maxAttempts = 2
	maxLost     = 1
)

// step is one way on from a world.
type step struct {
	label string
	// fault: the world may also choose never to take it; progress must not depend on it.
	fault bool
	next  world
	err   error
}

// stepper collects the steps of one world.
type stepper struct {
	u    *rules
	from world
	out  []step
}

func (s *stepper) add(label string, fault bool, f func(w *world) error) {
	next := s.from
	err := f(&next)
	if err == nil {
		err = next.check()
	}
	s.out = append(s.out, step{label, fault, next, err})
}

func (s *stepper) run() {
	s.producer()
	s.dispatcher(0)
	if s.from.second {
		s.dispatcher(1)
	}
	for m := range s.from.machines {
		s.faults(m)
		if s.from.machines[m].mode == alive {
			s.worker(m)
		}
	}
	s.beats()
	s.reaping()
	s.auditing()
	s.cancelling()
}

// producer adds its entry, perhaps twice because a reply was lost.
func (s *stepper) producer() {
	if s.from.sent < s.from.copies {
		s.add("producer adds to tasks", s.from.sent == 1, func(w *world) error {
			w.tasks[w.sent] = true
			w.sent++
			return nil
		})
	}
	for _, e := range s.from.entries {
		if e.id == 0 || e.pel != 0 {
			continue
		}
		if s.from.streamLoss {
			s.add(fmt.Sprintf("entry %d vanishes with its stream", e.id), true, func(w *world) error {
				w.streamLoss = false
				w.remove(e.id)
				return nil
			})
		}
		if s.from.twice {
			s.add(fmt.Sprintf("entry %d is doubled", e.id), true, func(w *world) error {
				w.twice = false
				w.addEntry(e.attempt)
				return nil
			})
		}
	}
}

func (s *stepper) dispatcher(d int) {
	w, a := s.from, s.from.dispatch[d]
	name := fmt.Sprintf("dispatcher %d", d+1)
	if a.op != opNone {
		s.add(name+" applies "+opNames[a.op], false, func(w *world) error { return s.dispatcherApplies(w, d) })
		if w.faults > 0 {
			s.add(name+" crashes", true, func(w *world) error {
				w.faults--
				w.dispatch[d] = actor{}
				return nil
			})
		}
		return
	}
	for i, there := range w.tasks {
		if there {
			s.add(fmt.Sprintf("%s reads tasks entry %d", name, i+1), false, func(w *world) error {
				w.dispatch[d] = actor{op: opAdmit, entry: uint8(i), guess: w.read()}
				return nil
			})
		}
	}
	if w.delayed {
		s.add(name+" reads delayed", false, func(w *world) error {
			w.dispatch[d] = actor{op: opPromote, guess: w.read()}
			return nil
		})
	}
	if w.expires && has(open, w.rec.state) {
		s.add(name+" finds it expired", true, func(w *world) error {
			w.dispatch[d] = actor{op: opExpire, guess: w.read()}
			return nil
		})
	}
}

var opNames = map[uint8]string{
	opAdmit: "admit", opPromote: "promote", opExpire: "expire", opForget: "forget",
	opLose: "lose", opDrop: "drop", opRequeue: "requeue", opCancel: "cancel",
}

func (s *stepper) dispatcherApplies(w *world, d int) error {
	a := w.dispatch[d]
	w.dispatch[d] = actor{}
	in := Input{Attempt: uint32(a.guess.rec.attempt)}
	switch a.op {
	case opAdmit:
		if !w.tasks[a.entry] {
			return nil // XACK returned 0: somebody else has taken care of it
		}
		// With a record already there this only acknowledges.
		w.tasks[a.entry] = false
		in.To = Queued
		_, err := s.u.apply(w, Admit, in, guess{rec: Record8{state: None}})
		return err
	case opPromote:
		done, err := s.u.apply(w, Promote, in, a.guess)
		if !done && s.u.blindForget {
			w.dispatch[d] = actor{op: opForget}
		}
		return err
	case opForget:
		w.delayed = false
		return nil
	default:
		_, err := s.u.apply(w, Expire, in, a.guess)
		return err
	}
}

// faults of the machine and how it comes back from them.
func (s *stepper) faults(i int) {
	m, other := s.from.machines[i], s.from.machines[1-i]
	name := fmt.Sprintf("machine %d (w%d)", i+1, m.id)
	may := s.from.faults > 0
	if may && m.mode == alive && other.mode != frozen {
		s.add(name+" freezes", true, func(w *world) error {
			w.faults--
			w.machines[i].mode = frozen
			return nil
		})
	}
	if may && m.mode != crashed {
		s.add(name+" crashes", true, func(w *world) error {
			w.faults--
			// What ran goes on until the guard or the next start kills it.
			w.machines[i] = machine{id: m.id, mode: crashed, proc: m.proc, lapsed: m.lapsed}
			return nil
		})
	}
	if m.mode == frozen {
		s.add(name+" thaws", true, func(w *world) error {
			w.machines[i].mode = alive
			return nil
		})
	}
	if m.mode == crashed && s.from.lastWorker+1 < maxWorker {
		s.add(name+" starts again", false, func(w *world) error {
			// Its start sweeps what is left of the old one.
			id := m.id
			if !s.u.reuseIDs {
				w.lastWorker++
				id = w.lastWorker
			}
			clearBit(&w.dead, id)
			clearBit(&w.buried, id)
			set(&w.beat, id)
			w.machines[i] = machine{id: id}
			return nil
		})
	}
	if !m.lapsed && (m.mode != alive || may) {
		s.add(name+": deadline passes", m.mode == alive, func(w *world) error {
			x := &w.machines[i]
			x.lapsed = true
			if m.mode == alive {
				w.faults-- // its link was cut
			}
			if s.u.sleeper {
				return nil
			}
			x.proc = 0 // killed by itself or by the guard
			if m.mode == alive {
				x.notice()
			}
			return nil
		})
	}
}

// notice is what a worker does before anything else when its deadline has passed: it forgets claims that it has not
// started, and what was killed is not its own any more. An outcome that it already has it may still tell.
func (m *machine) notice() {
	m.reply = entry{}
	if m.out == outNone {
		m.belief, m.entry = 0, 0
	}
}

func (s *stepper) worker(i int) {
	w, m := s.from, s.from.machines[i]
	name := fmt.Sprintf("w%d", m.id)
	if w.deadOrGone(m.id) {
		if w.lastWorker+1 < maxWorker {
			s.add(name+" is fenced at its renewal, goes on under a new id", false, func(w *world) error {
				w.lastWorker++
				w.machines[i] = machine{id: w.lastWorker}
				set(&w.beat, w.lastWorker)
				return nil
			})
		}
	} else {
		s.renewing(i, name)
		if m.belief == 0 && m.reply.id == 0 && !m.lapsed {
			s.claims(i, name)
		}
	}
	if m.reply.id != 0 && (!m.lapsed || s.u.sleeper) {
		s.add(name+" receives its claim", false, func(w *world) error {
			x := &w.machines[i]
			x.belief, x.entry, x.reply = m.reply.attempt, m.reply.id, entry{}
			return nil
		})
		if w.losses > 0 {
			s.add(name+": the answer to its claim is lost", true, func(w *world) error {
				w.losses--
				w.machines[i].reply = entry{}
				return nil
			})
		}
	}
	if m.belief != 0 && m.out == outNone {
		s.running(i, name)
	}
	s.telling(i, name)
}

func (s *stepper) renewing(i int, name string) {
	w, m := s.from, s.from.machines[i]
	mine := w.rec.state == Running && w.rec.owner == m.id
	s.add(name+" renews", false, func(w *world) error {
		x := &w.machines[i]
		if m.lapsed && !s.u.sleeper {
			x.notice()
		}
		x.lapsed = false
		set(&w.beat, m.id)
		if x.belief == 0 || x.out != outNone {
			return nil
		}
		switch {
		case !mine || w.rec.attempt != x.belief:
			x.proc, x.belief, x.entry = 0, 0, 0 // not ours any more
		case w.rec.cancel:
			x.proc, x.out = 0, outCancelled
		}
		return nil
	})
	if m.belief != 0 || m.reply.id != 0 || m.lapsed {
		return
	}
	for _, e := range w.entries {
		if e.id == 0 || e.pel != m.id {
			continue
		}
		s.add(name+" gives back a claim that it does not know", false, func(w *world) error {
			g := w.read()
			done, err := s.u.apply(w, Release, Input{Attempt: uint32(e.attempt), Worker: workerName(m.id)}, g)
			if !done {
				w.remove(e.id) // a copy that means nothing
			}
			return err
		})
	}
}

// claims: the script takes entries until one is about a queued record of its attempt; the others it drops.
func (s *stepper) claims(i int, name string) {
	m := s.from.machines[i]
	for _, e := range s.from.entries {
		if e.id == 0 || e.pel != 0 {
			continue
		}
		s.add(fmt.Sprintf("%s claims entry %d (attempt %d)", name, e.id, e.attempt), false, func(w *world) error {
			in := Input{Attempt: uint32(e.attempt), Worker: workerName(m.id)}
			if done, err := s.u.apply(w, Claim, in, w.read()); !done || err != nil {
				w.remove(e.id)
				return err
			}
			w.find(e.id).pel = m.id
			w.current = e.id
			w.machines[i].reply = e
			if had := w.given[e.attempt]; had != 0 {
				return fmt.Errorf("attempt %d was given to w%d and to w%d", e.attempt, had, m.id)
			}
			w.given[e.attempt] = m.id
			return nil
		})
	}
}

func (s *stepper) running(i int, name string) {
	m := s.from.machines[i]
	if m.proc == 0 && (!m.lapsed || s.u.sleeper) {
		s.add(fmt.Sprintf("%s starts attempt %d", name, m.belief), false, func(w *world) error {
			w.machines[i].proc = m.belief
			return nil
		})
	}
	end := func(what string, out uint8) {
		s.add(fmt.Sprintf("%s: attempt %d %s", name, m.belief, what), false, func(w *world) error {
			w.machines[i].proc, w.machines[i].out = 0, out
			return nil
		})
	}
	if m.proc != 0 {
		end("ends well", outGood)
		end("ends badly", outBad)
	}
	if s.from.drains > 0 {
		s.add(fmt.Sprintf("%s drains and stops attempt %d", name, m.belief), true, func(w *world) error {
			w.drains--
			w.machines[i].proc, w.machines[i].out = 0, outRelease
			return nil
		})
	}
}

// telling applies what the worker has to say. When the answer is lost it frees the slot and says it once more later.
func (s *stepper) telling(i int, name string) {
	m := s.from.machines[i]
	tell := func(label string, what, again echo, fault bool) {
		s.add(label, fault, func(w *world) error {
			move, in := verdict(m.id, what, w.rec)
			g := guess{rec: Record8{state: Running, attempt: what.attempt, owner: m.id}, entry: what.entry}
			_, err := s.u.apply(w, move, in, g)
			if what == m.echo {
				w.machines[i].echo = echo{}
				return err
			}
			w.machines[i] = machine{id: m.id, lapsed: m.lapsed, echo: again}
			if fault {
				w.losses--
			}
			return err
		})
	}
	say := func(what echo) string {
		move, in := verdict(m.id, what, s.from.rec)
		if in.To != 0 {
			return fmt.Sprintf("%s of attempt %d as %s", move, what.attempt, in.To)
		}
		return fmt.Sprintf("%s of attempt %d", move, what.attempt)
	}
	if m.out != outNone {
		what := echo{m.belief, m.entry, m.out}
		tell(name+" applies "+say(what), what, m.echo, false)
		if s.from.losses > 0 && m.echo.attempt == 0 {
			tell(name+" applies "+say(what)+", the answer is lost", what, what, true)
		}
	}
	if m.echo.attempt != 0 {
		tell(name+" repeats "+say(m.echo), m.echo, echo{}, false)
	}
}

func verdict(id uint8, what echo, now Record8) (Move, Input) {
	in := Input{Attempt: uint32(what.attempt), Worker: workerName(id)}
	switch what.out {
	case outGood:
		in.To = Succeeded
	case outCancelled:
		in.To = Cancelled
	case outRelease:
		return Release, in
	default:
		if now.failures+1 < maxAttempts {
			return Retry, in
		}
		in.To = Failed
	}
	return Finish, in
}
