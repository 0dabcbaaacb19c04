package logsink

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"time"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

const (
	pieceBytes  = 256 << 10 // most output in one piece
	pageRecords = 256
	// lookAgain is how often a reader looks for what another logsink wrote. For logs that come through us it is woken.
	lookAgain = 200 * time.Millisecond
)

// reading is one read of the log of an attempt.
type reading struct {
	s      *Service
	a      *attemptLog
	stream uint32
	follow bool
	emit   func(*millracev1.ReadLogsResponse) error

	sequence uint64 // next chunk to look at
	offset   uint64 // everything before it was given out or skipped
}

// find opens the log of an attempt; with follow it waits until there is one.
func (s *Service) find(ctx context.Context, key attemptKey, follow bool) (*attemptLog, error) {
	for {
		appeared, stop := s.table.appear(key.task)
		a, err := s.table.existing(key, "")
		if err == nil || !errors.Is(err, fs.ErrNotExist) || !follow {
			stop()
			return a, err
		}
		timer := time.NewTimer(s.patience(key.task))
		select {
		case <-appeared:
		case <-timer.C:
		case <-ctx.Done():
			err = ctx.Err()
		}
		timer.Stop()
		stop()
		if ctx.Err() != nil {
			return nil, err
		}
	}
}

// patience is how long to wait for an event before looking at the disk.
func (s *Service) patience(task string) time.Duration {
	if l := s.leases.Load(); l != nil && l.holds(task) {
		return 5 * time.Second
	}
	return lookAgain
}

// run gives out pieces from the present position to the end of what there is, or with follow to the end of the log.
// The last piece has no data: it tells how complete the log is, and whether it has ended.
func (r *reading) run(ctx context.Context) error {
	for {
		r.a.mu.Lock()
		next, limit, changed, view := r.a.next, r.a.bytes, r.a.changed, r.a.viewLocked()
		ended := r.a.end != nil && r.a.next >= r.a.end.GetChunks()
		r.a.mu.Unlock()
		if err := r.upTo(ctx, next, limit); err != nil {
			return err
		}
		if ended || !r.follow {
			return r.emit(&millracev1.ReadLogsResponse{Attempt: r.a.key.attempt, Offset: r.offset, End: ended, Log: view})
		}
		patience := r.s.patience(r.a.key.task)
		timer := time.NewTimer(patience)
		select {
		case <-changed:
		case <-timer.C:
			if patience == lookAgain {
				if err := r.a.refresh(); err != nil {
					timer.Stop()
					return err
				}
			}
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
		timer.Stop()
	}
}

// upTo gives out all chunks before next, which end at limit.
func (r *reading) upTo(ctx context.Context, next, limit uint64) error {
	var run record // chunks that follow each other and belong to one stream
	flush := func() error {
		err := r.give(run)
		run = record{}
		return err
	}
	for r.sequence < next && ctx.Err() == nil {
		page, err := r.a.page(r.sequence, min(next, r.sequence+pageRecords))
		if err != nil {
			return err
		}
		for _, rec := range page {
			r.sequence++
			if rec.size == 0 {
				continue // was given up
			}
			if run.size > 0 && rec.stream == run.stream && rec.offset == run.end() && uint64(run.size)+uint64(rec.size) <= pieceBytes {
				run.size += rec.size
				continue
			}
			if err := flush(); err != nil {
				return err
			}
			run = rec
		}
		if err := flush(); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return r.hole(limit)
}

// give gives out the bytes of a record that come after the present position.
func (r *reading) give(rec record) error {
	if rec.size == 0 {
		return nil
	}
	if err := r.hole(rec.offset); err != nil {
		return err
	}
	if r.stream != 0 && rec.stream != 0 && uint32(rec.stream) != r.stream {
		r.offset = max(r.offset, rec.end())
		return nil
	}
	for r.offset < rec.end() {
		data := make([]byte, min(rec.end()-r.offset, pieceBytes))
		if _, err := r.a.data.ReadAt(data, int64(r.offset)); err != nil {
			return fmt.Errorf("read the log of task %s at byte %d: %w", r.a.key, r.offset, err)
		}
		piece := &millracev1.ReadLogsResponse{Attempt: r.a.key.attempt, Offset: r.offset, Data: data, Stream: uint32(rec.stream)}
		if err := r.emit(piece); err != nil {
			return err
		}
		r.offset += uint64(len(data))
	}
	return nil
}

// hole stands for bytes that never came. What it gives out is never longer than they are, so that a reader that resumes
// behind it loses nothing.
func (r *reading) hole(to uint64) error {
	if r.offset >= to {
		return nil
	}
	missing := to - r.offset
	text := fmt.Appendf(nil, "\n[millrace: %d bytes are missing here]\n", missing)
	if uint64(len(text)) > missing {
		text = bytes.Repeat([]byte("?"), int(missing))
	}
	piece := &millracev1.ReadLogsResponse{Attempt: r.a.key.attempt, Offset: r.offset, Data: text}
	r.offset = to
	return r.emit(piece)
}

// page reads the records from to before end; one that is not there has size 0.
func (a *attemptLog) page(from, end uint64) ([]record, error) {
	buf := make([]byte, (end-from)*recordSize)
	n, err := a.index.ReadAt(buf, recordPlace(from))
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read the index of the log of task %s: %w", a.key, err)
	}
	records := make([]record, end-from)
	for i := range records {
		if (i+1)*recordSize <= n {
			records[i], _ = decodeRecord(buf[i*recordSize:])
		}
	}
	return records, nil
}

// seek moves to a byte of the log.
func (r *reading) seek(offset uint64) error {
	r.a.mu.Lock()
	next := r.a.next
	r.a.mu.Unlock()
	r.offset = offset
	for r.sequence < next {
		end := min(next, r.sequence+pageRecords)
		page, err := r.a.page(r.sequence, end)
		if err != nil {
			return err
		}
		for i, rec := range page {
			if rec.size > 0 && rec.end() > offset {
				r.sequence += uint64(i)
				return nil
			}
		}
		r.sequence = end
	}
	return nil
}

// tailFrom finds where the last lines of what is there begin, in the given stream.
func (r *reading) tailFrom(lines uint64) (offset uint64, err error) {
	r.a.mu.Lock()
	sequence, start := r.a.next, r.a.bytes
	r.a.mu.Unlock()
	if lines == 0 {
		return start, nil
	}
	last := true // the newline at the very end ends the last line and begins none
	for sequence > 0 {
		from := sequence - min(sequence, pageRecords)
		page, err := r.a.page(from, sequence)
		if err != nil {
			return 0, err
		}
		for _, rec := range slices.Backward(page) {
			if rec.size == 0 || r.stream != 0 && rec.stream != 0 && uint32(rec.stream) != r.stream {
				continue
			}
			data := make([]byte, rec.size)
			if _, err := r.a.data.ReadAt(data, int64(rec.offset)); err != nil {
				return 0, fmt.Errorf("read the log of task %s: %w", r.a.key, err)
			}
			for j, b := range slices.Backward(data) {
				if b == '\n' && !last {
					if lines--; lines == 0 {
						return rec.offset + uint64(j) + 1, nil
					}
				}
				last = false
			}
			start = rec.offset
		}
		sequence = from
	}
	return start, nil
}
