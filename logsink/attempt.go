package logsink

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// attemptLog is the open log of one attempt: its data and index files and what is known of them. Chunks may come in any
// order and any number of times; the files end up the same.
type attemptLog struct {
	key    attemptKey
	dir    string
	worker string
	data   *os.File
	index  *os.File

	mu      sync.Mutex
	synced  uint64            // chunks before this one are safe on disk, or were given up
	next    uint64            // first chunk that is missing and may still come
	bytes   uint64            // where it begins
	count   uint64            // chunks that are there
	written uint64            // bytes that are there
	ahead   map[uint64]record // chunks beyond next that are there
	end     *millracev1.LogEnd
	gap     time.Time     // since when something is missing in front of what came; zero when nothing is
	changed chan struct{} // closed at the next change

	// Guarded by the table's lock.
	refs int
	used uint64
}

// openAttempt opens the files of an attempt. With a worker it makes them when they are missing; without, that is
// fs.ErrNotExist.
func openAttempt(key attemptKey, dir, worker string) (*attemptLog, error) {
	flags := os.O_RDWR
	if worker != "" {
		flags |= os.O_CREATE
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return nil, err
		}
	}
	data, err := os.OpenFile(filepath.Join(dir, dataName(key.attempt)), flags, 0o640)
	if err != nil {
		return nil, err
	}
	index, err := os.OpenFile(filepath.Join(dir, indexName(key.attempt)), flags, 0o640)
	if err != nil {
		return nil, errors.Join(err, data.Close())
	}
	a := &attemptLog{key: key, dir: dir, data: data, index: index, ahead: map[uint64]record{}, changed: make(chan struct{})}
	if err := a.load(worker); err != nil {
		return nil, errors.Join(fmt.Errorf("open the log of task %s: %w", key, err), a.close())
	}
	return a, nil
}

func (a *attemptLog) load(worker string) error {
	info, err := a.index.Stat()
	if err != nil {
		return err
	}
	if info.Size() < headerSize {
		// New, or its maker died before the header was whole; nothing was acknowledged before that.
		if worker == "" {
			return fs.ErrNotExist
		}
		if _, err := a.index.WriteAt(newHeader(worker), 0); err != nil {
			return err
		}
	}
	h, err := readHeader(a.index)
	if err != nil {
		return err
	}
	a.worker, a.synced, a.end = h.worker, h.synced, h.end
	return a.refreshLocked()
}

// refresh looks for what another process wrote.
func (a *attemptLog) refresh() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.refreshLocked()
}

func (a *attemptLog) refreshLocked() error {
	next, ended := a.next, a.end != nil
	buf := make([]byte, 256*recordSize)
	sequence := a.next
	for {
		n, err := a.index.ReadAt(buf, recordPlace(sequence))
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		for i := 0; i+recordSize <= n; i += recordSize {
			if r, ok := decodeRecord(buf[i:]); ok {
				a.place(sequence, r)
			}
			sequence++
		}
		if err != nil || n < len(buf) {
			break
		}
	}
	if a.end == nil {
		h, err := readHeader(a.index)
		if err != nil {
			return err
		}
		a.end = h.end
	}
	if a.next != next || (a.end != nil) != ended {
		a.wake()
	}
	a.watchGap()
	return nil
}

func (a *attemptLog) record(sequence uint64) (record, bool, error) {
	var b [recordSize]byte
	if _, err := a.index.ReadAt(b[:], recordPlace(sequence)); err != nil {
		if errors.Is(err, io.EOF) {
			return record{}, false, nil
		}
		return record{}, false, err
	}
	r, ok := decodeRecord(b[:])
	return r, ok, nil
}

// place takes note of a chunk that is on disk; with mu held. What is missing below synced was given up by whoever wrote
// that, and is passed.
func (a *attemptLog) place(sequence uint64, r record) {
	if _, dup := a.ahead[sequence]; dup || sequence < a.next {
		return
	}
	a.count++
	a.written += uint64(r.size)
	if sequence > a.next && sequence > a.synced {
		a.ahead[sequence] = r
		return
	}
	a.next = sequence
	for ok := true; ok; r, ok = a.ahead[a.next] {
		delete(a.ahead, a.next)
		a.bytes = r.end()
		a.next++
	}
}

