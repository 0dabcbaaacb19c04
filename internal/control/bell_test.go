package control

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func TestRingGoesAround(t *testing.T) {
	t.Parallel()
	s := startServer(t, newRecorder(), nil)
	const n = 5
	rs := make([]*raw, n)
	for i := range rs {
		rs[i] = connectRaw(t, s.addr, workerName(i))
		rs[i].hungry(1, "default")
	}
	// Who is rung comes back at the end of the line, so that in every n rings each gets one, in turn.
	for round := range uint64(3) {
		for i := range rs {
			if got := s.Ring("default", 1); got != 1 {
				t.Fatalf("rang %d", got)
			}
			rs[i].want(&millracev1.ControlRing{Lane: "default"})
			rs[i].hungry(round+2, "default")
		}
	}
	if got := s.Ring("default", 3); got != 3 {
		t.Errorf("rang %d, want 3", got)
	}
	for i, r := range rs {
		if i < 3 {
			r.want(&millracev1.ControlRing{Lane: "default"})
		}
		r.settle() // nobody else heard anything
	}
	if diff := cmp.Diff(map[string]int{"default": 2}, s.HungryFor()); diff != "" {
		t.Errorf("hungry (-want +got):\n%s", diff)
	}
	if got := s.Ring("default", 10); got != 2 {
		t.Errorf("rang %d, want the 2 that are left", got)
	}
	if got := s.Ring("default", 1); got != 0 {
		t.Errorf("rang %d where nobody waits", got)
	}
}

func TestRingLanes(t *testing.T) {
	t.Parallel()
	s := startServer(t, newRecorder(), nil)
	both, gpu := connectRaw(t, s.addr, "w-both"), connectRaw(t, s.addr, "w-gpu")
	both.hungry(1, "default", "gpu", "default")
	gpu.hungry(1, "gpu")
	check := func(want map[string]int) {
		t.Helper()
		if diff := cmp.Diff(want, s.HungryFor()); diff != "" {
			t.Fatalf("hungry (-want +got):\n%s", diff)
		}
	}
	check(map[string]int{"default": 1, "gpu": 2})
	// A ring takes the agent out of all lines.
	s.Ring("default", 1)
	both.want(&millracev1.ControlRing{Lane: "default"})
	check(map[string]int{"gpu": 1})
	// A new HUNGRY replaces the one before; saying it again keeps the place in the line.
	both.hungry(2, "gpu", "cpu")
	gpu.hungry(2, "gpu")
	check(map[string]int{"gpu": 2, "cpu": 1})
	s.Ring("gpu", 1)
	gpu.want(&millracev1.ControlRing{Lane: "gpu"})
	both.hungry(3, "cpu")
	check(map[string]int{"cpu": 1})
	// Without free slots it is taken back.
	both.send(&millracev1.ControlHungry{Sequence: 4, Lanes: []string{"cpu"}})
	both.want(&millracev1.ControlAck{Sequence: 4})
	check(map[string]int{})
}

func TestRingSkipsTheLost(t *testing.T) {
	t.Parallel()
	s := startServer(t, newRecorder(), nil)
	lost, good := connectRaw(t, s.addr, "w-lost"), connectRaw(t, s.addr, "w-good")
	lost.hungry(1, "default")
	good.hungry(1, "default")
	// The connection breaks at the moment of the ring: the next in line gets it.
	s.peers.ready("w-lost").conn.abort()
	if got := s.Ring("default", 1); got != 1 {
		t.Errorf("rang %d", got)
	}
	good.want(&millracev1.ControlRing{Lane: "default"})
}

func TestHungryIsHeard(t *testing.T) {
	t.Parallel()
	s := startServer(t, newRecorder(), nil)
	r := connectRaw(t, s.addr, "w-1")
	r.hungry(1, "default")
	e := await(t, s.rec.events, "hungry", "w-1")
	if h, ok := e.Msg.(*millracev1.ControlHungry); !ok || h.GetFreeSlots() != 1 {
		t.Errorf("heard %v", e.Msg)
	}
}

// The bell against the plainest thing that could be right: one list of who is hungry for what since when.
func TestBellModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := newBell()
		peers := make([]*peer, 4)
		for i := range peers {
			peers[i] = &peer{info: WorkerInfo{ID: workerName(i)}}
		}
		type place struct {
			p    *peer
			lane string
		}
		var line []place
		lanes := []string{"a", "b", "c"}
		t.Repeat(map[string]func(*rapid.T){
			"hungry": func(t *rapid.T) {
				p := rapid.SampledFrom(peers).Draw(t, "peer")
				wanted := rapid.SliceOfNDistinct(rapid.SampledFrom(lanes), 0, 3, rapid.ID[string]).Draw(t, "lanes")
				b.hungry(p, wanted)
				line = slices.DeleteFunc(line, func(x place) bool { return x.p == p && !slices.Contains(wanted, x.lane) })
				for _, lane := range wanted {
					if !slices.Contains(line, place{p, lane}) {
						line = append(line, place{p, lane})
					}
				}
			},
			"ring": func(t *rapid.T) {
				lane := rapid.SampledFrom(lanes).Draw(t, "lane")
				var want *peer
				if i := slices.IndexFunc(line, func(x place) bool { return x.lane == lane }); i >= 0 {
					want = line[i].p
					line = slices.DeleteFunc(line, func(x place) bool { return x.p == want })
				}
				if got := b.next(lane); got != want {
					t.Fatalf("rang %v, want %v", got, want)
				}
			},
			"": func(t *rapid.T) {
				want := map[string]int{}
				for _, x := range line {
					want[x.lane]++
				}
				if diff := cmp.Diff(want, b.waiting()); diff != "" {
					t.Fatalf("waiting (-want +got):\n%s", diff)
				}
				if len(b.lines) != len(want) {
					t.Fatal("an empty line is kept")
				}
			},
		})
	})
}
