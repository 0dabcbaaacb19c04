package control

import (
	"container/list"
	"maps"
	"slices"
	"sync"
)

// bell knows which agents wait for tasks of which lanes. Agents wait in a line for each lane, the one that has waited
// longest in front; who was rung leaves all lines and comes back at the end of them, so that bells go around.
type bell struct {
	mu    sync.Mutex
	lines map[string]*list.List              // of *peer, by lane; none is empty
	where map[*peer]map[string]*list.Element // by lane; peers that are not hungry are not in it
}

func newBell() *bell {
	return &bell{lines: make(map[string]*list.List), where: make(map[*peer]map[string]*list.Element)}
}

// hungry puts p in the lines of these lanes and of no others. In a line where it stands already it keeps its place.
func (b *bell) hungry(p *peer, lanes []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	places := b.where[p]
	for lane := range places {
		if !slices.Contains(lanes, lane) {
			b.leave(places, lane)
		}
	}
	if len(lanes) == 0 {
		delete(b.where, p)
		return
	}
	if places == nil {
		places = make(map[string]*list.Element, len(lanes))
		b.where[p] = places
	}
	for _, lane := range lanes {
		if places[lane] != nil {
			continue
		}
		line := b.lines[lane]
		if line == nil {
			line = list.New()
			b.lines[lane] = line
		}
		places[lane] = line.PushBack(p)
	}
}

func (b *bell) leave(places map[string]*list.Element, lane string) {
	line := b.lines[lane]
	line.Remove(places[lane])
	delete(places, lane)
	if line.Len() == 0 {
		delete(b.lines, lane)
	}
}

// next takes the agent that has waited longest for lane out of all lines; nil when nobody waits.
func (b *bell) next(lane string) *peer {
	b.mu.Lock()
	defer b.mu.Unlock()
	line := b.lines[lane]
	if line == nil {
		return nil
	}
	p, _ := line.Front().Value.(*peer)
	places := b.where[p]
	for l := range places {
		b.leave(places, l)
	}
	delete(b.where, p)
	return p
}

// waiting returns how many agents wait, by lane.
func (b *bell) waiting() map[string]int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := make(map[string]int, len(b.lines))
	for lane, line := range b.lines {
		n[lane] = line.Len()
	}
	return n
}

// validLanes returns the lanes of a HUNGRY without repeats, and false when there are too many or one is too long.
func validLanes(lanes []string) ([]string, bool) {
	if len(lanes) > maxLanes {
		return nil, false
	}
	set := make(map[string]struct{}, len(lanes))
	for _, l := range lanes {
		if l == "" || len(l) > maxLaneName {
			return nil, false
		}
		set[l] = struct{}{}
	}
	if len(set) == len(lanes) {
		return lanes, true
	}
	return slices.Collect(maps.Keys(set)), true
}

// Bounds of what one HUNGRY may make a dispatcher remember.
const (
	maxLanes    = 1024
	maxLaneName = 256
)
