package proc

import (
	"fmt"
	"math"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// reapInterval is how often orphans are looked after while there is an attempt or an orphan.
const reapInterval = 250 * time.Millisecond

// self is this process.
var self = struct {
	pid, session int
	mainThread   string // its children are the orphans
}{os.Getpid(), session(), fmt.Sprintf("/proc/%d/task/%[1]d/children", os.Getpid())}

func session() int {
	sid, err := unix.Getsid(0)
	if err != nil {
		return 0
	}
	return sid
}

// BecomeSubreaper makes this process the new parent of every descendant that loses its own. Start calls it; calling it
// earlier and repeatedly does no harm.
//
// From the first Start on, every direct child of this process that Start did not start, has a session that is not the
// agent's and is younger than that first Start counts as a task's orphan: it is reaped, and killed when no attempt
// that could have made it is left.
var BecomeSubreaper = sync.OnceValue(func() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become subreaper: %w", err)
	}
	living.since = nowTicks()
	unignoreSignals()
	closeOnExec()
	return nil
})

// unignoreSignals undoes what a shell does to a program it starts with "&", or nohup to any: INT or HUP ignored. That would
// be inherited by every task, and no Python of theirs could be interrupted by INT. A signal that is caught here, and
// thrown away, is still ignored by the agent, but exec gives it back its default action.
func unignoreSignals() {
	for _, sig := range []os.Signal{unix.SIGINT, unix.SIGHUP} {
		if signal.Ignored(sig) {
			signal.Notify(make(chan os.Signal, 1), sig)
		}
	}
}

// closeOnExec keeps from tasks what this process was itself started with: a shell's or supervisor's open files. What Go
// opens is closed on exec anyway. Kernels before 5.11 need the slow way.
func closeOnExec() {
	const afterStderr = 3
	if unix.CloseRange(afterStderr, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC) == nil {
		return
	}
	fds, _ := dirNumbers("/proc/self/fd")
	for _, fd := range fds {
		if fd >= afterStderr {
			unix.CloseOnExec(fd)
		}
	}
}

// registry knows the attempts whose trees are not empty and whose orphans are whose.
type registry struct {
	since uint64 // when this process became the subreaper

	mu      sync.Mutex
	all     map[*Process]bool
	mains   map[int]*Process // by pid of the main process, which is the id of the session too
	owners  map[key]*Process // orphans that were recognised; nil when they could be several attempts'
	reaping bool             // reapLoop runs
}

var living = registry{all: map[*Process]bool{}, mains: map[int]*Process{}, owners: map[key]*Process{}}

// expect is called before the fork: what a process leaves behind in its first moment must find its owner.
func (r *registry) expect(p *Process) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all[p] = true
	if !r.reaping {
		r.reaping = true
		go r.reapLoop()
	}
}

// forked makes the main process known.
func (r *registry) forked(p *Process) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mains[p.pid] = p
}

func (r *registry) remove(p *Process) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.all, p)
	if r.mains[p.pid] == p { // the pid may already be the next one's
		delete(r.mains, p.pid)
	}
}

// reapLoop buries orphans while attempts run, so that a task that makes daemons all day does not fill the process table
// with our zombies. It ends when there is neither an attempt nor an orphan.
func (r *registry) reapLoop() {
	for {
		time.Sleep(reapInterval) //nolint:forbidigo // the kernel has no event for this; the pause is bounded and short
		orphans := r.orphans()
		r.killStrays(orphans)
		r.sampleMemory()
		r.mu.Lock()
		if len(r.all) == 0 && len(orphans) == 0 {
			clear(r.owners)
			r.reaping = false
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()
	}
}

// sampleMemory looks at the main processes that need it.
func (r *registry) sampleMemory() {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	for _, p := range r.mains {
		p.mu.Lock()
		if !p.reaped {
			p.memory.sample(p.pid, now)
		}
		p.mu.Unlock()
	}
}

// orphan is a living process that this process has adopted.
type orphan struct {
	stat
	owner *Process // nil when it cannot be told
}

// orphans returns the adopted processes that are alive, and reaps those that are not.
func (r *registry) orphans() []orphan {
	raw, err := readProc(self.mainThread)
	if err != nil {
		return nil
	}
	var live []orphan
	for _, pid := range parsePIDs(raw) {
		s, ok := readStat(pid)
		if !ok || !r.adopted(s) {
			continue
		}
		owner := r.ownerOf(s)
		if s.alive() {
			live = append(live, orphan{s, owner})
		} else {
			r.bury(s, owner)
		}
	}
	return live
}

// adopted says whether a child of this process is an orphan of a task, and not what somebody here started by os/exec.
func (r *registry) adopted(s stat) bool {
	if s.ppid != self.pid || s.session == self.session || s.start < r.since {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.mains[s.pid]
	return p == nil || p.isReaped()
}

func (p *Process) isReaped() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.reaped
}

// ownerOf finds the attempt an orphan comes from, and remembers it: a zombie has no environment to ask any more.
func (r *registry) ownerOf(s stat) *Process {
	r.mu.Lock()
	owner := r.owners[s.key()]
	r.mu.Unlock()
	if owner != nil {
		return owner
	}
	marker := markerOf(s.pid)
	r.mu.Lock()
	defer r.mu.Unlock()
	if owner = r.guess(s, marker); owner != nil {
		r.owners[s.key()] = owner
	}
	return owner
}

// guess is called with the lock held. A process that left its session and cleaned its environment is still the only
// running attempt's if it is younger than that.
func (r *registry) guess(s stat, marker string) *Process {
	if p := r.mains[s.session]; p != nil && p.since <= s.start {
		return p
	}
	var candidates []*Process
	for p := range r.all {
		if p.marker != "" && p.marker == marker || p.hasSeen(s.key()) {
			return p
		}
		if p.since <= s.start {
			candidates = append(candidates, p)
		}
	}
	if len(candidates) == 1 {
		return candidates[0]
	}
	return nil
}

func (p *Process) hasSeen(k key) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.seen[k]
}

// bury reaps an orphan that has ended.
func (r *registry) bury(s stat, owner *Process) {
	var ws syscall.WaitStatus
	var usage syscall.Rusage
	if pid, err := wait4(s.pid, &ws, &usage); err != nil || pid != s.pid {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.owners, s.key())
	if owner != nil && r.all[owner] { // an outcome that was handed out does not change any more
		owner.mu.Lock()
		owner.outcome.use(usage)
		owner.mu.Unlock()
	}
}

// killStrays ends orphans that nobody alive can have made. They slipped through while their attempt was ended.
func (r *registry) killStrays(orphans []orphan) {
	for _, o := range orphans {
		if !r.mayBeOwned(o) {
			killBelow(o.stat)
		}
	}
}

func (r *registry) mayBeOwned(o orphan) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if o.owner != nil {
		return r.all[o.owner]
	}
	for p := range r.all {
		if p.since <= o.start {
			return true
		}
	}
	return false
}

// quiet says that no orphan can be p's. It is the cheap check made at the end of every attempt.
func (r *registry) quiet(p *Process) bool {
	for _, o := range r.orphans() {
		if o.owner == p {
			return false
		}
	}
	return true
}

// ReapChildren reaps every child of this process that has ended, except one. It is for a process that waits for that
// one alone, as the guard does, and in a container may be the init that gets everybody's orphans.
func ReapChildren(except int) {
	for _, pid := range children(self.pid) {
		if pid != except {
			_, _ = wait4(pid, nil, nil)
		}
	}
}
