package logsink

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"sync"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/proto"

	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/spec"
	"github.com/millrace/millrace/internal/store"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// chunkMax is the most output in a chunk, far above what agents send.
const chunkMax = 4 << 20

// batch is a set of chunks on their way from a stream to the disk.
type batch struct {
	s     *Service
	logs  map[*attemptLog]struct{} // written to; each is retained once
	acks  map[int][]string         // entries that may be acknowledged after the sync, by shard
	ended []*attemptLog
}

// item is a decoded chunk.
type item struct {
	entry store.LogEntry
	chunk *millracev1.LogChunk
	data  []byte
	log   *attemptLog
}

// write decodes, checks and writes entries. What cannot be a chunk goes to the dead letters.
func (b *batch) write(ctx context.Context, entries []store.LogEntry) error {
	var items []item
	for _, e := range entries {
		if e.Gone {
			b.acks[e.Shard] = append(b.acks[e.Shard], e.ID)
			continue
		}
		it, code, err := b.decode(e)
		if err != nil {
			if err := b.reject(ctx, it, code, err); err != nil {
				return err
			}
			continue
		}
		items = append(items, it)
	}
	items, err := b.open(ctx, items)
	if err != nil {
		return err
	}
	for _, it := range items {
		if err := it.log.write(it.chunk, it.data); err != nil {
			if isTooLarge(err) {
				if err := b.reject(ctx, it, "undecodable", err); err != nil {
					return err
				}
				continue
			}
			return diskError{fmt.Errorf("write the log of task %s: %w", it.log.key, err)}
		}
		b.s.metrics.bytes.Add(float64(len(it.data)))
		if it.chunk.GetEnd() != nil || it.log.finished() {
			b.ended = append(b.ended, it.log)
		}
		b.acks[it.entry.Shard] = append(b.acks[it.entry.Shard], it.entry.ID)
	}
	return nil
}

// decode reads a chunk and checks everything that decides where it is written.
func (b *batch) decode(e store.LogEntry) (it item, code string, err error) {
	c := &millracev1.LogChunk{}
	it = item{entry: e, chunk: c}
	if e.Chunk == nil {
		return it, "undecodable", errors.New("the entry has no field l")
	}
	if err := proto.Unmarshal(e.Chunk, c); err != nil {
		return it, "undecodable", fmt.Errorf("the field l is not a LogChunk: %w", err)
	}
	switch {
	case !spec.ValidID(c.GetTask()):
		return it, "bad_name", fmt.Errorf("%q cannot be the id of a task", c.GetTask())
	case !validDate(c.GetDate()):
		return it, "bad_name", fmt.Errorf("%q is not a date", c.GetDate())
	case c.GetAttempt() == 0 || c.GetWorker() == "" || len(c.GetWorker()) > maxWorker:
		return it, "bad_name", fmt.Errorf("attempt %d of worker %q cannot be", c.GetAttempt(), c.GetWorker())
	case c.GetSequence() > maxSequence || c.GetOffset() > maxOffset || c.GetSequence() > c.GetOffset():
		return it, "undecodable", fmt.Errorf("chunk %d at byte %d cannot be", c.GetSequence(), c.GetOffset())
	case c.GetStream() > 2 || c.GetSize() > chunkMax:
		return it, "undecodable", fmt.Errorf("a chunk of %d bytes of stream %d cannot be", c.GetSize(), c.GetStream())
	}
	it.data, err = unpack(c)
	switch {
	case err != nil:
	case uint64(len(it.data)) != c.GetSize():
		err = fmt.Errorf("the chunk has %d bytes and says %d", len(it.data), c.GetSize())
	case (len(it.data) == 0) != (c.GetEnd() != nil):
		err = errors.New("a chunk has either output or the end")
	case len(c.GetEnd().GetSha256()) > 32 || c.GetEnd().GetChunks() > maxSequence || c.GetEnd().GetTotalBytes() > maxOffset:
		err = errors.New("the end record cannot be")
	}
	return it, "undecodable", err
}

func unpack(c *millracev1.LogChunk) ([]byte, error) {
	switch c.GetCompression() {
	case millracev1.LogChunk_COMPRESSION_UNSPECIFIED:
		return c.GetData(), nil
	case millracev1.LogChunk_COMPRESSION_ZSTD:
		dec, err := decoder()
		if err != nil {
			return nil, err
		}
		data, err := dec.DecodeAll(c.GetData(), make([]byte, 0, c.GetSize()))
		if err != nil {
			return nil, fmt.Errorf("unpack: %w", err)
		}
		return data, nil
	default:
		return nil, fmt.Errorf("packed in a way (%d) that this version does not know: use a newer logsink", c.GetCompression())
	}
}

