package proc

import (
	"syscall"
	"time"
)

// Outcome is how an attempt ended.
type Outcome struct {
	// ExitCode is the main process's own, or 128 + Signal when a signal ended it, as shells have it.
	ExitCode int
	// Signal is what ended the main process; 0 when it exited by itself.
	Signal syscall.Signal
	// CoreDumped is the kernel's flag, which it sets only when it wrote a core.
	CoreDumped bool
	// Killed says that the grace period of Stop ran out with something of the tree still alive. It stays false for a main
	// process that anybody else killed, and for leftovers, which Survivors lists.
	Killed bool
	// Survivors are processes that were still running when the main process had ended by itself. All were ended by us.
	Survivors []Survivor
	// Stuck are processes that did not die of KILL because they hang in the kernel. They will not run code of their own
	// again, but still hold what they hold. The main process may be one of them; it counts as killed then.
	Stuck []Survivor
	// OutputCut says that a process outside the tree still held the output when reading it was given up; all that the
	// tree itself wrote was read.
	OutputCut bool
	// OutputErr is the first error of Stdout and Stderr. The rest of that output was read and dropped.
	OutputErr error
	// Started and Ended are when the main process did; the end of the tree can be later.
	Started, Ended time.Time
	// UserCPU and SystemCPU are of the main process, of all descendants that were waited for, and of the orphans that the
	// agent reaped.
	UserCPU, SystemCPU time.Duration
	// MaxRSSBytes is the largest resident set of any single process of the tree. 0 means that it is not known: the kernel
	// counts the agent's own size in, so what stayed smaller is known only from looks at the running main process.
	MaxRSSBytes int64
	// BlocksIn and BlocksOut count the reads from and writes to block devices, in 512 byte units.
	BlocksIn, BlocksOut int64
}

// Survivor is a process that outlived what should have ended it.
type Survivor struct {
	PID     int
	Comm    string // the kernel's short name of the program
	Command string // its arguments, shortened. May hold secrets: mask before showing
}

// maxSurvivors bounds the list, a fork bomb has no end of names.
const maxSurvivors = 32

func (o *Outcome) status(ws syscall.WaitStatus) {
	if ws.Signaled() {
		o.Signal, o.CoreDumped = ws.Signal(), ws.CoreDump()
		o.ExitCode = 128 + int(ws.Signal())
		return
	}
	o.ExitCode = ws.ExitStatus()
}

// use adds what one reaped process used.
func (o *Outcome) use(ru syscall.Rusage) {
	o.UserCPU += time.Duration(ru.Utime.Nano())
	o.SystemCPU += time.Duration(ru.Stime.Nano())
	o.MaxRSSBytes = max(o.MaxRSSBytes, ru.Maxrss<<10) // Linux counts in KiB
	o.BlocksIn += ru.Inblock
	o.BlocksOut += ru.Oublock
}
