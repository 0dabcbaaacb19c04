package hold

import (
	"fmt"
	"strings"
	"testing"
)

// The model: one worker, one dispatcher, one reaper and Redis, in whole ticks. In every tick each actor may act once,
// in any order, or be too slow to. Links and Redis fail at will; a message is delivered within the tick or lost,
// while the connection lives on, as one does that has not noticed yet. The decisions are this package's.

const tick = Instant(1)

var modelRules = Rules{TTL: 5 * tick, Interval: 1 * tick, Margin: 1 * tick, Limit: 4 * tick, Vouch: 2 * tick}

// weak switches off one rule each.
type weak struct {
	unrecorded   bool // a dispatcher counts for holding without being in the worker's meta
	longReg      bool // the registration outlives the heartbeat
	silent       bool // a vouch counts after any silence
	atOnce       bool // the reaper declares without asking for dispatchers
	noGap        bool // a reaper that did not look for long does not count anew
	noClockPause bool // no pause after a step of Redis' clock
	foreverVouch bool // "I cannot reach Redis either" does not run out
	early        bool // the dispatcher registers before vouches have run out or been renewed
	noLimit      bool // the agent does not limit its holding
	noMargin     bool // the agent stops at the end of the heartbeat counted from the answer, one tick late
}

type state struct {
	acted uint8 // who acted in this tick

	up             bool // Redis
	ar, ad, dr, rr bool // links: agent-redis, agent-dispatcher, dispatcher-redis, reaper-redis
	changes, steps uint8

	beatEnd, regEnd Instant // keys in Redis
	recorded        bool    // the dispatcher is in the worker's meta
	connected       bool

	agent  Agent
	peer   Peer
	vouch  Instant // the dispatcher's, 0 none
	reaper Reaper
	gone   Absence
}

const (
	actAgent = 1 << iota
	actDispatcher
	actReaper
	actAll = actAgent | actDispatcher | actReaper
)

// long ago: times before it are alike.
const longAgo = -12

// pass lets one tick pass: all times move back by one.
func (s *state) pass() {
	s.acted = 0
	for _, t := range []*Instant{&s.beatEnd, &s.regEnd, &s.agent.renewed, &s.agent.vouched, &s.peer.heard, &s.vouch, &s.reaper.paused, &s.reaper.from, &s.gone.since, &s.gone.last} {
		*t = max(*t-tick, longAgo)
	}
	s.vouch = max(s.vouch, 0)
	s.beatEnd, s.regEnd = max(s.beatEnd, 0), max(s.regEnd, 0)
	s.agent.vouched = max(s.agent.vouched, 0)
	s.reaper.paused = max(s.reaper.paused, 0)
	s.reaper.from = max(s.reaper.from, longAgo)
	if !s.gone.seen {
		s.gone = Absence{}
	}
}

type move struct {
	label    string
	next     state
	declared bool
}

func (k *weak) until(s *state) Instant {
	r := modelRules
	if k.noLimit {
		r.Limit = 100
	}
	if k.noMargin {
		r.Margin = -tick
	}
	return s.agent.Until(r)
}

func (k *weak) moves(s state) []move {
	var out []move
	add := func(label string, f func(n *state)) {
		n := s
		f(&n)
		out = append(out, move{label: label, next: n})
	}
	k.faults(s, add)
	if s.acted&actAgent == 0 {
		k.agentMoves(s, add)
	}
	if s.acted&actDispatcher == 0 {
		k.dispatcherMoves(s, add)
	}
	if s.acted&actReaper == 0 && s.up && s.rr {
		n := s
		n.acted |= actReaper
		m := move{label: "reaper scans", next: n}
		if s.beatEnd > 0 {
			m.next.gone.Beating()
		} else {
			live := k.atOnce || !s.recorded || s.regEnd > 0
			if k.noGap {
				m.next.gone.last = 0
			}
			m.declared = m.next.reaper.MayDeclare(modelRules, 0, &m.next.gone, live)
			if m.declared {
				m.label = "reaper declares the worker dead"
			}
		}
		out = append(out, m)
	}
	add("a tick passes", func(n *state) { n.pass() })
	return out
}

func (k *weak) faults(s state, add func(string, func(*state))) {
	if s.steps > 0 && s.up {
		add("redis' clock steps forward", func(n *state) {
			n.steps--
			n.beatEnd, n.regEnd = 0, 0
			if !k.noClockPause {
				n.reaper.Pause(modelRules, 0) // whoever scans sees the step in the same reply
			}
		})
	}
	if s.changes == 0 {
		return
	}
	flip := func(name string, get func(*state) *bool) {
		v := *get(&s)
		word := "fails"
		if !v {
			word = "is back"
		}
		add(name+" "+word, func(n *state) {
			n.changes--
			*get(n) = !v
			if name == "redis" || name == "link reaper-redis" {
				if !v {
					n.reaper.Pause(modelRules, 0)
				}
			}
		})
	}
	flip("redis", func(n *state) *bool { return &n.up })
	flip("link agent-redis", func(n *state) *bool { return &n.ar })
	flip("link agent-dispatcher", func(n *state) *bool { return &n.ad })
	flip("link dispatcher-redis", func(n *state) *bool { return &n.dr })
	flip("link reaper-redis", func(n *state) *bool { return &n.rr })
}