// open finds the log of each chunk and leaves out chunks of workers that never owned the attempt.
func (b *batch) open(ctx context.Context, items []item) ([]item, error) {
	if err := b.check(ctx, items); err != nil {
		return nil, err
	}
	kept := items[:0]
	for _, it := range items {
		if it.log == nil {
			continue
		}
		kept = append(kept, it)
	}
	return kept, nil
}

// check opens logs. A log that is open or exists was checked before; for new ones the record is asked, all in one go.
func (b *batch) check(ctx context.Context, items []item) error {
	var fresh []int
	var claims []store.LogClaim
	for i := range items {
		it := &items[i]
		key := attemptKey{it.chunk.GetTask(), it.chunk.GetAttempt()}
		a, err := b.s.table.existing(key, it.chunk.GetDate())
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return diskError{err}
		}
		if a == nil {
			fresh = append(fresh, i)
			claims = append(claims, store.LogClaim{Task: key.task, Attempt: key.attempt, Worker: it.chunk.GetWorker()})
			continue
		}
		if err := b.use(ctx, it, a); err != nil {
			return err
		}
	}
	if len(fresh) == 0 {
		return nil
	}
	verdicts, err := b.s.st.CheckLogs(ctx, claims)
	if err != nil {
		return err
	}
	for k, i := range fresh {
		it := &items[i]
		if verdicts[k] != store.LogOwned {
			if err := b.refuse(ctx, *it, verdicts[k]); err != nil {
				return err
			}
			continue
		}
		a, err := b.s.table.forWriting(attemptKey{it.chunk.GetTask(), it.chunk.GetAttempt()}, it.chunk.GetDate(), it.chunk.GetWorker())
		if err != nil {
			return diskError{err}
		}
		if err := b.use(ctx, it, a); err != nil {
			return err
		}
	}
	return nil
}

// use takes a log, which the caller has retained, for the chunk of its worker.
func (b *batch) use(ctx context.Context, it *item, a *attemptLog) error {
	if a.worker != it.chunk.GetWorker() {
		b.s.table.release(a)
		return b.refuse(ctx, *it, store.LogForeign)
	}
	it.log = a
	if _, again := b.logs[a]; again {
		b.s.table.release(a)
	}
	b.logs[a] = struct{}{}
	return nil
}

func (b *batch) refuse(ctx context.Context, it item, verdict store.LogVerdict) error {
	c := it.chunk
	if verdict == store.LogNoRecord {
		return b.reject(ctx, it, "no_record", fmt.Errorf("there is no record of task %s attempt %d: its retention is over or Redis lost it", c.GetTask(), c.GetAttempt()))
	}
	return b.reject(ctx, it, "not_owner", fmt.Errorf("worker %s never owned task %s attempt %d", c.GetWorker(), c.GetTask(), c.GetAttempt()))
}

// reject puts an entry into the dead letters.
func (b *batch) reject(ctx context.Context, it item, why string, err error) error {
	b.s.metrics.rejected.WithLabelValues(why).Inc()
	b.s.log.Warn("a log chunk was refused", slog.String(logkey.Reason, why), slog.String(logkey.Entry, it.entry.ID), slog.Any(logkey.Err, err))
	if err := b.s.st.Reject(ctx, store.GroupLogsink, it.entry.Entry, "bad_chunk", err.Error(), it.chunk.GetTask()); err != nil {
		return fmt.Errorf("move a log chunk to the dead letters: %w", err)
	}
	return nil
}

// states are those of logs whose end came with this batch.
func (b *batch) states() []store.LogState {
	states := make([]store.LogState, 0, len(b.ended))
	for _, a := range b.ended {
		states = append(states, a.state())
	}
	return states
}

func (a *attemptLog) state() store.LogState {
	return store.LogState{Task: a.key.task, Attempt: a.key.attempt, View: a.view()}
}

// release gives the logs back.
func (b *batch) release() {
	for a := range b.logs {
		b.s.table.release(a)
	}
	b.logs = nil
}

var decoder = sync.OnceValues(func() (*zstd.Decoder, error) {
	return zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(2*chunkMax))
})
