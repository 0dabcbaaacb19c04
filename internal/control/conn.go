package control

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// What every connection keeps to, on both sides.
type limits struct {
	queue        int           // bytes that may wait for a peer that does not read
	write        time.Duration // the longest write
	frame        time.Duration // from the first byte of a frame to its last
	handshakeMax int           // longest frame before the handshake is done
}

var defaultLimits = limits{
	queue:        256 << 10,
	write:        10 * time.Second,
	frame:        10 * time.Second,
	handshakeMax: 64 << 10,
}

// How long the side that hangs up with an ERROR waits for the peer to take notice. Closing at once could reset the
// connection and throw the ERROR away before it was read.
const (
	lingerTime  = 500 * time.Millisecond
	lingerBytes = 256 << 10
)

// conn is one TCP connection of either side. One goroutine, its owner's, reads; one writes; anybody sends.
//
// What the socket takes at once is written by who sends it. The rest gathers in a buffer, and the writer takes all of
// it in one write. A peer that does not read fills the buffer and loses the connection; nobody ever waits for it.
type conn struct {
	nc  net.Conn // what is read and written: perhaps TLS
	raw net.Conn // the socket below: closing it never blocks, closing TLS may
	fr  *frameReader
	met *metrics
	lim limits

	idle     time.Duration // longest silence; 0 during the handshake, which has one deadline for all of it
	deadline time.Time     // of reading, as set last
	midFrame bool          // the deadline is that of a frame in the making
	stopping atomic.Bool   // reading has been told to end

	mu        sync.Mutex
	inline    *inlineWriter // nil with TLS
	writing   bool          // the writer is at it
	pend      []byte        // frames to be written
	spare     []byte        // the buffer written last, to be used again
	finishing bool          // nothing more may be sent; the writer ends when all is written
	dead      bool          // the socket is closed

	wake       chan struct{} // size 1: the writer has something to do
	writerDone chan struct{}
}

// newConn starts the writer; the caller owns the conn and must call close.
func newConn(nc, raw net.Conn, met *metrics, lim limits) *conn {
	c := &conn{
		nc: nc, raw: raw, met: met, lim: lim,
		wake: make(chan struct{}, 1), writerDone: make(chan struct{}),
	}
	c.fr = newFrameReader(nc, lim.handshakeMax)
	c.fr.wait = c.beforeRead
	if nc == raw {
		c.inline = newInlineWriter(raw)
	}
	go c.writeLoop() // ends by close
	return c
}

// handshakeBy gives the whole handshake one deadline.
func (c *conn) handshakeBy(t time.Time) {
	_ = c.nc.SetDeadline(t) // fails only on a closed connection, and then so does the read
	c.deadline = t
}

// established ends the handshake: full frames, and a deadline for each silence.
func (c *conn) established(idle time.Duration) {
	c.fr.limit = MaxFrame
	c.idle = idle
	c.deadline = time.Time{}
}

// beforeRead sets the deadline of the next read. While nothing of a frame has come, it is that of silence; then the
// whole frame has one, which more bytes do not move.
func (c *conn) beforeRead(midFrame bool) error {
	if c.idle > 0 && !(midFrame && c.midFrame) {
		allowed := c.idle
		if midFrame {
			allowed = c.lim.frame
		}
		// Setting a deadline costs more than reading a small frame that is there already: leave one that is nearly right.
		want := time.Now().Add(allowed)
		if off := want.Sub(c.deadline); midFrame != c.midFrame || off > c.idle/16 || off < 0 {
			_ = c.nc.SetReadDeadline(want) // fails only on a closed connection, and then so does the read
			c.deadline = want
		}
		c.midFrame = midFrame
	}
	if c.stopping.Load() {
		return net.ErrClosed
	}
	return nil
}

// next returns the next frame of a known type. The body is valid until the call after it.
func (c *conn) next() (Type, []byte, error) {
	for {
		// A new frame has a new deadline, even when its first bytes came together with the last of the one before.
		c.midFrame = false
		t, body, err := c.fr.next()
		if err != nil {
			return 0, nil, err
		}
		c.met.frameIn(t)
		if t.known() {
			return t, body, nil
		}
	}
}