// giveUp passes what is missing before the next chunk that is there, or before the end, and reports how many bytes
// that were. A chunk that comes later all the same is still written.
func (a *attemptLog) giveUp() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.overdue() {
		return 0
	}
	from := a.bytes
	if len(a.ahead) > 0 {
		a.next = slices.Min(slices.Collect(maps.Keys(a.ahead)))
		a.bytes = a.ahead[a.next].offset
		missing := a.bytes - min(from, a.bytes)
		r := a.ahead[a.next]
		delete(a.ahead, a.next)
		a.count--
		a.written -= uint64(r.size)
		a.place(a.next, r)
		a.gap = time.Time{}
		a.watchGap()
		a.wake()
		return missing
	}
	missing := a.end.GetTotalBytes() - min(from, a.end.GetTotalBytes())
	a.next, a.bytes = a.end.GetChunks(), a.end.GetTotalBytes()
	a.gap = time.Time{}
	a.wake()
	return missing
}

// write puts a chunk, whose output is data, where it belongs.
func (a *attemptLog) write(c *millracev1.LogChunk, data []byte) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c.GetEnd() != nil {
		if a.end == nil {
			if err := writeEnd(a.index, c.GetEnd()); err != nil {
				return err
			}
			a.end = c.GetEnd()
			a.wake()
			a.watchGap()
		}
		return nil
	}
	known := c.GetSequence() < a.next
	if known {
		_, present, err := a.record(c.GetSequence())
		if err != nil {
			return err
		}
		if present && c.GetSequence() < a.synced {
			return nil // a repeat of what is safe; what is not yet safe is written again
		}
		known = present
	}
	r := record{
		offset: c.GetOffset(), size: uint32(len(data)), stream: uint8(c.GetStream()),
		dropped: c.GetDropped() > 0, at: c.GetAt().AsTime(),
	}
	if _, err := a.data.WriteAt(data, int64(r.offset)); err != nil {
		return err
	}
	b := r.encode()
	if _, err := a.index.WriteAt(b[:], recordPlace(c.GetSequence())); err != nil {
		return err
	}
	if c.GetSequence() < a.next {
		if !known { // it was given up
			a.count++
			a.written += uint64(r.size)
			a.wake()
		}
		return nil
	}
	a.place(c.GetSequence(), r)
	a.watchGap()
	a.wake()
	return nil
}

// wake tells all readers that something changed; with mu held.
func (a *attemptLog) wake() {
	close(a.changed)
	a.changed = make(chan struct{})
}

// watchGap notes since when something is missing; with mu held.
func (a *attemptLog) watchGap() {
	missing := len(a.ahead) > 0 || a.end != nil && a.next < a.end.GetChunks()
	switch {
	case !missing:
		a.gap = time.Time{}
	case a.gap.IsZero():
		a.gap = time.Now() // monotonic
	}
}

// syncing returns the number of chunks that a sync started now makes safe.
func (a *attemptLog) syncing() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.next
}

// syncDone takes note that the first chunks are safe.
func (a *attemptLog) syncDone(chunks uint64) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if chunks <= a.synced {
		return nil
	}
	if err := writeSynced(a.index, chunks); err != nil {
		return err
	}
	a.synced = chunks
	return nil
}

// sync makes what was written safe.
func (a *attemptLog) sync() error {
	return errors.Join(a.data.Sync(), a.index.Sync())
}

func (a *attemptLog) close() error {
	return errors.Join(a.data.Close(), a.index.Close())
}

// view tells how complete the log is.
func (a *attemptLog) view() *millracev1.LogView {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.viewLocked()
}

func (a *attemptLog) viewLocked() *millracev1.LogView {
	v := &millracev1.LogView{Bytes: a.written}
	if a.end == nil {
		return v
	}
	v.DroppedBytes = a.end.GetDroppedBytes()
	v.Complete = a.count >= a.end.GetChunks()
	if v.Complete {
		return v
	}
	missing := a.end.GetTotalBytes() - min(a.end.GetTotalBytes(), a.written)
	if a.next >= a.end.GetChunks() {
		v.MissingBytes = missing
	} else {
		v.PendingBytes = missing
	}
	return v
}

// finished reports whether nothing more is waited for.
func (a *attemptLog) finished() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.end != nil && a.next >= a.end.GetChunks()
}

// gapHold is how long a missing chunk is waited for before readers pass it with a marker. Chunks of an attempt come in
// order, so one that is late is most likely lost; but a spool of a dead agent may be sent by two in turn.
const gapHold = 5 * time.Second

// overdue reports whether what is missing was waited for long enough; with mu held.
func (a *attemptLog) overdue() bool { return !a.gap.IsZero() && time.Since(a.gap) >= gapHold }
