package proc

import (
	"cmp"
	"errors"
	"os"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Signal sends sig to the main process, or to every process of the tree. os.ErrProcessDone says that it has ended.
func (p *Process) Signal(sig syscall.Signal, tree bool) error {
	if tree {
		if p.signalTree(sig) == 0 {
			return os.ErrProcessDone
		}
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reaped {
		return os.ErrProcessDone
	}
	return unix.Kill(p.pid, sig)
}

// Stop sends sig to every process of the tree, once, with a CONT for those that are stopped, and KILL to all that is left when grace is over. It returns at once
// and may be called again: a later call never signals a second time, so that no handler is interrupted by its own
// signal, but it can bring the end forward. A grace of 0 or less kills now.
func (p *Process) Stop(sig syscall.Signal, grace time.Duration) {
	p.stop(sig, grace, false)
}

func (p *Process) stop(sig syscall.Signal, grace time.Duration, leftover bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.isEmpty() {
		return
	}
	deadline, first := time.Now().Add(max(grace, 0)), p.deadline.IsZero()
	if !first && !deadline.Before(p.deadline) {
		return
	}
	p.deadline = deadline
	if first {
		p.leftover = leftover
		go p.enforce(sig, grace > 0)
		return
	}
	select {
	case p.poke <- struct{}{}:
	default:
	}
}

// enforce carries a stop out. It ends with the tree.
func (p *Process) enforce(sig syscall.Signal, gently bool) {
	if gently {
		// CONT after it, as systemd and Slurm do: a stopped process could not act on its signal before the grace is over,
		// and a stop that is only pending cannot be seen. Who is not stopped and has no handler does not notice.
		members := p.members()
		p.signal(members, sig)
		p.signal(members, unix.SIGCONT)
	}
	for {
		p.mu.Lock()
		left := time.Until(p.deadline)
		p.mu.Unlock()
		if left <= 0 {
			break
		}
		timer := time.NewTimer(left)
		select {
		case <-timer.C:
		case <-p.poke:
		case <-p.empty:
			timer.Stop()
			return
		}
		timer.Stop()
	}
	p.killTree()
}

// killTree kills until the tree is empty. The first rounds follow each other closely, to be faster than what forks.
func (p *Process) killTree() {
	begin, waiting := time.Now(), true
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		members := p.members()
		p.noteKill(len(members))
		p.signal(members, unix.SIGKILL)
		select {
		case <-p.empty:
			return
		case <-time.After(pause):
		}
		if waiting && time.Since(begin) > killPatience {
			waiting = false
			p.giveUp()
		}
	}
}

// noteKill is called before the KILL is sent: the tree may be gone, and its outcome handed out, right after.
func (p *Process) noteKill(members int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if members > 0 && !p.leftover && !p.isEmpty() {
		p.outcome.Killed = true
	}
}

// isEmpty is called with the lock held.
func (p *Process) isEmpty() bool {
	select {
	case <-p.empty:
		return true
	default:
		return false
	}
}

// signalTree sends sig to all members and returns to how many.
func (p *Process) signalTree(sig syscall.Signal) int { return p.signal(p.members(), sig) }

// signal sends sig to members, which were listed before, because a parent's death moves its children. The main process
// group gets it in one call, which no fork can slip through.
func (p *Process) signal(members []stat, sig syscall.Signal) int {
	grouped := p.signalGroup(sig)
	sent := 0
	for _, m := range members {
		if grouped && m.group == p.pid || kill(m.key(), sig) {
			sent++
		}
	}
	return sent
}

// signalGroup signals the main process group while the main process holds its id.
func (p *Process) signalGroup(sig syscall.Signal) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.reaped && unix.Kill(-p.pid, sig) == nil
}

// awaitEmpty returns when nothing of the tree is alive. It is called when the main process has ended.
func (p *Process) awaitEmpty() {
	if errors.Is(unix.Kill(-p.pid, 0), unix.ESRCH) && hasChildrenFile && living.quiet(p) {
		return
	}
	for pause, empty := time.Millisecond, 0; empty < 2; pause = min(2*pause, 25*time.Millisecond) {
		members := p.members()
		if len(members) == 0 && empty == 1 {
			members = p.membersByScan()
		}
		if empty++; len(members) > 0 {
			empty = 0
			select {
			case <-p.hopeless:
				p.stuck(members)
				return
			default:
			}
			if pause > 4*time.Millisecond { // most of what outlives its parent is on its way out
				p.leftovers(members)
			}
		}
		time.Sleep(pause) //nolint:forbidigo // the kernel has no event for this; the pause is bounded and short
	}
}

