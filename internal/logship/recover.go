package logship

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/store"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// leftoverInterval is how often spools of agents that ended while we run are looked for.
const leftoverInterval = 30 * time.Second

// sendLeftovers sends the spools that dead agents left in the directory, until ctx ends.
func (s *Shipper) sendLeftovers(ctx context.Context) {
	tick := time.NewTicker(leftoverInterval)
	defer tick.Stop()
	for {
		if err := s.sendLeftoversOnce(ctx); err != nil && ctx.Err() == nil {
			s.log.Warn("logs that an earlier agent left behind cannot be sent, they are tried again",
				slog.Any(logkey.Err, err), slog.Duration(logkey.After, leftoverInterval))
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// sendLeftoversOnce sends what lies there now.
func (s *Shipper) sendLeftoversOnce(ctx context.Context) error {
	entries, err := os.ReadDir(s.cfg.SpoolDir)
	if err != nil {
		return fmt.Errorf("read the log spool: %w", err)
	}
	// Heads before tails, and tails in the order they were written, so that few chunks come out of order.
	files := map[string][]*leftover{}
	var heads []*leftover
	for _, e := range entries {
		lo := s.openLeftover(e.Name())
		switch {
		case lo == nil:
		case lo.tail:
			files[lo.key()] = append(files[lo.key()], lo)
		default:
			heads = append(heads, lo)
		}
	}
	var errs []error
	for _, lo := range heads {
		errs = append(errs, s.sendLeftover(ctx, []*leftover{lo}))
	}
	for _, tails := range files {
		slices.SortFunc(tails, func(a, b *leftover) int { return cmp.Compare(a.from, b.from) })
		errs = append(errs, s.sendLeftover(ctx, tails))
	}
	return errors.Join(errs...)
}

// leftover is a spool file of an agent that is gone, locked by us.
type leftover struct {
	f       *os.File
	task    string
	attempt uint32
	tail    bool
	start   uint64 // of a tail, see there
	headEnd uint64
	headSeq uint64
	from    uint64
}

func (lo *leftover) key() string { return fmt.Sprintf("%s@%d", lo.task, lo.attempt) }

// openLeftover returns nil for what is not a spool file, and for those whose agent lives.
func (s *Shipper) openLeftover(name string) *leftover {
	lo, ok := parseSpoolName(name)
	if !ok {
		return nil
	}
	f, err := os.OpenFile(filepath.Join(s.cfg.SpoolDir, name), os.O_RDWR, 0)
	if err != nil {
		return nil
	}
	info, err := f.Stat()
	// The name is looked up again: between opening and locking, its agent may have sent and deleted it.
	if err == nil && lockFile(f) == nil && sameFile(f.Name(), info) {
		lo.f = f
		return &lo
	}
	_ = f.Close()
	return nil
}

func sameFile(path string, info os.FileInfo) bool {
	now, err := os.Stat(path)
	return err == nil && os.SameFile(now, info)
}

// parseSpoolName splits task@attempt@random.spool and task@attempt@random@start@end@sequence@from.tail.
func parseSpoolName(name string) (leftover, bool) {
	var lo leftover
	ext := filepath.Ext(name)
	parts := strings.Split(strings.TrimSuffix(name, ext), "@")
	switch {
	case ext == ".spool" && len(parts) == 3:
	case ext == ".tail" && len(parts) == 7:
		lo.tail = true
		for i, p := range []*uint64{&lo.start, &lo.headEnd, &lo.headSeq, &lo.from} {
			n, err := strconv.ParseUint(parts[3+i], 10, 64)
			if err != nil {
				return lo, false
			}
			*p = n
		}
	default:
		return lo, false
	}
	attempt, err := strconv.ParseUint(parts[1], 10, 32)
	lo.task, lo.attempt = parts[0], uint32(attempt)
	return lo, err == nil && lo.task != ""
}

// sendLeftover sends the files of one attempt, which are one spool or all segments of its tail, and deletes them.
func (s *Shipper) sendLeftover(ctx context.Context, files []*leftover) (err error) {
	defer func() {
		for _, lo := range files {
			if err == nil {
				err = os.Remove(lo.f.Name())
			}
			_ = lo.f.Close()
		}
	}()
	s.mu.Lock()
	shards := s.number
	s.mu.Unlock()
	out := &leftoverSender{s: s, shard: store.LogShard(files[0].task, shards)}
	re := replacer{sequence: files[0].headSeq, offset: files[0].headEnd, at: files[0].start}
	for _, lo := range files {
		err := lo.records(func(b []byte) error {
			if !lo.tail {
				return out.add(ctx, b)
			}
			for _, c := range re.place(b) {
				if err := out.add(ctx, encode(c)); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	if err := out.flush(ctx); err != nil {
		return err
	}
	s.log.Info("sent the log of an attempt that an earlier agent left behind",
		slog.String(logkey.Task, files[0].task), slog.Uint64(logkey.Attempt, uint64(files[0].attempt)))
	return nil
}

// records calls f with every whole record; a torn one at the end was never complete and is left out.
func (lo *leftover) records(f func([]byte) error) error {
	for at := int64(0); ; {
		b, err := readRecord(lo.f, at)
		if err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || !isPathError(err) {
				return nil
			}
			return err
		}
		if err := f(b); err != nil {
			return err
		}
		at += int64(recordHeader + len(b))
	}
}

func isPathError(err error) bool {
	_, ok := errors.AsType[*os.PathError](err)
	return ok
}

// replacer gives the chunks of a tail their places, the same as the agent that wrote it would have given.
type replacer struct {
	sequence, offset, at uint64
}

func (r *replacer) place(b []byte) []*millracev1.LogChunk {
	var c millracev1.LogChunk
	if proto.Unmarshal(b, &c) != nil {
		return nil // its bytes count as left out
	}
	var chunks []*millracev1.LogChunk
	if gap := c.GetOffset() - min(c.GetOffset(), r.at); gap > 0 {
		text := dropMarker(gap)
		m := &millracev1.LogChunk{
			Task: c.GetTask(), Attempt: c.GetAttempt(), Worker: c.GetWorker(), Date: c.GetDate(),
			Data: text, Size: uint64(len(text)), At: c.GetAt(), Dropped: gap,
		}
		chunks = append(chunks, m)
	}
	r.at = c.GetOffset() + c.GetSize()
	chunks = append(chunks, &c)
	for _, c := range chunks {
		c.Sequence, c.Offset = r.sequence, r.offset
		r.sequence++
		r.offset += c.GetSize()
	}
	return chunks
}

// leftoverSender appends in batches and waits while the shard is full.
type leftoverSender struct {
	s     *Shipper
	shard int
	batch [][]byte
	size  int
}

func (o *leftoverSender) add(ctx context.Context, b []byte) error {
	o.batch = append(o.batch, b)
	o.size += len(b)
	if o.size < batchBytes && len(o.batch) < batchChunks {
		return nil
	}
	return o.flush(ctx)
}

func (o *leftoverSender) flush(ctx context.Context) error {
	pause := pauser{min: 50 * time.Millisecond, max: time.Second}
	for len(o.batch) > 0 {
		n, err := o.s.deps.Appender.AppendLog(ctx, o.shard, o.batch)
		if err != nil {
			return fmt.Errorf("append to log shard %d: %w", o.shard, err)
		}
		o.s.metrics.chunks.Add(float64(n))
		o.batch = o.batch[n:]
		if n > 0 {
			pause.reset()
		}
		if len(o.batch) > 0 {
			if err := pause.wait(ctx); err != nil {
				return err
			}
		}
	}
	o.batch, o.size = nil, 0
	return nil
}
