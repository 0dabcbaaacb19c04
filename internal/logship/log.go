package logship

import (
	"crypto/sha256"
	"errors"
	"hash"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/logkey"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// Attempt says whose output a Log takes.
type Attempt struct {
	// Task is its id, already checked.
	Task string
	// Attempt is its number.
	Attempt uint32
	// Worker runs it.
	Worker string
	// Date of its start in UTC, as YYYY-MM-DD.
	Date string
	// LimitBytes is kept, head and tail; 0 means the Shipper's.
	LimitBytes uint64
	// Split says that streams 1 and 2 are written instead of 0. It changes nothing here, but tells readers of the code
	// that chunks end where the stream changes.
	Split bool
	// ElideEmpty leaves out the end record when nothing was ever written. Whoever sets it writes a LogView that is
	// complete with 0 bytes into the task's record when the attempt ends; then readers know that there is nothing to
	// wait for, and an attempt without output costs no log entry at all.
	ElideEmpty bool
	// Filter, if set, is put in front of each stream, for example to mask secrets. Its Close is called before the end
	// of the log and has to write what it held back.
	Filter func(stream uint32, w io.Writer) io.WriteCloser
}

// Log takes the output of one attempt. All methods are safe for concurrent use.
type Log struct {
	s       *Shipper
	a       Attempt
	headMax uint64 // bytes sent as they come; what follows is cut to its tail
	tailMax uint64 // bytes of the tail

	filterMu sync.Mutex // locked before mu
	filters  map[uint32]io.WriteCloser

	mu       sync.Mutex
	buf      []byte // output that is not in a chunk yet
	stream   uint32 // of buf
	since    time.Time
	sealed   time.Time
	timer    *time.Timer // flushes buf; nil while there is nothing to flush
	q        queue
	started  bool   // the Shipper knows it
	shard    *shard // nil before the first chunk
	ready    bool   // the shard's sender knows that there is something
	sequence uint64 // of the next chunk
	offset   uint64 // of the next chunk
	input    uint64 // bytes taken from the task
	raw      uint64 // of them, bytes that were made into chunks, kept or not
	sum      hash.Hash
	lost     uint64 // bytes dropped since the last chunk, because memory and disk were full
	dropped  uint64 // bytes dropped in all
	tail     *tail  // set once headMax is reached
	closed   bool   // no more output
	ended    bool   // the end record is in q, or left out
	stopped  bool   // the Shipper is gone
}

// Open starts the log of an attempt. It costs nothing until the first byte.
func (s *Shipper) Open(a Attempt) *Log {
	l := &Log{s: s, a: a}
	l.q.l = l
	limit := a.LimitBytes
	if limit == 0 {
		limit = s.cfg.LimitBytes
	}
	limit = max(limit, 4<<10)
	l.tailMax = min(limit/2, 16<<20)
	l.headMax = limit - l.tailMax - 2*markerMax
	return l
}

// Writer returns the place to write a stream's output: 0 both in one pipe, 1 stdout, 2 stderr. A write takes as long as
// copying, or writing to the local disk when Redis is behind; it never waits for the network and never fails.
func (l *Log) Writer(stream uint32) io.Writer {
	w := streamWriter{l, stream}
	if l.a.Filter == nil {
		return w
	}
	l.filterMu.Lock()
	defer l.filterMu.Unlock()
	f := l.filters[stream]
	if f == nil {
		f = l.a.Filter(stream, w)
		if l.filters == nil {
			l.filters = map[uint32]io.WriteCloser{}
		}
		l.filters[stream] = f
	}
	return f
}

type streamWriter struct {
	l      *Log
	stream uint32
}

func (w streamWriter) Write(p []byte) (int, error) {
	l := w.l
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		// A process that outlived its attempt: its pipe is drained, its output belongs to nobody.
		return len(p), nil
	}
	if len(p) > 0 {
		l.start()
		l.input += uint64(len(p))
		l.take(w.stream, p)
		l.schedule()
	}
	return len(p), nil
}

