// Package embedded gives `millrace dev` a Redis of its own: a private redis-server or valkey-server when one is
// installed, else an in-memory one inside this process, whose data ends with it.
package embedded

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/alicebob/miniredis/v2"
)

// Server is a running Redis. Stop ends it.
type Server struct {
	// URL to connect to.
	URL string
	// Addr is host:port.
	Addr string
	// InMemory: it is the one inside this process.
	InMemory bool
	// Program that runs, empty when InMemory.
	Program string

	stop func()
}

// Stop ends the server and waits for it. Data of a real one is on disk then.
func (s *Server) Stop() { s.stop() }

// Options of Start.
type Options struct {
	// Dir is where a real server works.
	Dir string
	// Persist keeps the data there in an append-only file, synced every second.
	Persist bool
	// InMemory takes the server inside this process although a real one is installed.
	InMemory bool
}

// Start starts a server.
func Start(ctx context.Context, o Options) (*Server, error) {
	if !o.InMemory {
		for _, name := range []string{"redis-server", "valkey-server"} {
			if path, err := exec.LookPath(name); err == nil {
				return startReal(ctx, path, o)
			}
		}
	}
	return startMemory()
}

// tick is how often the clock of the in-memory server moves: by itself it stands still.
const tick = 100 * time.Millisecond

func startMemory() (*Server, error) {
	m := miniredis.NewMiniRedis()
	if err := m.StartAddr("127.0.0.1:0"); err != nil {
		return nil, fmt.Errorf("in-memory Redis: %w", err)
	}
	quit, done := make(chan struct{}), make(chan struct{})
	go func() { // ends with Stop
		defer close(done)
		t := time.NewTicker(tick)
		defer t.Stop()
		last := time.Now()
		for {
			select {
			case <-quit:
				return
			case now := <-t.C:
				m.FastForward(now.Sub(last))
				last = now
			}
		}
	}()
	return &Server{URL: "redis://" + m.Addr() + "/0", Addr: m.Addr(), InMemory: true, stop: func() {
		close(quit)
		<-done
		m.Close()
	}}, nil
}

// startTimeout is long: loading a large append-only file takes its time.
const startTimeout = 30 * time.Second

func startReal(ctx context.Context, path string, o Options) (*Server, error) {
	dir, aof := o.Dir, "no"
	if o.Persist {
		aof = "yes"
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("directory of the private Redis: %w", err)
	}
	addr, err := freeAddr(ctx)
	if err != nil {
		return nil, err
	}
	_, port, _ := net.SplitHostPort(addr)
	logPath := filepath.Join(dir, "redis.log")
	cmd := exec.Command(path, //nolint:noctx // it is stopped last, by Stop, not with a context
		"--port", port, "--bind", "127.0.0.1", "--dir", dir, "--logfile", logPath, "--save", "",
		"--appendonly", aof, "--appendfsync", "everysec", "--maxmemory-policy", "noeviction", "--notify-keyspace-events", "Ex",
		"--stream-node-max-bytes", "1024", "--hash-max-listpack-value", "1024", "--daemonize", "no")
	// A group of its own keeps Ctrl-C away from it, it is stopped last; it must not outlive us, however we end.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	exited, started := make(chan struct{}), make(chan error, 1)
	go func() { // ends with the server
		// The parent-death signal comes when the thread dies that started the child: this one lives as long.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(exited)
		err := cmd.Start()
		if started <- err; err == nil {
			_ = cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", path, err)
	}
	stop := func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-exited:
		case <-time.After(10 * time.Second):
			_ = cmd.Process.Kill()
			<-exited
		}
	}
	s := &Server{URL: "redis://" + addr + "/0", Addr: addr, Program: path, stop: stop}
	deadline := time.Now().Add(startTimeout)
	for {
		select {
		case <-exited:
			return nil, fmt.Errorf("%s ended at once: see %s", path, logPath)
		case <-ctx.Done():
			stop()
			return nil, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
		c, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", addr)
		if err == nil {
			_ = c.Close()
			return s, nil
		}
		if time.Now().After(deadline) {
			stop()
			return nil, errors.New("the private Redis does not answer: see " + logPath)
		}
	}
}

func freeAddr(ctx context.Context) (string, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String(), nil
}
