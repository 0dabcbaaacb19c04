package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// Entry is a message in a stream.
type Entry struct {
	Stream string
	ID     string
	Fields map[string]any // nil when the body was deleted while the entry was pending
}

// Reader reads one stream through one consumer group, its own unfinished entries first: a reply lost on the wire
// leaves entries pending under our name that `>` never shows again.
type Reader struct {
	s        *Store
	stream   string
	group    string
	consumer string
	history  string // next id of our own history, "" when it is drained
}

// NewReader for one consumer name, which must be unique to this process. Not safe for concurrent use.
func (s *Store) NewReader(stream, group, consumer string) *Reader {
	return &Reader{s: s, stream: stream, group: group, consumer: consumer, history: "0"}
}

// Read returns up to count entries, waiting up to block for the first one; none and no error when there was nothing.
// A missing group is made again from the start of the stream, which is safe because finished entries are deleted.
// After an error the next Read begins with our own history.
func (r *Reader) Read(ctx context.Context, count int, block time.Duration) ([]Entry, error) {
	id, wait := ">", max(block, time.Millisecond)
	if r.history != "" {
		id, wait = r.history, -1
	}
	res, err := r.s.block.XReadGroup(ctx, &redis.XReadGroupArgs{
		Group: r.group, Consumer: r.consumer, Streams: []string{r.stream, id}, Count: int64(max(count, 1)), Block: wait,
	}).Result()
	switch {
	case errors.Is(err, redis.Nil):
		r.history = ""
		return nil, nil
	case err != nil && isNoGroup(err):
		r.history = ""
		return nil, r.s.EnsureGroup(ctx, r.stream, r.group)
	case err != nil:
		r.history = "0"
		return nil, err
	}
	var out []Entry
	for _, st := range res {
		for _, m := range st.Messages {
			out = append(out, Entry{Stream: r.stream, ID: m.ID, Fields: m.Values})
		}
	}
	if r.history != "" {
		r.history = ""
		if len(out) > 0 {
			r.history = out[len(out)-1].ID
		}
	}
	return out, nil
}

// Steal moves to us up to count entries that other consumers left unfinished for longer than idle, from cursor on
// ("" to begin). The returned cursor is "" at the end. Ghosts, whose body is gone, are dropped by Redis and not returned.
func (r *Reader) Steal(ctx context.Context, idle time.Duration, cursor string, count int) ([]Entry, string, error) {
	if cursor == "" {
		cursor = "0-0"
	}
	msgs, next, err := r.s.cmd.XAutoClaim(ctx, &redis.XAutoClaimArgs{
		Stream: r.stream, Group: r.group, Consumer: r.consumer, MinIdle: idle, Start: cursor, Count: int64(count),
	}).Result()
	if isNoGroup(err) {
		return nil, "", nil
	}
	if err != nil {
		return nil, cursor, err
	}
	var out []Entry
	for _, m := range msgs {
		out = append(out, Entry{Stream: r.stream, ID: m.ID, Fields: m.Values})
	}
	if next == "0-0" {
		next = ""
	}
	return out, next, nil
}

// Ack removes entries that are done from the group and from the stream.
func (s *Store) Ack(ctx context.Context, stream, group string, ids []string) error {
	if len(ids) == 0 {
		return nil
	}
	_, err := s.cmd.TxPipelined(ctx, func(p redis.Pipeliner) error {
		p.XAck(ctx, stream, group, ids...)
		p.XDel(ctx, stream, ids...)
		return nil
	})
	return err
}

// AckOnly acknowledges entries that other groups may still want.
func (s *Store) AckOnly(ctx context.Context, stream, group string, ids []string) error {
	if len(ids) == 0 {
		return nil
	}
	return s.cmd.XAck(ctx, stream, group, ids...).Err()
}

// EnsureGroup makes the group from the start of the stream, and the stream, when they are missing.
func (s *Store) EnsureGroup(ctx context.Context, stream, group string) error {
	err := s.cmd.XGroupCreateMkStream(ctx, stream, group, "0").Err()
	if err != nil && strings.HasPrefix(err.Error(), "BUSYGROUP") {
		return nil
	}
	return err
}

func isNoGroup(err error) bool {
	return err != nil && (strings.HasPrefix(err.Error(), "NOGROUP") || strings.HasPrefix(err.Error(), "UNBLOCKED"))
}

// buryScript moves an entry that cannot be processed to the dead letters.
// KEYS: stream, dead. ARGV: group, entry, letter. Returns 1, or 0 when somebody else has taken care of the entry.
var buryScript = redis.NewScript(`
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) ~= 1 then return 0 end
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('XADD', KEYS[2], '*', 'd', ARGV[3])
return 1
`)

