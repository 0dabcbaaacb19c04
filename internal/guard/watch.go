package guard

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/millrace/millrace/internal/proc"
)

// maxMessage bounds what the agent says in one message.
const maxMessage = 512

// watch is the guard's side.
type watch struct {
	opts     Options
	socket   *os.File
	page     []byte
	deadline *atomic.Int64
	agent    int
	heard    chan struct{} // closed when the agent's end of the socket is closed and all it said was read

	mu       sync.Mutex
	prefixes []string
	held     []int // descriptors kept open until the end
}

// newWatch makes both ends of the link; the agent's are in the order of socketFD and pageFD.
func newWatch(opts Options) (w *watch, agentEnds []*os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	theirs := os.NewFile(uintptr(fds[1]), "agent")
	if err = unix.SetNonblock(fds[0], true); err != nil {
		return nil, nil, errors.Join(err, unix.Close(fds[0]), theirs.Close())
	}
	w = &watch{opts: opts, socket: os.NewFile(uintptr(fds[0]), "agent"), heard: make(chan struct{})}
	page, err := newPage()
	if err == nil {
		w.page, err = mapPage(int(page.Fd()))
	}
	if err != nil {
		w.socket.Close()
		theirs.Close()
		return nil, nil, err
	}
	w.deadline = deadlineIn(w.page)
	return w, []*os.File{theirs, page}, nil
}

func newPage() (*os.File, error) {
	fd, err := unix.MemfdCreate("millrace-guard", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "millrace-guard")
	if err := f.Truncate(pageSize); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func (w *watch) close() {
	w.socket.Close()
	_ = unix.Munmap(w.page)
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, fd := range w.held {
		unix.Close(fd)
	}
}

// run watches the agent until it and all its trees have ended.
func (w *watch) run(cmd *exec.Cmd, signals <-chan os.Signal) (code int, _ *Link, err error) {
	w.agent = cmd.Process.Pid
	go w.listen()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		// It is only looked at here and reaped below, so that nobody else can get its pid while this loop uses it.
		for errors.Is(unix.Waitid(unix.P_PID, w.agent, nil, unix.WEXITED|unix.WNOWAIT, nil), unix.EINTR) {
		}
	}()

	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	defer signal.Stop(children)
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	slim := time.After(settled)
	var late lateness
	for {
		select {
		case sig := <-signals:
			_ = cmd.Process.Signal(sig)
		case <-children:
			proc.ReapChildren(w.agent)
		case <-slim:
			Trim()
		case <-ticker.C:
			w.check(&late)
			ticker.Reset(w.pace())
		case <-ended:
			w.drain()
			err = w.buryAll()
			proc.ReapChildren(w.agent)
			_ = cmd.Wait() // its error is the exit code over again
			return exitCode(cmd.ProcessState), nil, err
		}
	}
}

// lateness is what the guard has done about a passed deadline.
type lateness struct {
	deadline int64   // the one that passed; another value means that the agent is back
	fenced   Instant // when its trees were found dead
	killed   bool    // the agent itself was killed
}

// pace is how soon to look again: less often while there is no deadline, because nothing runs. An agent sets one before it
// starts something, a good part of a heartbeat's lifetime ahead.
func (w *watch) pace() time.Duration {
	if w.deadline.Load() == 0 {
		return restTick
	}
	return tick
}

// check kills the trees of an agent that is late, again at every tick as long as it is late, and at last the agent.
func (w *watch) check(late *lateness) {
	now, deadline := Now(), w.deadline.Load()
	if deadline == 0 || int64(now) < deadline {
		*late = lateness{}
		return
	}
	if late.deadline != deadline {
		*late = lateness{deadline: deadline}
	}
	killed, err := w.fence()
	if len(killed) > 0 || err != nil {
		w.log("agent %d said nothing for %s after its deadline: killed %d of its processes%s", w.agent, now.Sub(Instant(deadline)).Round(time.Millisecond), len(killed), suffix(err))
	}
	switch {
	case late.fenced == 0:
		late.fenced = Now()
	case !late.killed && Now().Sub(late.fenced) >= w.opts.StuckAfter:
		late.killed = true
		w.log("agent %d is stuck: killing it", w.agent)
		_ = unix.Kill(w.agent, unix.SIGKILL)
	}
}

// fence kills what a living agent has started: its children with a session of their own, what is below them, and
// whatever carries one of its markers. Helpers of the agent in its own session are left alone.
func (w *watch) fence() ([]proc.Survivor, error) {
	session, err := unix.Getsid(w.agent)
	if err != nil {
		session = -1 // gone, or a zombie: then it has no children either
	}
	return proc.SweepTrees(func(c proc.Candidate) bool {
		if c.PID == w.agent {
			return false
		}
		return c.Parent == w.agent && c.Session != session || w.marked(c)
	})
}

// buryAll kills what a dead agent has left: all orphans have become children of the guard.
func (w *watch) buryAll() error {
	killed, err := proc.SweepTrees(func(c proc.Candidate) bool {
		return c.Parent == os.Getpid() || w.marked(c)
	})
	if len(killed) > 0 {
		w.log("the agent is dead: killed %d processes it has left", len(killed))
	}
	return err
}

func (w *watch) marked(c proc.Candidate) bool {
	w.mu.Lock()
	prefixes := w.prefixes
	w.mu.Unlock()
	if len(prefixes) == 0 {
		return false
	}
	marker := c.Marker()
	for _, p := range prefixes {
		if strings.HasPrefix(marker, p) {
			return true
		}
	}
	return false
}

// listen takes what the agent says.
func (w *watch) listen() {
	defer close(w.heard)
	conn, err := w.socket.SyscallConn()
	if err != nil {
		return
	}
	message, rights := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(4))
	for {
		var n, oobn int
		readErr := conn.Read(func(fd uintptr) bool {
			n, oobn, _, _, err = unix.Recvmsg(int(fd), message, rights, unix.MSG_CMSG_CLOEXEC)
			return !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR)
		})
		if readErr != nil || err != nil || n == 0 {
			return
		}
		w.hear(string(message[:n]), rights[:oobn])
	}
}

func (w *watch) hear(message string, rights []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if message != "\x00" {
		w.prefixes = append(w.prefixes, message)
		return
	}
	parts, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return
	}
	for i := range parts {
		if fds, err := unix.ParseUnixRights(&parts[i]); err == nil {
			w.held = append(w.held, fds...)
		}
	}
}

// drain waits until all that a dead agent said has been read. The socket ends with the agent, nobody else has it.
func (w *watch) drain() {
	select {
	case <-w.heard:
	case <-time.After(time.Second):
	}
}

func (w *watch) log(format string, args ...any) {
	fmt.Fprintf(w.opts.Log, "millrace guard: "+format+"\n", args...)
}

func suffix(err error) string {
	if err == nil {
		return ""
	}
	return ": " + err.Error()
}

// exitCode gives a signal's death the code a shell would.
func exitCode(s *os.ProcessState) int {
	if ws, ok := s.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	return s.ExitCode()
}