// send queues m and reports whether the connection is still good. It never blocks.
func (c *conn) send(m Message) bool {
	c.mu.Lock()
	if c.dead || c.finishing {
		c.mu.Unlock()
		return false
	}
	before := len(c.pend)
	pend, err := AppendFrame(c.pend, m)
	if err != nil {
		// Only a message past MaxFrame ends here; the connection is fine, and who sent it falls back to Redis.
		c.mu.Unlock()
		return false
	}
	if before > 0 && len(pend) > c.lim.queue {
		c.mu.Unlock()
		c.met.queueFull.Inc()
		c.abort()
		return false
	}
	if before == 0 && !c.writing && c.inline != nil {
		n := c.inline.write(pend)
		pend = pend[:copy(pend, pend[n:])]
		if len(pend) == 0 && cap(pend) > keepBuffer {
			pend = nil
		}
	}
	c.pend = pend
	wake := before == 0 && len(pend) > 0
	c.mu.Unlock()
	if t, ok := TypeOf(m); ok {
		c.met.out[t].Inc()
	}
	if wake {
		c.wakeWriter()
	}
	return true
}

func (c *conn) wakeWriter() {
	select {
	case c.wake <- struct{}{}:
	default: // it will look anyhow
	}
}

func (c *conn) writeLoop() {
	defer close(c.writerDone)
	for range c.wake {
		if !c.flush() {
			return
		}
	}
}

// flush writes all that is queued and reports whether there may be more to write later.
func (c *conn) flush() bool {
	for {
		c.mu.Lock()
		buf := c.pend
		if c.dead || len(buf) == 0 {
			more := !c.dead && !c.finishing
			c.mu.Unlock()
			return more
		}
		c.pend, c.spare, c.writing = c.spare, nil, true
		allowed := c.lim.write
		if c.finishing {
			allowed = min(allowed, lingerTime)
		}
		c.mu.Unlock()

		_ = c.nc.SetWriteDeadline(time.Now().Add(allowed)) // fails only on a closed connection, and then so does the write
		if _, err := c.nc.Write(buf); err != nil {
			c.abort() // wakes the reader, which reports the end
			return false
		}
		_ = c.nc.SetWriteDeadline(time.Time{}) // one that has passed would stop writing inline
		c.mu.Lock()
		c.writing = false
		if cap(buf) <= keepBuffer {
			c.spare = buf[:0]
		}
		c.mu.Unlock()
	}
}

// finish lets the writer end after what is queued. m, if not nil, is the last frame.
func (c *conn) finish(m *millracev1.ControlError) {
	if m != nil {
		c.send(m)
	}
	c.mu.Lock()
	c.finishing = true
	c.mu.Unlock()
	_ = c.nc.SetWriteDeadline(time.Now().Add(lingerTime)) // also a write that is stuck already
	c.wakeWriter()
}

// stop says goodbye and makes the reader return. Safe from any goroutine.
func (c *conn) stop(m *millracev1.ControlError) {
	c.finish(m)
	c.interrupt()
}

// interrupt makes the reader return.
func (c *conn) interrupt() {
	c.stopping.Store(true)
	_ = c.nc.SetReadDeadline(time.Now())
}

// hangUp tells the peer why, gives it a moment to read that, and closes. Only for the reading goroutine.
func (c *conn) hangUp(code millracev1.ControlErrorCode, text string) {
	c.finish(&millracev1.ControlError{Code: code, Message: text})
	c.linger()
	c.close()
}

// linger waits until all is written and the peer has hung up, but not for long.
func (c *conn) linger() {
	select {
	case <-c.writerDone:
	case <-time.After(lingerTime):
		return // the peer does not read
	}
	if c.stopping.Load() {
		return // a goodbye that gets lost does no harm, and nobody's end should wait for strangers
	}
	if w, ok := c.raw.(interface{ CloseWrite() error }); ok && w.CloseWrite() == nil {
		_ = c.raw.SetReadDeadline(time.Now().Add(lingerTime))
		_, _ = io.CopyN(io.Discard, c.raw, lingerBytes)
	}
}

// abort closes the socket at once. It never blocks and is safe from any goroutine.
func (c *conn) abort() {
	c.mu.Lock()
	was := c.dead
	c.dead = true
	c.pend, c.spare = nil, nil
	c.mu.Unlock()
	if was {
		return
	}
	_ = c.raw.Close() // nothing that could be done about an error
	c.wakeWriter()
}

// close is abort, and waits for the writer.
func (c *conn) close() {
	c.abort()
	<-c.writerDone
}

// ending sorts the error that ended reading: counts it and returns the ERROR that the peer should get, if any.
func (c *conn) ending(err error) *millracev1.ControlError {
	if bad, ok := errors.AsType[*FrameError](err); ok {
		c.met.bad[bad.Kind].Inc()
		return &millracev1.ControlError{
			Code: millracev1.ControlErrorCode_CONTROL_ERROR_CODE_BAD_FRAME, Message: bad.Error(),
		}
	}
	if errors.Is(err, os.ErrDeadlineExceeded) && !c.stopping.Load() {
		c.met.timeouts.Inc()
	}
	return nil
}
