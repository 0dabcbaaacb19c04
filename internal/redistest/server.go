package redistest

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	startTimeout = 30 * time.Second // generous: the machine may be compiling beside us
	stopTimeout  = 10 * time.Second
	startTries   = 5
)

// Server is a running redis-server. Its methods are safe for concurrent use.
type Server struct {
	bin  string
	dir  string
	opts options
	port int

	mu    sync.Mutex
	child *child // nil while the server is down
}

// child is one process of the server.
type child struct {
	proc   *os.Process
	exited chan struct{} // closed once the process was waited for
}

func newServer(bin string, opts []Option) (*Server, error) {
	// Not t.TempDir: it holds the test's name, and a socket path ends at 108 bytes.
	dir, err := os.MkdirTemp("", "millrace-redis-")
	if err != nil {
		return nil, err
	}
	srv := &Server{bin: bin, dir: dir}
	for _, opt := range opts {
		opt(&srv.opts)
	}
	// A free port can be taken by somebody else before the server binds it.
	for range startTries {
		if srv.port, err = freePort(); err != nil {
			break
		}
		if err = srv.start(); err == nil {
			return srv, nil
		}
	}
	return nil, errors.Join(err, os.RemoveAll(dir))
}

// Addr returns the server's TCP address, 127.0.0.1:port. It stays the same
// over restarts.
func (s *Server) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)) }

// URL returns the server's address as redis://127.0.0.1:port/0.
func (s *Server) URL() string { return "redis://" + s.Addr() + "/0" }

// Socket returns the path of the server's Unix socket.
func (s *Server) Socket() string { return filepath.Join(s.dir, "redis.sock") }

// SocketURL returns the address of the Unix socket as unix:///path?db=0.
func (s *Server) SocketURL() string { return "unix://" + s.Socket() + "?db=0" }

// Dir returns the directory with the server's log and data.
func (s *Server) Dir() string { return s.dir }

// Prefix is [Prefix], for callers that have a server at hand.
func (s *Server) Prefix(t testing.TB) string {
	t.Helper()
	return Prefix(t)
}

// Kill ends the server at once with SIGKILL and waits until it is gone. A
// server that is down already stays down.
func (s *Server) Kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.child == nil {
		return
	}
	s.child.kill()
	s.child = nil
}

// Freeze stops the server with SIGSTOP: connections stay open, nothing
// answers, and time runs on, as in a paused virtual machine.
func (s *Server) Freeze() { s.signal(syscall.SIGSTOP) }

// Thaw lets a frozen server run on.
func (s *Server) Thaw() { s.signal(syscall.SIGCONT) }

func (s *Server) signal(sig syscall.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.child != nil {
		// An error means that it has just exited, which the caller's next
		// command finds out with a better message than we could give here.
		_ = s.child.proc.Signal(sig)
	}
}

// Restart starts the server again on the same port, socket and directory,
// after shutting it down in an orderly way when it still runs. What was in it
// comes back only [WithAOF].
func (s *Server) Restart(t testing.TB) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.child != nil {
		s.child.stop()
		s.child = nil
	}
	var err error
	for range startTries {
		if err = s.startLocked(); err == nil {
			return
		}
	}
	t.Fatalf("redistest: restart: %v", err)
}

// Config sets a directive of the running server (CONFIG SET) and fails t when
// the server refuses it.
func (s *Server) Config(t testing.TB, key, value string) {
	t.Helper()
	s.Do(t, "CONFIG", "SET", key, value)
}

// Do sends one command over the Unix socket, fails t on an error reply, and
// returns a simple string, integer or bulk reply as text. It is for the odd
// command in a test's set-up, not for the traffic under test.
func (s *Server) Do(t testing.TB, args ...string) string {
	t.Helper()
	reply, err := command(s.Socket(), 10*time.Second, args...)
	if err != nil {
		t.Fatalf("redistest: %v: %v", args, err)
	}
	return reply
}

func (s *Server) start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.startLocked()
}

func (s *Server) startLocked() error {
	logPath := filepath.Join(s.dir, "redis.log")
	_ = os.Remove(s.Socket()) // left behind by a kill
	c, err := spawn(exec.Command(s.bin, s.args(logPath)...))
	if err != nil {
		return err
	}
	deadline := time.Now().Add(startTimeout)
	for {
		if reply, err := command(s.Socket(), time.Second, "PING"); err == nil && reply == "PONG" {
			s.child = c
			return nil
		}
		select {
		case <-c.exited:
			return fmt.Errorf("%s ended while starting on port %d; its log ends:\n%s", s.bin, s.port, tail(logPath))
		case <-time.After(2 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			c.kill()
			return fmt.Errorf("%s did not answer PING within %v; its log ends:\n%s", s.bin, startTimeout, tail(logPath))
		}
	}
}

func (s *Server) args(logPath string) []string {
	args := []string{
		"--port", strconv.Itoa(s.port), "--bind", "127.0.0.1",
		"--unixsocket", s.Socket(), "--unixsocketperm", "700",
		"--dir", s.dir, "--logfile", logPath, "--daemonize", "no",
		"--save", "", "--maxmemory-policy", "noeviction",
	}
	if s.opts.aof {
		args = append(args, "--appendonly", "yes", "--appendfsync", "everysec")
	}
	for _, kv := range s.opts.config {
		args = append(args, "--"+kv[0], kv[1])
	}
	return args
}

func (s *Server) close() error {
	s.Kill() // there is nothing to save
	return os.RemoveAll(s.dir)
}

// spawn starts cmd and a goroutine that waits for it. The goroutine keeps its
// thread for as long as the process lives, because the parent-death signal set
// by dieWithParent is sent when the *thread* that started the process ends.
func spawn(cmd *exec.Cmd) (*child, error) {
	dieWithParent(cmd)
	c := &child{exited: make(chan struct{})}
	started := make(chan error)
	go func() {
		defer close(c.exited)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		c.proc = cmd.Process
		started <- err
		if err == nil {
			_ = cmd.Wait() // how it ended does not matter, that it ended does
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return c, nil
}

func (c *child) kill() {
	_ = c.proc.Kill() // also ends a stopped process; an error means it is gone
	<-c.exited
}

func (c *child) stop() {
	_ = c.proc.Signal(syscall.SIGCONT)
	_ = c.proc.Signal(syscall.SIGTERM)
	select {
	case <-c.exited:
	case <-time.After(stopTimeout):
		c.kill()
	}
}

// tail returns the last lines of the server's log.
func tail(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > 1000 {
		_, _ = f.Seek(-1000, io.SeekEnd)
	}
	text, err := io.ReadAll(f)
	if err != nil {
		return err.Error()
	}
	return string(text)
}
