package proc

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// leftoverGrace is what processes get, after TERM, that are still there when their main process has ended by itself.
	leftoverGrace = time.Second
	// drainLimit bounds the wait for the end of the output once the tree is empty. Only a process that was never ours can
	// still hold the pipe then: one that got the descriptor over a socket, or that a service manager started.
	drainLimit = 2 * time.Second
	// killPatience is how long a process may take to die of KILL. One that needs longer hangs in the kernel (a dead network
	// file system, a frozen cgroup) and will not run code of its own again, whenever it comes back.
	killPatience = 5 * time.Second
)

// Process is one running attempt. Its methods are safe for concurrent use.
type Process struct {
	pid      int
	marker   string
	since    uint64 // no process of the tree is older, in the unit of stat.start
	started  time.Time
	exit     *output // the pidfd, waited on by the poller; nil when the kernel has none
	outputs  []*output
	stdin    *os.File
	empty    chan struct{} // closed when the tree is empty
	done     chan struct{} // closed when outcome is complete
	poke     chan struct{} // tells enforce that the deadline moved
	hopeless chan struct{} // closed when something did not die of KILL

	mu       sync.Mutex
	reaped   bool      // pid may belong to somebody else from now on
	deadline time.Time // of Stop; zero before it
	leftover bool      // the first stop was ours, after the main process had ended by itself
	seen     map[key]bool
	memory   memory
	outcome  Outcome
}

// PID returns the pid of the main process, which is also the id of its session and process group.
func (p *Process) PID() int { return p.pid }

// Done is closed when Wait would return at once.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait blocks until the main process has ended, the tree is empty and the output has been read to its end.
func (p *Process) Wait() Outcome {
	<-p.done
	return p.outcome
}

// Start runs the command of spec. The error is a *RefusedError when the command can never run, see there.
func Start(spec Spec) (*Process, error) {
	if err := spec.check(); err != nil {
		return nil, err
	}
	path, err := spec.lookPath()
	if err != nil {
		return nil, err
	}
	if err := BecomeSubreaper(); err != nil {
		return nil, err
	}
	p := &Process{
		marker: spec.Marker, since: nowTicks(), started: time.Now(),
		empty: make(chan struct{}), done: make(chan struct{}), poke: make(chan struct{}, 1),
		hopeless: make(chan struct{}),
	}
	files, closeFiles, err := p.open(&spec)
	if err != nil {
		p.close()
		return nil, fmt.Errorf("open pipes of the process: %w", err)
	}
	living.expect(p)
	pidfd := -1
	p.pid, err = fork(path, spec.Argv, &syscall.ProcAttr{
		Dir: spec.Dir, Env: spec.environ(), Files: files,
		Sys: &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL, PidFD: &pidfd},
	})
	closeFiles()
	if err != nil {
		living.remove(p)
		p.close()
		return nil, spec.diagnose(path, err)
	}
	p.memory = newMemory()
	living.forked(p)
	if pidfd >= 0 {
		p.exit, _ = pollable(pidfd, "process")
	}
	for _, o := range p.outputs {
		go o.copy()
	}
	if p.stdin != nil {
		go feed(p.stdin, spec.Stdin)
	}
	go p.run()
	return p, nil
}

// open makes the three descriptors of the child; closeFiles closes those of them that are not shared.
func (p *Process) open(spec *Spec) (files []uintptr, closeFiles func(), err error) {
	var mine []int
	closeFiles = func() {
		for _, fd := range mine {
			unix.Close(fd)
		}
	}
	defer func() {
		if err != nil {
			closeFiles()
		}
	}()
	in, err := nullDevice()
	if err != nil {
		return nil, nil, err
	}
	if len(spec.Stdin) > 0 {
		if p.stdin, in, err = newInput(); err != nil {
			return nil, nil, err
		}
		mine = append(mine, in)
	}
	stdout, out, err := newOutput(spec.Stdout)
	if err != nil {
		return nil, nil, err
	}
	mine, p.outputs = append(mine, out), append(p.outputs, stdout)
	errOut := out
	if spec.Stderr != nil {
		var stderr *output
		if stderr, errOut, err = newOutput(spec.Stderr); err != nil {
			return nil, nil, err
		}
		mine, p.outputs = append(mine, errOut), append(p.outputs, stderr)
	}
	return []uintptr{uintptr(in), uintptr(out), uintptr(errOut)}, closeFiles, nil
}

