package control

import (
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// connPair is a conn and the bare other end of its connection.
func connPair(t *testing.T, lim limits) (*conn, net.Conn) {
	t.Helper()
	lc := net.ListenConfig{}
	ln, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	d := net.Dialer{}
	far, err := d.DialContext(t.Context(), "tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	near, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c := newConn(near, near, newMetrics(nil, sideServer), lim)
	t.Cleanup(func() { c.close(); _ = far.Close() })
	return c, far
}

// Frames go out inline, through the writer, or begin the one way and end the other. None is lost, torn or overtaken.
func TestSlowReaderGetsEverythingInOrder(t *testing.T) {
	t.Parallel()
	lim := defaultLimits
	lim.queue = 64 << 20
	c, far := connPair(t, lim)
	const senders, each = 4, 2500
	var wg sync.WaitGroup
	for s := range uint32(senders) {
		wg.Go(func() {
			for i := range uint32(each) {
				// Sizes around that of a socket buffer's free space, now and then a large one.
				reason := strings.Repeat("x", int(i*7919%5000))
				if i%500 == 0 {
					reason = strings.Repeat("y", 300_000)
				}
				if !c.send(&millracev1.ControlKill{TaskId: workerName(int(s)), Attempt: i, Reason: reason}) {
					t.Error("not sent")
					return
				}
			}
		})
	}
	awaitThat(t, "the socket is full", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.pend) > 1<<20
	})
	_ = far.SetReadDeadline(time.Now().Add(3 * patience))
	f := newFrameReader(far, MaxFrame)
	next := map[string]uint32{}
	for n := range senders * each {
		typ, body, err := f.next()
		if err != nil {
			t.Fatalf("after %d frames: %v", n, err)
		}
		m := &millracev1.ControlKill{}
		if err := decode(typ, body, m); err != nil {
			t.Fatal(err)
		}
		if m.GetAttempt() != next[m.GetTaskId()] {
			t.Fatalf("%s: got %d, want %d", m.GetTaskId(), m.GetAttempt(), next[m.GetTaskId()])
		}
		next[m.GetTaskId()]++
		if n%200 == 0 {
			time.Sleep(time.Millisecond)
		}
	}
	wg.Wait()
}

// After a write deadline has passed unused, writing goes on as before.
func TestWriteDeadlineDoesNotLinger(t *testing.T) {
	t.Parallel()
	lim := defaultLimits
	lim.write = 20 * time.Millisecond
	c, far := connPair(t, lim)
	c.inline = nil // through the writer, which sets the deadline
	f := newFrameReader(far, MaxFrame)
	for range 3 {
		if !c.send(&millracev1.ControlPing{}) {
			t.Fatal("not sent")
		}
		if _, _, err := f.next(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * lim.write)
	}
}

// A writer that is stuck gives up after its deadline, even when nobody sends any more.
func TestStuckWriteEnds(t *testing.T) {
	t.Parallel()
	lim := defaultLimits
	lim.write = 100 * time.Millisecond
	lim.queue = 64 << 20
	c, _ := connPair(t, lim)
	for range 64 {
		c.send(&millracev1.ControlDrain{Reason: strings.Repeat("x", 500_000)})
	}
	select {
	case <-c.writerDone:
	case <-time.After(patience):
		t.Fatal("the writer still waits for a peer that does not read")
	}
	if c.send(&millracev1.ControlPing{}) {
		t.Error("sent on a dead connection")
	}
}