// start makes the log known to the shipper; with mu held.
func (l *Log) start() {
	if l.started {
		return
	}
	l.started = true
	l.sum = sha256.New()
	l.s.mu.Lock()
	l.s.open[l] = struct{}{}
	l.s.mu.Unlock()
}

// take cuts p into chunks; with mu held.
func (l *Log) take(stream uint32, p []byte) {
	for len(p) > 0 {
		if len(l.buf) > 0 && l.stream != stream {
			l.seal()
		}
		room := l.room()
		if room == 0 {
			l.seal()
			if l.tail == nil && l.offset >= l.headMax {
				l.tail = newTail(l)
			}
			continue
		}
		if len(l.buf) == 0 {
			l.stream, l.since = stream, time.Now()
		}
		n := min(room, len(p))
		l.buf = append(l.buf, p[:n]...)
		p = p[n:]
	}
}

// room is how much more fits into the present chunk.
func (l *Log) room() int {
	if l.tail != nil {
		return l.tail.chunkMax - len(l.buf)
	}
	room := l.s.cfg.ChunkBytes - len(l.buf)
	if left := l.headMax - min(l.headMax, l.offset+uint64(len(l.buf))); left < uint64(room) {
		room = int(left)
	}
	return room
}

// schedule arms the flush; with mu held. The first output after a silence is sent soon, more of it in FlushInterval.
func (l *Log) schedule() {
	if len(l.buf) == 0 || l.timer != nil || l.tail != nil {
		return
	}
	wait := max(l.s.cfg.Linger, l.s.cfg.FlushInterval-time.Since(l.sealed))
	l.timer = time.AfterFunc(wait, l.flush)
}

func (l *Log) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopTimer()
	if l.tail == nil {
		l.seal()
	}
}

func (l *Log) stopTimer() {
	if l.timer != nil {
		l.timer.Stop()
		l.timer = nil
	}
}

// seal makes a chunk of buf; with mu held.
func (l *Log) seal() {
	if len(l.buf) == 0 {
		return
	}
	data, at := l.buf, l.since
	l.sealed = time.Now()
	l.raw += uint64(len(data))
	c := l.chunk(l.stream, data, at)
	if l.tail != nil {
		l.tail.add(c)
	} else {
		l.keep(c, data)
	}
	l.buf = l.buf[:0]
}

// keep gives c, whose output is data, its place and queues it; with mu held.
func (l *Log) keep(c *millracev1.LogChunk, data []byte) {
	// The marker only goes in together with output behind it, or a spool at its limit would fill up with markers.
	if l.lost > 0 && !(l.q.fits(len(data)+markerRoom) && l.mark(l.lost)) {
		l.lost += uint64(len(data))
		l.drop(uint64(len(data)))
		return
	}
	c.Sequence, c.Offset = l.sequence, l.offset
	if err := l.q.push(encode(c)); err != nil {
		if l.lost == 0 {
			l.s.log.Error("log output is dropped, because it cannot be spooled",
				slog.String(logkey.Task, l.a.Task), slog.Uint64(logkey.Attempt, uint64(l.a.Attempt)), slog.Any(logkey.Err, err))
		}
		l.lost += uint64(len(data))
		l.drop(uint64(len(data)))
		return
	}
	l.placed(data)
	l.announce()
}

// mark queues the line that tells how many bytes were left out, and reports whether it could.
func (l *Log) mark(dropped uint64) bool {
	text := dropMarker(dropped)
	c := l.chunk(0, text, time.Now())
	c.Sequence, c.Offset, c.Dropped = l.sequence, l.offset, dropped
	if l.q.push(encode(c)) != nil {
		return false
	}
	l.lost = 0
	l.placed(text)
	l.announce()
	return true
}

