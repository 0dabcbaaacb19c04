package proc

import (
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// sweepLimit bounds a sweep. Only processes in an uninterruptible wait are left by then, which will never again run code
// of their own.
const sweepLimit = 10 * time.Second

// Sweep kills every process of this machine whose environment has a marker that match accepts, with all descendants, until
// two looks in a row find none. It is for trees whose agent is gone: a new agent calls it with what earlier ones on its
// state directory announced, the guard with what its agent announced. This process itself is never touched.
func Sweep(match func(marker string) bool) (killed []Survivor, err error) {
	return SweepTrees(func(c Candidate) bool {
		marker := c.Marker()
		return marker != "" && match(marker)
	})
}

// Candidate is a process that SweepTrees asks about.
type Candidate struct {
	PID, Parent, Session int
}

// Marker reads the marker the process was started with; "" when it has none, or hides it.
func (c Candidate) Marker() string { return markerOf(c.PID) }

// SweepTrees is Sweep for the processes that root picks.
func SweepTrees(root func(Candidate) bool) (killed []Survivor, err error) {
	known := map[key]bool{}
	end := time.Now().Add(sweepLimit)
	for pause, empty := time.Millisecond, 0; empty < 2; pause = min(2*pause, 50*time.Millisecond) {
		all, err := everyProcess()
		if err != nil {
			return killed, fmt.Errorf("list processes: %w", err)
		}
		empty++
		for _, s := range sweepable(all, root) {
			empty = 0
			if !known[s.key()] && len(killed) < maxSurvivors {
				killed = append(killed, survivor(s))
			}
			known[s.key()] = true
			kill(s.key(), unix.SIGKILL)
		}
		if time.Now().After(end) {
			return killed, fmt.Errorf("processes are still there %s after they were killed: they hang in the kernel, see state D in ps", sweepLimit)
		}
		time.Sleep(pause) //nolint:forbidigo // the kernel has no event for this; the pause is bounded and short
	}
	return killed, nil
}

// sweepable returns the living processes that root picks and their descendants, without this process.
func sweepable(all map[int]stat, root func(Candidate) bool) []stat {
	tree := withDescendants(all, func(s stat) bool {
		return s.alive() && s.pid != self.pid && root(Candidate{PID: s.pid, Parent: s.ppid, Session: s.session})
	})
	return slices.DeleteFunc(tree, func(s stat) bool { return !s.alive() || s.pid == self.pid })
}