// leftovers ends what the main process left behind, unless a stop is already on its way to do that.
func (p *Process) leftovers(members []stat) {
	p.mu.Lock()
	mine := p.deadline.IsZero() || p.leftover
	if mine {
		p.outcome.Survivors = survivors(p.outcome.Survivors, members)
	}
	p.mu.Unlock()
	if mine {
		p.stop(unix.SIGTERM, leftoverGrace, true)
	}
}

// stuck notes what did not die. Their command lines are not asked for: reading those of a process that hangs can hang.
func (p *Process) stuck(members []stat) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range members[:min(len(members), maxSurvivors)] {
		p.outcome.Stuck = append(p.outcome.Stuck, Survivor{PID: m.pid, Comm: m.comm})
	}
}

// survivors adds those members to a list that it does not have yet.
func survivors(list []Survivor, members []stat) []Survivor {
	for _, m := range members {
		known := slices.ContainsFunc(list, func(s Survivor) bool { return s.PID == m.pid })
		if !known && len(list) < maxSurvivors {
			list = append(list, survivor(m))
		}
	}
	return list
}

func survivor(s stat) Survivor {
	return Survivor{PID: s.pid, Comm: s.comm, Command: commandLine(s.pid)}
}

// members returns the living processes of the tree: what is below the main process and below orphans that are ours.
func (p *Process) members() []stat {
	if !hasChildrenFile {
		return p.membersByScan()
	}
	var found []stat
	if s, ok := readStat(p.pid); ok && !p.isReaped() {
		found = append(found, s)
	}
	for _, o := range living.orphans() {
		if o.owner == p {
			found = append(found, o.stat)
		}
	}
	return p.remember(below(found))
}

// below adds all descendants to roots.
func below(roots []stat) []stat {
	visited := make(map[int]bool, len(roots))
	for _, s := range roots {
		visited[s.pid] = true
	}
	for i := 0; i < len(roots); i++ {
		for _, pid := range children(roots[i].pid) {
			if s, ok := readStat(pid); ok && !visited[pid] {
				visited[pid] = true
				roots = append(roots, s)
			}
		}
	}
	return roots
}

// remember drops the dead and notes the rest as ours, so that they stay ours when their parent dies and nothing else
// tells.
func (p *Process) remember(found []stat) []stat {
	live := found[:0]
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range found {
		if !s.alive() {
			continue
		}
		if p.seen == nil {
			p.seen = map[key]bool{}
		}
		p.seen[s.key()] = true
		live = append(live, s)
	}
	return live
}

// membersByScan looks at every process of the machine. It needs neither the children files nor the subreaper, and is the
// last look before a tree that was not quiet is declared empty.
func (p *Process) membersByScan() []stat {
	all, err := everyProcess()
	if err != nil {
		return nil
	}
	reaped := p.isReaped()
	ours := func(s stat) bool {
		switch {
		case s.start < p.since || s.pid == self.pid:
			return false
		case s.pid == p.pid:
			return !reaped
		case s.session == p.pid || p.hasSeen(s.key()):
			return true
		}
		return p.marker != "" && markerOf(s.pid) == p.marker
	}
	return p.remember(withDescendants(all, ours))
}

// withDescendants returns the processes for which root holds, and all that is below them, parents before children: who
// is killed first cannot act on the death of the others.
func withDescendants(all map[int]stat, root func(stat) bool) []stat {
	kids := map[int][]int{}
	var found []stat
	taken := map[int]bool{}
	for _, s := range all {
		kids[s.ppid] = append(kids[s.ppid], s.pid)
		if root(s) {
			found, taken[s.pid] = append(found, s), true
		}
	}
	for i := 0; i < len(found); i++ {
		for _, pid := range kids[found[i].pid] {
			if !taken[pid] {
				found, taken[pid] = append(found, all[pid]), true
			}
		}
	}
	slices.SortFunc(found, func(a, b stat) int { return cmp.Or(cmp.Compare(a.start, b.start), cmp.Compare(a.pid, b.pid)) })
	return found
}

// killBelow kills a process and its descendants, once.
func killBelow(root stat) {
	tree := []stat{root}
	if hasChildrenFile {
		tree = below(tree)
	}
	for _, s := range tree {
		kill(s.key(), unix.SIGKILL)
	}
}