// close drops what open made, for a process that never started.
func (p *Process) close() {
	for _, o := range p.outputs {
		o.file.Close()
	}
	if p.stdin != nil {
		p.stdin.Close()
	}
}

// run follows the process to its end.
func (p *Process) run() {
	p.outcome.Started = p.started
	ws, usage, ended := p.waitMain()
	p.mu.Lock()
	p.outcome.Ended = time.Now()
	if ended {
		p.outcome.status(ws)
		p.outcome.use(usage)
		p.outcome.MaxRSSBytes = p.memory.settle(p.outcome.MaxRSSBytes)
	} else {
		p.outcome.Signal, p.outcome.ExitCode = unix.SIGKILL, 128+int(unix.SIGKILL)
	}
	p.mu.Unlock()

	p.awaitEmpty()
	p.mu.Lock()
	close(p.empty) // from here on only this goroutine writes the outcome
	p.mu.Unlock()
	living.remove(p)
	p.finishStreams()
	close(p.done)
}

// finishStreams waits for the end of the output, which nobody writes any more.
func (p *Process) finishStreams() {
	if p.stdin != nil {
		p.stdin.Close()
	}
	for _, o := range p.outputs {
		o.giveUpAfter(drainLimit)
	}
	for _, o := range p.outputs {
		<-o.done
		p.outcome.OutputCut = p.outcome.OutputCut || o.cut
		p.outcome.OutputErr = errors.Join(p.outcome.OutputErr, o.err)
	}
}

// waitMain reaps the main process; ended is false when that has become hopeless.
func (p *Process) waitMain() (ws syscall.WaitStatus, usage syscall.Rusage, ended bool) {
	if p.exit == nil {
		return p.waitMainOnThread()
	}
	err := p.exit.conn.Read(func(uintptr) bool { return p.reap(&ws, &usage) })
	if err == nil {
		p.exit.file.Close()
		return ws, usage, true
	}
	go func() { // it is still ours to reap, should it ever end
		defer p.exit.file.Close()
		_ = p.exit.file.SetReadDeadline(time.Time{})
		_ = p.exit.conn.Read(func(uintptr) bool { return p.reap(new(syscall.WaitStatus), new(syscall.Rusage)) })
	}()
	return ws, usage, false
}

// waitMainOnThread is for kernels that have no pidfd the poller could wait on.
func (p *Process) waitMainOnThread() (ws syscall.WaitStatus, usage syscall.Rusage, ended bool) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for !p.reap(&ws, &usage) {
			// WNOWAIT leaves the reaping to the locked section.
			_ = unix.Waitid(unix.P_PID, p.pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		}
	}()
	select {
	case <-done:
		return ws, usage, true
	case <-p.hopeless:
		return 0, syscall.Rusage{}, false
	}
}

// reap takes the exit status of the main process if it has ended. The lock makes sure that nobody signals the pid after
// that.
func (p *Process) reap(ws *syscall.WaitStatus, usage *syscall.Rusage) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	pid, err := wait4(p.pid, ws, usage)
	p.reaped = pid == p.pid || err != nil
	return p.reaped
}

// giveUp ends the waiting for processes that do not die of KILL.
func (p *Process) giveUp() {
	close(p.hopeless)
	if p.exit != nil {
		_ = p.exit.file.SetReadDeadline(time.Now())
	}
}

// wait4 reaps pid if it has ended, without blocking.
func wait4(pid int, ws *syscall.WaitStatus, usage *syscall.Rusage) (int, error) {
	for {
		got, err := syscall.Wait4(pid, ws, syscall.WNOHANG, usage)
		if !errors.Is(err, syscall.EINTR) {
			return got, err
		}
	}
}
