// Package guard is the agent's dead-man's switch. The process a user starts as an agent becomes the guard, and runs the
// real agent as its child. The agent tells the guard until when it may be trusted; when that moment passes without
// another word, or when the agent dies in whatever way, the guard kills every task tree of it. So a stopped, hung or killed
// agent's tasks are dead before anybody else may start them again.
//
// The guard uses nothing of the agent but internal/proc, holds no connection and no state, and has to be entered
// before anything heavy is set up:
//
//	func main() {
//		code, link, err := guard.Supervise(guard.Options{})
//		if link == nil { // this was the guard, and all is over
//			…report err…
//			os.Exit(code)
//		}
//		…this is the agent; link is its line to the guard…
//	}
//
// What each can survive: SIGSTOP or SIGKILL of the agent, the guard kills the trees. SIGKILL of the guard, Link.Lost is
// closed and the agent kills its trees. SIGKILL of both, the kernel kills the main processes (their parent-death
// signal) and the next start on the same state directory sweeps the rest by their markers.
package guard

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/millrace/millrace/internal/proc"
)

const (
	// tick is how often the guard looks at the deadline.
	tick = 100 * time.Millisecond
	// restTick is for a guard whose agent runs nothing: waking ten times a second would be most of what it costs.
	restTick = 400 * time.Millisecond
	// settled is when the guard's own start is over.
	settled = time.Second
	// defaultStuckAfter is long for a process that was only late, and short beside the time a supervisor needs to notice.
	defaultStuckAfter = 5 * time.Second
	// startFailed is the exit code for millrace's own errors.
	startFailed = 125
)

// Options of Supervise. The zero value is right for an agent.
type Options struct {
	// StuckAfter is how long an agent whose trees were killed for a passed deadline has to set a new one, or none,
	// before it is killed itself. Default 5s.
	StuckAfter time.Duration
	// Args is the agent's command line, default os.Args. The program is always the one that is running.
	Args []string
	// Log receives a line when the guard had to do something; default os.Stderr.
	Log io.Writer
}

// forwarded are the signals that the guard passes on to the agent, one for one. The agent has a process group of its own,
// so that Ctrl-C on a terminal reaches it once, through the guard.
var forwarded = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2}

// Supervise returns twice. In the process that was started first it becomes the guard, runs the same program with the
// same arguments as its child, and returns when that has ended and no process of its tasks is left: with the child's exit
// code (128+n for signal n) and a nil Link. In the child it returns at once with the Link.
//
// An error comes with a nil Link and code 125 and means that the child could not be started or linked, or that processes
// could not be killed; in that last case the code is still the child's.
func Supervise(opts Options) (code int, link *Link, err error) {
	link, err = inherit()
	if err != nil {
		return startFailed, nil, err
	}
	if link != nil {
		return 0, link, nil
	}
	if opts.StuckAfter <= 0 {
		opts.StuckAfter = defaultStuckAfter
	}
	if opts.Args == nil {
		opts.Args = os.Args
	}
	if opts.Log == nil {
		opts.Log = os.Stderr
	}
	return guard(opts)
}

// guard starts the agent and watches it to its end.
func guard(opts Options) (code int, _ *Link, err error) {
	debug.SetGCPercent(20) // small matters more than fast: it allocates only when it sweeps
	runtime.GOMAXPROCS(1)
	if err := proc.BecomeSubreaper(); err != nil {
		return startFailed, nil, err
	}
	signals := make(chan os.Signal, 64)
	signal.Notify(signals, notIgnored(forwarded)...)
	defer signal.Stop(signals)

	w, agentEnds, err := newWatch(opts)
	if err != nil {
		return startFailed, nil, fmt.Errorf("link between guard and agent: %w", err)
	}
	defer w.close()
	// #nosec: the program is this one. By this path it is the very same file, even when the name was replaced meanwhile.
	cmd := &exec.Cmd{
		Path: "/proc/self/exe", Args: opts.Args, Env: append(os.Environ(), linkEnv()),
		Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, ExtraFiles: agentEnds,
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true},
	}
	err = cmd.Start()
	for _, f := range agentEnds {
		f.Close()
	}
	if err != nil {
		return startFailed, nil, fmt.Errorf("start the agent: %w", err)
	}
	return w.run(cmd, signals)
}

// notIgnored drops what whoever started us wants ignored, as nohup does with HUP.
func notIgnored(all []os.Signal) (kept []os.Signal) {
	for _, s := range all {
		if !signal.Ignored(s) {
			kept = append(kept, s)
		}
	}
	return kept
}