func (l *Log) placed(data []byte) {
	_, _ = l.sum.Write(data) // a hash never fails
	l.sequence++
	l.offset += uint64(len(data))
}

func (l *Log) drop(n uint64) {
	l.dropped += n
	l.s.metrics.dropped.Add(float64(n))
}

// announce tells the sender that there is something; with mu held.
func (l *Log) announce() {
	if l.ready || l.stopped {
		return
	}
	if l.shard == nil {
		l.shard = l.s.shardFor(l.a.Task)
	}
	if l.shard != nil {
		l.ready = true
		l.shard.add(l)
	}
}

// Close ends the log: what filters held back and an end record with totals and checksum are queued. It does not wait
// for Redis. It reports whether the end record was left out because nothing was written and ElideEmpty was set.
func (l *Log) Close() (elided bool) {
	l.filterMu.Lock()
	for _, f := range l.filters {
		if err := f.Close(); err != nil {
			l.s.log.Warn("a log filter could not write what it held back, the end of the log may be missing",
				slog.String(logkey.Task, l.a.Task), slog.Any(logkey.Err, err))
		}
	}
	l.filters = nil
	l.filterMu.Unlock()

	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.closed = true
	if l.input == 0 && l.a.ElideEmpty {
		l.ended = true
		return true
	}
	l.start()
	l.stopTimer()
	l.seal()
	l.buf = nil
	if l.tail == nil {
		l.end()
		return false
	}
	// Moving a tail of some MiB must not hold up the end of the task.
	if !l.s.goFinish(l.finishTail) {
		l.finishTailLocked()
	}
	return false
}

func (l *Log) finishTail() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.finishTailLocked()
}

func (l *Log) finishTailLocked() {
	if l.tail == nil || l.stopped {
		return
	}
	err := l.tail.replay(l.input, func(c *millracev1.LogChunk, data []byte, gap uint64) {
		if gap > 0 {
			l.drop(gap)
			l.lost += gap
		}
		if c != nil {
			l.keep(c, data)
		}
	})
	if err != nil {
		l.s.log.Error("the tail of a log is damaged, part of it is left out", slog.String(logkey.Task, l.a.Task), slog.Any(logkey.Err, err))
	}
	l.tail.remove()
	l.tail = nil
	l.end()
}

// end queues the end record; with mu held.
func (l *Log) end() {
	if l.lost > 0 {
		l.forceMark()
	}
	c := l.chunk(0, nil, time.Now())
	c.Sequence, c.Offset = l.sequence, l.offset
	c.End = &millracev1.LogEnd{TotalBytes: l.offset, DroppedBytes: l.dropped, Sha256: l.sum.Sum(nil), Chunks: l.sequence}
	l.q.force(encode(c))
	l.ended = true
	l.announce()
}

func (l *Log) forceMark() {
	text := dropMarker(l.lost)
	c := l.chunk(0, text, time.Now())
	c.Sequence, c.Offset, c.Dropped = l.sequence, l.offset, l.lost
	l.q.force(encode(c))
	l.lost = 0
	l.placed(text)
}

// idle reports whether nothing is left to send now.
func (l *Log) idle() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.q.empty() && (!l.closed || l.ended)
}

// abandon leaves everything unsent in the spool.
func (l *Log) abandon() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopTimer()
	var err error
	if l.tail != nil {
		l.seal()
		err = l.tail.keep()
		l.tail = nil
	} else {
		l.seal()
	}
	l.stopped, l.closed = true, true
	return errors.Join(err, l.q.abandon())
}

// spoolBroken is called by the queue when its file cannot be read back. What is in it was given a place already, so it
// shows as missing in the log.
func (l *Log) spoolBroken(err error) {
	l.s.log.Error("the log spool cannot be read back, output is missing",
		slog.String(logkey.Task, l.a.Task), slog.Uint64(logkey.Attempt, uint64(l.a.Attempt)), slog.Any(logkey.Err, err))
	l.q.spool.read = l.q.spool.write
}