func (k *weak) agentMoves(s state, add func(string, func(*state))) {
	if s.up && s.ar {
		add("agent renews", func(n *state) {
			n.acted |= actAgent
			n.beatEnd = modelRules.TTL
			n.agent.Renewed(0)
		})
		return
	}
	if s.ad && s.connected {
		dispatcherHasRedis := s.up && s.dr
		if dispatcherHasRedis {
			add("dispatcher renews for the agent", func(n *state) {
				n.acted |= actAgent
				n.beatEnd = modelRules.TTL
				n.vouch = 0
				n.agent.Renewed(0)
			})
			return
		}
		add("dispatcher vouches: it cannot reach redis either", func(n *state) {
			n.acted |= actAgent
			d := Dispatcher{}
			d.Vouch(modelRules, "w", 0)
			n.vouch = d.given["w"]
			r := modelRules
			if k.silent {
				r.Interval = 100
			}
			if k.foreverVouch {
				r.Vouch = 100
			}
			n.agent.Vouched(r, &n.peer, 0)
		})
	}
}

func (k *weak) dispatcherMoves(s state, add func(string, func(*state))) {
	if !s.connected && s.ad && (k.unrecorded || s.up && s.dr) {
		add("agent connects to the dispatcher", func(n *state) {
			n.connected = true
			n.recorded = !k.unrecorded
			n.peer = Peer{}
			n.acted |= actDispatcher
		})
	}
	if !s.up || !s.dr {
		return
	}
	d := Dispatcher{given: map[string]Instant{}}
	if s.vouch > 0 {
		d.given["w"] = s.vouch
	}
	life := modelRules.Registration()
	if k.longReg {
		life = modelRules.TTL + modelRules.Vouch
	}
	if k.early || d.MayRegister(0) {
		add("dispatcher registers", func(n *state) {
			n.acted |= actDispatcher
			n.regEnd = life
		})
		return
	}
	add("dispatcher renews whom it vouched for", func(n *state) {
		n.acted |= actDispatcher
		n.beatEnd = modelRules.TTL
		d.Renewed("w")
		n.vouch = 0
	})
}

func firstState(changes, steps uint8) state {
	s := state{up: true, ar: true, ad: true, dr: true, rr: true, changes: changes, steps: steps}
	s.beatEnd, s.regEnd = modelRules.TTL, modelRules.Registration()
	s.agent.Renewed(0)
	return s
}

// search returns the number of states and the shortest trace to a declared worker whose tasks still run.
func (k *weak) search(first state) (int, []string) {
	type from struct {
		parent int
		label  string
	}
	index := map[state]int{first: 0}
	states, came := []state{first}, []from{{-1, ""}}
	for at := 0; at < len(states); at++ {
		for _, m := range k.moves(states[at]) {
			if k.until(&m.next) <= 0 {
				continue // its tasks have been stopped: whatever follows is safe
			}
			if m.declared {
				trace := []string{m.label + ", its tasks still run"}
				for i := at; i > 0; i = came[i].parent {
					trace = append(trace, came[i].label)
				}
				return len(states), trace
			}
			if _, ok := index[m.next]; !ok {
				index[m.next] = len(states)
				states = append(states, m.next)
				came = append(came, from{at, m.label})
			}
		}
	}
	return len(states), nil
}

func printed(trace []string) string {
	var b strings.Builder
	for i, n := len(trace)-1, 1; i >= 0; i-- {
		if trace[i] != "" {
			fmt.Fprintf(&b, "%3d. %s\n", n, trace[i])
			n++
		}
	}
	return b.String()
}

func TestModelNeverTwoCopies(t *testing.T) {
	t.Parallel()
	changes := uint8(3)
	if testing.Short() {
		changes = 2
	}
	k := weak{}
	n, trace := k.search(firstState(changes, 1))
	t.Logf("%d states", n)
	if trace != nil {
		t.Errorf("two copies:\n%s", printed(trace))
	}
}

func TestModelFindsWeakerHolding(t *testing.T) {
	t.Parallel()
	tests := map[string]weak{
		"a dispatcher counts without being recorded":   {unrecorded: true},
		"a registration outlives the heartbeat":        {longReg: true},
		"a vouch counts after silence":                 {silent: true},
		"declared whatever dispatchers do":             {atOnce: true},
		"a reaper that slept counts on":                {noGap: true},
		"no pause after a clock step":                  {noClockPause: true},
		"a vouch never runs out":                       {foreverVouch: true},
		"registered before vouches ran out or renewed": {early: true},
		"the agent holds without limit":                {noLimit: true},
		"the agent's deadline is not before the TTL":   {noMargin: true},
	}
	for name, k := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			first := firstState(3, 1)
			first.recorded, first.connected = !k.unrecorded, !k.unrecorded
			n, trace := k.search(first)
			if trace == nil {
				t.Fatalf("%d states and never two copies", n)
			}
			t.Logf("%d states\n%s", n, printed(trace))
		})
	}
}
