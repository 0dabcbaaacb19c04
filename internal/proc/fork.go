package proc

import (
	"errors"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// forkRequest asks a fork thread for one child.
type forkRequest struct {
	path  string
	argv  []string
	attr  *syscall.ProcAttr
	reply chan forkReply
}

type forkReply struct {
	pid int
	err error
}

// forkThreads is how many threads fork. A fork holds its thread until the child has called exec, mostly waiting for it,
// so that one thread would be the limit of the spawn rate; more than there are cores only wait for each other.
var forkThreads = min(8, max(2, runtime.NumCPU()))

// forkPatience is how long a fork waits for a thread before another one is started. An exec from a file system that
// hangs holds its thread as long as that does, and must not keep the other tasks from starting.
const forkPatience = 100 * time.Millisecond

var (
	forkRequests = make(chan forkRequest)
	startForkers = sync.OnceFunc(func() {
		for range forkThreads {
			go forkLoop()
		}
	})
)

// forkLoop forks children from one thread that lives as long as the agent, because a parent-death signal is sent when the
// *thread* that forked ends, and Go ends threads whenever a goroutine locked to one returns. The main thread is left
// alone: its children are then exactly the orphans this process has adopted.
func forkLoop() {
	runtime.LockOSThread()
	if unix.Gettid() == os.Getpid() {
		other := make(chan struct{})
		go func() { close(other); forkLoop() }()
		<-other // it runs, hence on another thread, before this one is given back
		runtime.UnlockOSThread()
		return
	}
	for r := range forkRequests {
		pid, _, err := syscall.StartProcess(r.path, r.argv, r.attr)
		r.reply <- forkReply{pid, err}
	}
}

// fork starts a program from a fork thread.
func fork(path string, argv []string, attr *syscall.ProcAttr) (pid int, err error) {
	startForkers()
	r := forkRequest{path: path, argv: argv, attr: attr, reply: make(chan forkReply, 1)}
	// A program that was written a moment ago may still be held open for writing by a child of another fork that has not
	// reached its exec; that lasts microseconds, so a few tries are enough.
	for pause := time.Millisecond; ; pause *= 2 {
		r.submit()
		got := <-r.reply
		if !errors.Is(got.err, syscall.ETXTBSY) || pause > 64*time.Millisecond {
			return got.pid, got.err
		}
		time.Sleep(pause) //nolint:forbidigo // the kernel has no event for this; the pause is bounded and short
	}
}

// submit hands the request to a fork thread.
func (r forkRequest) submit() {
	select {
	case forkRequests <- r:
		return
	default:
	}
	timer := time.NewTimer(forkPatience)
	defer timer.Stop()
	for {
		select {
		case forkRequests <- r:
			return
		case <-timer.C:
			go forkLoop()
			timer.Reset(forkPatience)
		}
	}
}
