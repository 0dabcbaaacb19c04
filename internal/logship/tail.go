package logship

import (
	"errors"
	"fmt"
	"log/slog"

	"google.golang.org/protobuf/proto"

	"github.com/millrace/millrace/internal/logkey"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// tail keeps the last part of an output that is longer than its limit, in a few files of which the oldest is deleted
// when a new one is begun. Its chunks carry their offset in the task's whole output; their place in the log is known
// only at the end, when it is known how much was left out. Where the head ended is in each file's
// name, and where the file begins, so that another agent can give the same chunks the same places.
type tail struct {
	l        *Log
	chunkMax int
	fileMax  uint64
	start    uint64 // where it begins in the whole output
	raw      uint64 // where the next chunk begins in the whole output
	headEnd  uint64 // bytes in the log before it
	headSeq  uint64 // chunks in the log before it
	segments []*segment
	broken   bool // the disk refuses: what comes now is left out
}

type segment struct {
	*spool
	size uint64 // bytes of output in it
}

const tailSegments = 4

func newTail(l *Log) *tail {
	per := l.tailMax / tailSegments
	return &tail{
		l: l, fileMax: per, chunkMax: int(min(uint64(l.s.cfg.ChunkBytes), per)),
		start: l.raw, raw: l.raw, headEnd: l.offset, headSeq: l.sequence,
	}
}

// add takes a chunk whose output is Size bytes.
func (t *tail) add(c *millracev1.LogChunk) {
	size := c.GetSize()
	c.Offset = t.raw
	t.raw += size
	last := t.last()
	if last == nil || last.size+size > t.fileMax {
		if last = t.rotate(c.GetOffset()); last == nil {
			return
		}
	}
	if err := last.append(encode(c)); err != nil {
		t.fail(err)
		return
	}
	t.broken = false
	last.size += size
}

func (t *tail) last() *segment {
	if len(t.segments) == 0 {
		return nil
	}
	return t.segments[len(t.segments)-1]
}

// rotate begins a file with the output from that offset on.
func (t *tail) rotate(from uint64) *segment {
	if len(t.segments) == tailSegments {
		t.segments[0].remove()
		t.segments = t.segments[1:]
	}
	p, err := t.l.s.newSpool(t.l.a.Task, t.l.a.Attempt, fmt.Sprintf("@%d@%d@%d@%d.tail", t.start, t.headEnd, t.headSeq, from))
	if err != nil {
		t.fail(err)
		return nil
	}
	seg := &segment{spool: p}
	t.segments = append(t.segments, seg)
	return seg
}

func (t *tail) fail(err error) {
	if !t.broken {
		t.l.s.log.Error("log output is dropped, because it cannot be spooled", slog.String(logkey.Task, t.l.a.Task), slog.Any(logkey.Err, err))
	}
	t.broken = true
}

// replay calls keep for each chunk with its output and the number of bytes left out in front of it, and for a gap at
// the end with a nil chunk.
func (t *tail) replay(end uint64, keep func(c *millracev1.LogChunk, data []byte, gap uint64)) error {
	at := t.start
	var errs []error
	for _, seg := range t.segments {
		for seg.read < seg.write {
			b, err := seg.next()
			if err == nil {
				err = replayRecord(b, &at, keep)
			}
			if err != nil {
				errs = append(errs, err)
				break
			}
		}
	}
	if gap := end - min(end, at); gap > 0 {
		keep(nil, nil, gap)
	}
	return errors.Join(errs...)
}

func replayRecord(b []byte, at *uint64, keep func(c *millracev1.LogChunk, data []byte, gap uint64)) error {
	var c millracev1.LogChunk
	if err := proto.Unmarshal(b, &c); err != nil {
		return fmt.Errorf("decode a chunk: %w", err)
	}
	data, err := output(&c)
	if err != nil {
		return err
	}
	gap := c.GetOffset() - min(c.GetOffset(), *at)
	*at = c.GetOffset() + c.GetSize()
	keep(&c, data, gap)
	return nil
}

func (t *tail) remove() {
	for _, seg := range t.segments {
		seg.remove()
	}
}

func (t *tail) keep() error {
	var errs []error
	for _, seg := range t.segments {
		errs = append(errs, seg.spool.keep())
	}
	return errors.Join(errs...)
}
