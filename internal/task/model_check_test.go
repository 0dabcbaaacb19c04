package task

import (
	"fmt"
	"strings"
)

// explored is what a search found.
type explored struct {
	states int
	// broken is the shortest way to a world where something is wrong; nil when all is well.
	broken *counterexample
}

// counterexample is a readable trace.
type counterexample struct {
	why   string
	steps []string
	last  world
}

func (c *counterexample) String() string {
	var b strings.Builder
	for i, s := range c.steps {
		fmt.Fprintf(&b, "%3d. %s\n", i+1, s)
	}
	r := c.last.rec
	fmt.Fprintf(&b, "     => %s\n     record: %s, attempt %d, owner w%d, cancel %v, failures %d, lost %d", c.why, r.state, r.attempt, r.owner, r.cancel, r.failures, r.lost)
	for _, e := range c.last.entries {
		if e.id != 0 {
			fmt.Fprintf(&b, "; entry %d for attempt %d, pending for %d", e.id, e.attempt, e.pel)
		}
	}
	for _, m := range c.last.machines {
		fmt.Fprintf(&b, "; w%d knows attempt %d, runs %d", m.id, m.belief, m.proc)
	}
	return b.String()
}

// search visits every world that can be reached from the first one, breadth first, and then looks whether a good end
// can be reached from each without any further fault.
type search struct {
	u      *rules
	index  map[world]int32
	worlds []world
	parent []int32
	via    []int32 // label of the step from the parent
	labels []string
	number map[string]int32
	// ahead holds the fault-free steps, as pairs from, to.
	ahead []([2]int32)
	good  []int32
}

func explore(u *rules, first world, progress bool) explored {
	s := &search{u: u, index: map[world]int32{}, number: map[string]int32{}}
	s.visit(first, -1, "")
	for at := 0; at < len(s.worlds); at++ {
		w := s.worlds[at]
		if w.settled() {
			s.good = append(s.good, int32(at))
		}
		st := stepper{u: u, from: w}
		st.run()
		for _, x := range st.out {
			if x.err != nil {
				return explored{len(s.worlds), s.trace(int32(at), x.label, x.err.Error(), x.next)}
			}
			to := s.visit(canonical(x.next), int32(at), x.label)
			if progress && !x.fault {
				s.ahead = append(s.ahead, [2]int32{int32(at), to})
			}
		}
	}
	out := explored{states: len(s.worlds)}
	if progress {
		out.broken = s.stuck()
	}
	return out
}

// canonical merges worlds that differ only in which dispatcher is which.
func canonical(w world) world {
	if !w.second {
		return w
	}
	a, b := w.dispatch[0], w.dispatch[1]
	if a.op < b.op || a.op == b.op && (a.entry < b.entry || a.entry == b.entry && a.guess.rec.attempt < b.guess.rec.attempt) {
		w.dispatch[0], w.dispatch[1] = b, a
	}
	return w
}

func (s *search) visit(w world, from int32, label string) int32 {
	if i, ok := s.index[w]; ok {
		return i
	}
	n, ok := s.number[label]
	if !ok {
		n = int32(len(s.labels))
		s.labels = append(s.labels, label)
		s.number[label] = n
	}
	i := int32(len(s.worlds))
	s.index[w] = i
	s.worlds = append(s.worlds, w)
	s.parent = append(s.parent, from)
	s.via = append(s.via, n)
	return i
}

// stuck finds the first world from which no good end can be reached.
func (s *search) stuck() *counterexample {
	count := make([]int32, len(s.worlds)+1)
	for _, e := range s.ahead {
		count[e[1]+1]++
	}
	for i := 1; i < len(count); i++ {
		count[i] += count[i-1]
	}
	back := make([]int32, len(s.ahead))
	next := append([]int32(nil), count...)
	for _, e := range s.ahead {
		back[next[e[1]]] = e[0]
		next[e[1]]++
	}
	fine := make([]bool, len(s.worlds))
	todo := append([]int32(nil), s.good...)
	for _, i := range todo {
		fine[i] = true
	}
	for len(todo) > 0 {
		i := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, j := range back[count[i]:count[i+1]] {
			if !fine[j] {
				fine[j] = true
				todo = append(todo, j)
			}
		}
	}
	for i, ok := range fine {
		if !ok {
			return s.trace(s.parent[i], s.labels[s.via[i]], "from here the task can never end", s.worlds[i])
		}
	}
	return nil
}

func (s *search) trace(at int32, label, why string, last world) *counterexample {
	steps := []string{label}
	for ; at > 0; at = s.parent[at] {
		steps = append(steps, s.labels[s.via[at]])
	}
	for i, j := 0, len(steps)-1; i < j; i, j = i+1, j-1 {
		steps[i], steps[j] = steps[j], steps[i]
	}
	return &counterexample{why, steps, last}
}
