package redistest

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// Direction says which way bytes travel through a [Proxy].
type Direction int

// The directions, to be combined with |.
const (
	ToServer Direction = 1 << iota
	ToClient
	BothWays = ToServer | ToClient
)

// Proxy is a TCP proxy in front of one address, with faults on demand. It runs
// in the test's process and ends with the test. Its methods are safe for
// concurrent use.
//
// Faults act on bytes that are on their way, so a command sent before a fault
// may or may not have got through, as on a real network.
type Proxy struct {
	target string
	addr   string

	wg sync.WaitGroup

	mu       sync.Mutex
	listener net.Listener // nil while cut
	links    map[*link]struct{}
	held     Direction     // black-holed directions
	changed  chan struct{} // closed and replaced when held changes
	delay    time.Duration
	closed   bool
}

// NewProxy starts a proxy on a free loopback port in front of target, which
// need not be there yet: it is dialled for each connection.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	p := &Proxy{target: target, links: make(map[*link]struct{}), changed: make(chan struct{})}
	var err error
	for range startTries {
		var port int
		if port, err = freePort(); err != nil {
			break
		}
		p.addr = (&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port}).String()
		if err = p.listen(); err == nil {
			break
		}
	}
	if err != nil {
		t.Fatalf("redistest: start proxy: %v", err)
	}
	t.Cleanup(p.close)
	return p
}

// Addr returns the address that clients dial, 127.0.0.1:port. It stays the
// same over Cut and Restore.
func (p *Proxy) Addr() string { return p.addr }

// URL returns the proxy's address as redis://127.0.0.1:port/0.
func (p *Proxy) URL() string { return "redis://" + p.addr + "/0" }

// Cut resets every connection and refuses new ones until [Proxy.Restore].
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != nil {
		_ = p.listener.Close()
		p.listener = nil
	}
	p.resetLocked()
}

// Reset resets every connection once; new ones are taken at once.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.resetLocked()
}

func (p *Proxy) resetLocked() {
	for l := range p.links {
		l.reset()
	}
}

// Blackhole holds back all bytes, and the closing of connections, that travel
// in the given direction, until [Proxy.Restore]; nobody gets an error. New
// connections still succeed, because the kernel completes them. Like a link
// that comes back before TCP gives up, Restore delivers what was held back on
// the connections that still exist. Calls add up.
func (p *Proxy) Blackhole(d Direction) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hold(p.held | d)
}

// Delay makes every byte that is sent from now on arrive d later, each way.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// Restore ends all faults: connections are accepted, bytes flow, without
// delay. It panics when somebody else has taken the port since Cut.
func (p *Proxy) Restore() {
	p.mu.Lock()
	p.delay = 0
	p.hold(0)
	cut := p.listener == nil && !p.closed
	p.mu.Unlock()
	if !cut {
		return
	}
	if err := p.listen(); err != nil {
		panic("redistest: restore proxy: " + err.Error())
	}
}

// Connections returns how many clients are connected.
func (p *Proxy) Connections() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.links)
}

// hold sets the black-holed directions and wakes who waits for them.
func (p *Proxy) hold(d Direction) {
	p.held = d
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *Proxy) close() {
	p.Cut()
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.wg.Wait()
}

func (p *Proxy) listen() error {
	l, err := net.Listen("tcp", p.addr)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.listener = l
	p.mu.Unlock()
	p.wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return // closed by Cut
			}
			p.wg.Go(func() { p.serve(l, conn.(*net.TCPConn)) })
		}
	})
	return nil
}

// serve runs one connection until both ways have ended. A connection accepted
// by a listener that has been cut since is dropped.
func (p *Proxy) serve(from net.Listener, client *net.TCPConn) {
	conn, err := net.Dial("tcp", p.target)
	if err != nil {
		_ = client.SetLinger(0)
		_ = client.Close()
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	l := &link{client: client, server: conn.(*net.TCPConn), cancel: cancel}
	defer l.close()

	p.mu.Lock()
	if p.listener != from {
		p.mu.Unlock()
		l.reset()
		return
	}
	p.links[l] = struct{}{}
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.links, l)
		p.mu.Unlock()
	}()

	var ways sync.WaitGroup
	ways.Go(func() { p.pump(ctx, l, ToServer, l.client, l.server) })
	ways.Go(func() { p.pump(ctx, l, ToClient, l.server, l.client) })
	ways.Wait()
}

// chunk is what one read gave; err is its end, io.EOF or a failure.
type chunk struct {
	data []byte
	due  time.Time
	err  error
}

// pump moves bytes one way. Reading and writing are apart so that a delay adds
// to latency without taking from throughput.
func (p *Proxy) pump(ctx context.Context, l *link, d Direction, src, dst *net.TCPConn) {
	// Full when the far side is slow or held: then reading waits, the sender's
	// TCP window closes, and memory stays bounded.
	chunks := make(chan chunk, 64)
	var reader sync.WaitGroup
	reader.Go(func() { p.read(ctx, src, chunks) })
	defer reader.Wait()

	for c := range chunks {
		if !p.await(ctx, d, c.due) {
			return
		}
		if len(c.data) > 0 {
			if _, err := dst.Write(c.data); err != nil {
				l.reset()
				return
			}
		}
		switch {
		case errors.Is(c.err, io.EOF):
			_ = dst.CloseWrite()
		case c.err != nil:
			l.reset()
		}
	}
}

func (p *Proxy) read(ctx context.Context, src *net.TCPConn, chunks chan<- chunk) {
	defer close(chunks)
	for {
		buf := make([]byte, 32<<10)
		n, err := src.Read(buf)
		p.mu.Lock()
		due := time.Now().Add(p.delay)
		p.mu.Unlock()
		select {
		case chunks <- chunk{data: buf[:n], due: due, err: err}:
		case <-ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}

// await returns true when bytes going d that are due at the given time may be
// delivered, false when the connection ended first.
func (p *Proxy) await(ctx context.Context, d Direction, due time.Time) bool {
	if wait := time.Until(due); wait > 0 {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return false
		}
	}
	for {
		p.mu.Lock()
		held, changed := p.held&d != 0, p.changed
		p.mu.Unlock()
		if !held {
			return ctx.Err() == nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// link is one proxied connection.
type link struct {
	client, server *net.TCPConn
	cancel         context.CancelFunc
}

// reset ends both sides with a TCP reset, as a broken link does.
func (l *link) reset() {
	l.cancel()
	_ = l.client.SetLinger(0)
	_ = l.server.SetLinger(0)
	l.close()
}

func (l *link) close() {
	_ = l.client.Close()
	_ = l.server.Close()
}