// Reject moves a pending entry of a stream to `dead` with a code and a reason for people.
func (s *Store) Reject(ctx context.Context, group string, e Entry, code, reason, task string) error {
	d := &millracev1.DeadLetter{
		Source: strings.TrimPrefix(e.Stream, s.keys.prefix), Entry: e.ID, Code: code, Reason: strings.ToValidUTF8(reason, "\uFFFD"),
		Task: strings.ToValidUTF8(task, "\uFFFD"), At: timestamppb.New(s.Now()), Fields: map[string][]byte{},
	}
	for k, v := range e.Fields {
		d.Fields[strings.ToValidUTF8(k, "\uFFFD")] = []byte(fmt.Sprint(v))
	}
	return buryScript.Run(ctx, s.cmd, []string{e.Stream, s.keys.Dead()}, group, e.ID, encode(d)).Err()
}

// AddDead adds a dead letter for something that is in no stream.
func (s *Store) AddDead(ctx context.Context, d *millracev1.DeadLetter) error {
	if d.At == nil {
		d.At = timestamppb.New(s.Now())
	}
	return s.cmd.XAdd(ctx, &redis.XAddArgs{Stream: s.keys.Dead(), Values: []any{"d", encode(d)}}).Err()
}

// DeadLetter is a letter and its place.
type DeadLetter struct {
	Entry  string
	Letter *millracev1.DeadLetter
}

// Dead lists the newest dead letters.
func (s *Store) Dead(ctx context.Context, limit int) ([]DeadLetter, error) {
	msgs, err := s.cmd.XRevRangeN(ctx, s.keys.Dead(), "+", "-", int64(max(limit, 1))).Result()
	if err != nil {
		return nil, err
	}
	var out []DeadLetter
	for _, m := range msgs {
		d := &millracev1.DeadLetter{}
		if raw, ok := m.Values["d"].(string); !ok || proto.Unmarshal([]byte(raw), d) != nil {
			// Scripts cannot write Protobuf: what a claim buries comes as plain fields.
			word := func(k string) string { v, _ := m.Values[k].(string); return strings.ToValidUTF8(v, "\uFFFD") }
			d = &millracev1.DeadLetter{
				Code: word("code"), Source: strings.TrimPrefix(word("source"), s.keys.prefix), Entry: word("entry"), Task: word("task"),
				Reason: "the dispatch entry names a task that has no record: it was finished and forgotten, or deleted by hand",
			}
		}
		out = append(out, DeadLetter{Entry: m.ID, Letter: d})
	}
	return out, nil
}

// Spec returns the stored bytes of a task's spec, ErrNotFound when there is no record.
func (s *Store) Spec(ctx context.Context, id string) ([]byte, error) {
	b, err := s.cmd.HGet(ctx, s.keys.Task(id), "p").Bytes()
	if errors.Is(err, redis.Nil) {
		return nil, ErrNotFound
	}
	return b, err
}

// KnownQueue reports whether the queue is "default" or some agent ever served it.
func (s *Store) KnownQueue(ctx context.Context, queue string) (bool, error) {
	if queue == "default" {
		return true, nil
	}
	s.mu.Lock()
	known := s.queues[queue]
	s.mu.Unlock()
	if known {
		return true, nil
	}
	ok, err := s.cmd.SIsMember(ctx, s.keys.Queues(), queue).Result()
	if err == nil && ok {
		s.mu.Lock()
		s.queues[queue] = true
		s.mu.Unlock()
	}
	return ok, err
}

// QueueNames lists the queues that exist, "default" always among them.
func (s *Store) QueueNames(ctx context.Context) ([]string, error) {
	names, err := s.cmd.SMembers(ctx, s.keys.Queues()).Result()
	if err != nil {
		return nil, err
	}
	if slices.Contains(names, "default") {
		return names, nil
	}
	return append(names, "default"), nil
}

// MemoryShare is used memory over the limit, 0 when there is no limit or it cannot be told.
func (s *Store) MemoryShare(ctx context.Context) (float64, error) {
	if s.opts.Embedded {
		return 0, nil
	}
	info, err := s.cmd.Info(ctx, "memory").Result()
	if err != nil {
		if isReplyError(err) {
			return 0, nil
		}
		return 0, err
	}
	f := infoFields(info)
	limit, used := number(f["maxmemory"]), number(f["used_memory"])
	if limit == 0 {
		return 0, nil
	}
	return float64(used) / float64(limit), nil
}

// Rewind makes the next Read begin with our own unfinished entries, after they could not be handled.
func (r *Reader) Rewind() { r.history = "0" }
