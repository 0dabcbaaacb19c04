package redistest

import (
	"bufio"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"
)

// echoServer answers every byte with itself until the test ends.
func echoServer(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		wg.Wait()
	})
	return l.Addr().String()
}

type client struct {
	t    *testing.T
	conn net.Conn
	r    *bufio.Reader
}

func dial(t *testing.T, p *Proxy) *client {
	t.Helper()
	conn, err := net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return &client{t: t, conn: conn, r: bufio.NewReader(conn)}
}

func (c *client) send(line string) {
	c.t.Helper()
	if _, err := io.WriteString(c.conn, line+"\n"); err != nil {
		c.t.Fatal(err)
	}
}

func (c *client) recv(within time.Duration) (string, error) {
	c.t.Helper()
	if err := c.conn.SetReadDeadline(time.Now().Add(within)); err != nil {
		c.t.Fatal(err)
	}
	return c.r.ReadString('\n')
}

func (c *client) wantEcho(line string) {
	c.t.Helper()
	got, err := c.recv(10 * time.Second)
	if err != nil || got != line+"\n" {
		c.t.Fatalf("got %q, %v, want %q", got, err, line)
	}
}

func (c *client) wantSilence() {
	c.t.Helper()
	if got, err := c.recv(100 * time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		c.t.Fatalf("got %q, %v, want silence", got, err)
	}
}

func TestProxyPassesBytes(t *testing.T) {
	t.Parallel()
	p := NewProxy(t, echoServer(t))
	c := dial(t, p)
	c.send("one")
	c.wantEcho("one")
	if n := p.Connections(); n != 1 {
		t.Errorf("Connections = %d, want 1", n)
	}
	// A half-closed connection still delivers the rest.
	c.send("two")
	if err := c.conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	c.wantEcho("two")
	if _, err := c.recv(10 * time.Second); !errors.Is(err, io.EOF) {
		t.Errorf("after both ways closed: %v, want EOF", err)
	}
}

func TestProxyCutAndRestore(t *testing.T) {
	t.Parallel()
	p := NewProxy(t, echoServer(t))
	c := dial(t, p)
	c.send("one")
	c.wantEcho("one")

	p.Cut()
	if _, err := c.recv(10 * time.Second); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read over a cut link: %v, want it reset", err)
	}
	if conn, err := net.Dial("tcp", p.Addr()); err == nil {
		conn.Close()
		t.Error("a cut proxy accepts connections")
	}

	p.Restore()
	c = dial(t, p)
	c.send("two")
	c.wantEcho("two")
}

func TestProxyReset(t *testing.T) {
	t.Parallel()
	p := NewProxy(t, echoServer(t))
	c := dial(t, p)
	c.send("one")
	c.wantEcho("one")
	p.Reset()
	if _, err := c.recv(10 * time.Second); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read after Reset: %v, want an error", err)
	}
	c = dial(t, p)
	c.send("two")
	c.wantEcho("two")
}

func TestProxyBlackhole(t *testing.T) {
	t.Parallel()
	for name, d := range map[string]Direction{"to server": ToServer, "to client": ToClient, "both": BothWays} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := NewProxy(t, echoServer(t))
			c := dial(t, p)
			c.send("one")
			c.wantEcho("one")
			p.Blackhole(d)
			c.send("two")
			c.wantSilence()
			p.Restore()
			c.wantEcho("two")
		})
	}
}

func TestProxyEndsWhileHolding(t *testing.T) {
	t.Parallel()
	p := NewProxy(t, echoServer(t))
	c := dial(t, p)
	p.Blackhole(BothWays)
	c.send("one")
	c.wantSilence()
	p.Cut()
	// What is left is for goleak to find.
}

func TestProxyDelayAddsLatencyNotLoss(t *testing.T) {
	t.Parallel()
	const delay = 150 * time.Millisecond
	p := NewProxy(t, echoServer(t))
	c := dial(t, p)
	c.send("warm up")
	c.wantEcho("warm up")

	p.Delay(delay)
	start := time.Now()
	for range 50 {
		c.send("x")
	}
	for range 50 {
		c.wantEcho("x")
	}
	took := time.Since(start)
	if took < 2*delay {
		t.Errorf("50 echoes took %v, less than one delayed round trip", took)
	}
	if took > 20*delay {
		t.Errorf("50 pipelined echoes took %v: the delay is added up", took)
	}
}

func TestProxyWithoutTarget(t *testing.T) {
	t.Parallel()
	port, err := freePort()
	if err != nil {
		t.Fatal(err)
	}
	target := (&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port}).String()
	conn, err := net.Dial("tcp", NewProxy(t, target).Addr())
	if err != nil {
		return // the reset came before the dial had returned
	}
	defer conn.Close()
	if err := conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read from a proxy without a server: %v, want an error", err)
	}
}

func TestProxyInFrontOfRedis(t *testing.T) {
	t.Parallel()
	srv := Start(t)
	c := dial(t, NewProxy(t, srv.Addr()))
	c.send("PING")
	c.wantEcho("+PONG\r")
	srv.Kill()
	if _, err := c.recv(10 * time.Second); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read after the server was killed: %v, want the connection ended", err)
	}
}
