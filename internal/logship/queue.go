package logship

import (
	"errors"
	"io"
)

// refillBytes is how much of a spool file is read into memory at a time.
const refillBytes = 1 << 20

// queue holds the encoded chunks of a log that Redis has not accepted, the oldest first. Everything unsent is either
// in mem alone, or, once there is a spool, all of it is in the file and mem is a window on its oldest part. So a spool
// file is complete whenever its agent dies. The Log's lock guards it.
type queue struct {
	l     *Log
	mem   [][]byte
	bytes int
	spool *spool
	extra [][]byte // small chunks that have to be kept even when memory and disk are full, sent last
}

func (q *queue) empty() bool { return len(q.mem) == 0 && q.spoolRead() && len(q.extra) == 0 }

func (q *queue) spoolRead() bool { return q.spool == nil || q.spool.read == q.spool.write }

// push adds a chunk. It fails only when memory is full and the disk refuses.
func (q *queue) push(b []byte) error {
	s := q.l.s
	if q.spool == nil {
		fits := q.bytes+len(b) <= s.cfg.MemoryPerAttempt && int(s.memory.Load())+len(b) <= s.cfg.MemoryTotal
		if fits && !q.l.stopped {
			q.add(b)
			return nil
		}
		if err := q.spill(); err != nil {
			return err
		}
	}
	return q.spool.append(b)
}

// fits reports whether n more bytes are within the limits; the disk may still refuse them.
func (q *queue) fits(n int) bool {
	s := q.l.s
	if q.spool == nil && q.bytes+n <= s.cfg.MemoryPerAttempt && int(s.memory.Load())+n <= s.cfg.MemoryTotal {
		return true
	}
	if q.spool == nil {
		n += q.bytes // it is spooled first
	}
	return s.spooled.Load()+int64(n) <= s.cfg.SpoolLimit
}

// force adds a small chunk behind all others whatever the limits say.
func (q *queue) force(b []byte) {
	if q.push(b) != nil {
		q.extra = append(q.extra, b)
	}
}

func (q *queue) add(b []byte) {
	q.mem = append(q.mem, b)
	q.bytes += len(b)
	q.l.s.memory.Add(int64(len(b)))
}

// spill makes the spool and writes all that is in memory into it; mem stays as the window on it.
func (q *queue) spill() error {
	if q.spool != nil {
		return nil
	}
	p, err := q.l.s.newSpool(q.l.a.Task, q.l.a.Attempt, ".spool")
	if err != nil {
		return err
	}
	for _, b := range q.mem {
		if err := p.append(b); err != nil {
			p.remove()
			return err
		}
	}
	p.read = p.write
	q.spool = p
	return nil
}

// window returns the oldest chunks, at least one if there is any, up to limit bytes.
func (q *queue) window(limit int) [][]byte {
	if len(q.mem) == 0 {
		q.refill()
	}
	size, n := 0, 0
	for n < len(q.mem) && (n == 0 || size+len(q.mem[n]) <= limit) {
		size += len(q.mem[n])
		n++
	}
	return q.mem[:n:n]
}

func (q *queue) refill() {
	for q.spool != nil && q.bytes < refillBytes {
		b, err := q.spool.next()
		if err != nil {
			if !errors.Is(err, io.EOF) {
				q.l.spoolBroken(err)
			}
			break
		}
		q.add(b)
	}
	if len(q.mem) == 0 {
		for _, b := range q.extra {
			q.add(b)
		}
		q.extra = nil
	}
}

// pop removes the n oldest chunks, which were accepted, and the spool when nothing is left in it.
func (q *queue) pop(n int) {
	for _, b := range q.mem[:n] {
		q.bytes -= len(b)
		q.l.s.memory.Add(-int64(len(b)))
	}
	q.mem = q.mem[n:]
	if len(q.mem) == 0 {
		q.mem = nil // or the array would be kept for ever
		if q.spool != nil && q.spoolRead() {
			q.spool.remove()
			q.spool = nil
		}
	}
}

// abandon leaves what is unsent on disk and forgets it.
func (q *queue) abandon() error {
	if q.empty() {
		return nil
	}
	err := q.spill()
	for _, b := range q.extra {
		if err == nil {
			err = q.spool.append(b)
		}
	}
	if q.spool != nil {
		err = errors.Join(err, q.spool.keep())
	}
	q.l.s.memory.Add(-int64(q.bytes))
	q.mem, q.bytes, q.spool, q.extra = nil, 0, nil, nil
	return err
}
