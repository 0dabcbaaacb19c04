package store

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/protobuf/proto"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// DefaultLogShards is written to `conf` when nobody has fixed the number yet. Four shards of LogShardLimit chunks of
// 64 KiB are at most 256 MiB in Redis.
const DefaultLogShards = 4

// LogShardLimit is how many chunks a log stream holds at most. Agents keep the rest.
const LogShardLimit = 1024

// logConsumer is the one consumer of a log stream. A stream has one logsink at a time by lease, so what the one before
// left unfinished is the history of its successor and nothing has to be claimed.
const logConsumer = "sink"

// LogShard is the log stream of a task: FNV-1a-32 of its whole id modulo their number.
func LogShard(id string, shards int) int {
	if shards <= 1 {
		return 0
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(id))
	return int(h.Sum32() % uint32(shards))
}

// Logsink is the registration of a logsink, its address, with a TTL.
func (k Keys) Logsink(id string) string { return k.prefix + "logsink:" + id }

// LogLease names the logsink that a log stream belongs to, with a TTL.
func (k Keys) LogLease(n string) string { return k.prefix + "logs:" + n + ":owner" }

func (s *Store) logStream(shard int) string { return s.keys.Logs(strconv.Itoa(shard)) }

// LogShards returns the number of log streams of the namespace and fixes it when this is the first call ever.
func (s *Store) LogShards(ctx context.Context) (int, error) {
	var get *redis.StringCmd
	_, err := s.cmd.Pipelined(ctx, func(p redis.Pipeliner) error {
		p.HSetNX(ctx, s.keys.Conf(), "log_shards", DefaultLogShards)
		get = p.HGet(ctx, s.keys.Conf(), "log_shards")
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("read the number of log shards: %w", err)
	}
	n, err := strconv.Atoi(get.Val())
	if err != nil || n < 1 || n > 1024 {
		return 0, fmt.Errorf("%s has log_shards=%q, want 1 to 1024: set it to what it was, or to %d when no log is under way", s.keys.Conf(), get.Val(), DefaultLogShards)
	}
	return n, nil
}

// appendLogScript adds chunks while the stream is below its limit.
// KEYS: the stream. ARGV: the limit, then the chunks. Returns how many were added, the first ones; an error when Redis
// refused the first one, for example at its memory limit.
var appendLogScript = redis.NewScript(`
local room = tonumber(ARGV[1]) - redis.call('XLEN', KEYS[1])
local n = 0
for i = 2, #ARGV do
  if n >= room then break end
  local r = redis.pcall('XADD', KEYS[1], '*', 'l', ARGV[i])
  if type(r) == 'table' and r.err then
    if n == 0 then return r end
    break
  end
  n = n + 1
end
return n
`)

// AppendLog adds encoded LogChunks to a shard's stream, in order. accepted < len(chunks) means that the stream is full
// for now. After an error any number of them may have been added.
func (s *Store) AppendLog(ctx context.Context, shard int, chunks [][]byte) (accepted int, err error) {
	args := make([]any, 0, len(chunks)+1)
	args = append(args, LogShardLimit)
	for _, c := range chunks {
		args = append(args, c)
	}
	n, err := appendLogScript.Run(ctx, s.cmd, []string{s.logStream(shard)}, args...).Int()
	if err != nil {
		return 0, fmt.Errorf("append to log shard %d: %w", shard, err)
	}
	return n, nil
}

// LogEntry is one chunk in a log stream.
type LogEntry struct {
	Shard int
	ID    string
	// Chunk is the encoded LogChunk; nil when the entry has none.
	Chunk []byte
	// Gone: the body was deleted while the entry was pending. There is nothing to do but to acknowledge it.
	Gone bool
	// Entry is the whole, for the dead letters.
	Entry Entry
}

// ReadLogs reads new chunks of the shards, up to count of each, waiting up to block for the first. A missing stream or
// group is made. After any error PendingLogs has to be drained first: a lost reply leaves entries pending.
func (s *Store) ReadLogs(ctx context.Context, shards []int, count int, block time.Duration) ([]LogEntry, error) {
	streams := make([]string, 0, 2*len(shards))
	for _, n := range shards {
		streams = append(streams, s.logStream(n))
	}
	for range shards {
		streams = append(streams, ">")
	}
	return s.readLogs(ctx, shards, streams, count, max(block, time.Millisecond))
}

// PendingLogs reads the oldest chunks of a shard that were read but never acknowledged.
func (s *Store) PendingLogs(ctx context.Context, shard, count int) ([]LogEntry, error) {
	return s.readLogs(ctx, []int{shard}, []string{s.logStream(shard), "0"}, count, -1)
}

func (s *Store) readLogs(ctx context.Context, shards []int, streams []string, count int, block time.Duration) ([]LogEntry, error) {
	res, err := s.block.XReadGroup(ctx, &redis.XReadGroupArgs{
		Group: GroupLogsink, Consumer: logConsumer, Streams: streams, Count: int64(max(count, 1)), Block: block,
	}).Result()
	switch {
	case errors.Is(err, redis.Nil):
		return nil, nil
	case isNoGroup(err):
		for _, n := range shards {
			if err := s.EnsureGroup(ctx, s.logStream(n), GroupLogsink); err != nil {
				return nil, fmt.Errorf("make the group of log shard %d: %w", n, err)
			}
		}
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("read log shards: %w", err)
	}
	byStream := make(map[string]int, len(shards))
	for _, n := range shards {
		byStream[s.logStream(n)] = n
	}
	var out []LogEntry
	for _, st := range res {
		for _, m := range st.Messages {
			e := LogEntry{Shard: byStream[st.Stream], ID: m.ID, Gone: m.Values == nil, Entry: Entry{Stream: st.Stream, ID: m.ID, Fields: m.Values}}
			if c, ok := m.Values["l"].(string); ok {
				e.Chunk = []byte(c)
			}
			out = append(out, e)
		}
	}
	return out, nil
}

// ackLogsScript removes chunks that are safe on disk. It only frees memory, so it works at the memory limit.
// KEYS: the stream. ARGV: the group, then entry ids, at most a few thousand.
var ackLogsScript = redis.NewScript(`
local n = redis.call('XACK', KEYS[1], unpack(ARGV))
redis.call('XDEL', KEYS[1], unpack(ARGV, 2))
return n
`)

// AckLogs acknowledges and deletes chunks of one shard.
func (s *Store) AckLogs(ctx context.Context, shard int, ids []string) error {
	for len(ids) > 0 {
		n := min(len(ids), 1000)
		args := make([]any, 0, n+1)
		args = append(args, GroupLogsink)
		for _, id := range ids[:n] {
			args = append(args, id)
		}
		if err := ackLogsScript.Run(ctx, s.cmd, []string{s.logStream(shard)}, args...).Err(); err != nil {
			return fmt.Errorf("acknowledge chunks of log shard %d: %w", shard, err)
		}
		ids = ids[n:]
	}
	return nil
}

// LogBacklog is the number of chunks in a log stream.
func (s *Store) LogBacklog(ctx context.Context, shard int) (int64, error) {
	return s.cmd.XLen(ctx, s.logStream(shard)).Result()
}

// logLeaseScript takes, renews and gives up leases of log streams.
// KEYS: a lease per shard. ARGV: the logsink, TTL in ms, then per shard "1" take it if it is free or ours, "0" give it
// up if it is ours, "" only look. Returns per shard who holds it then, "" for nobody.
var logLeaseScript = redis.NewScript(`
local out = {}
for i, key in ipairs(KEYS) do
  local holder, want = redis.call('GET', key), ARGV[i + 2]
  if want == '1' and (not holder or holder == ARGV[1]) then
    redis.call('SET', key, ARGV[1], 'PX', ARGV[2])
    holder = ARGV[1]
  elseif want == '0' and holder == ARGV[1] then
    redis.call('DEL', key)
    holder = false
  end
  out[i] = holder or ''
end
return out
`)

// LeaseWish is what a logsink wants to do with a shard's lease.
type LeaseWish int

// The wishes.
const (
	LeaseLook LeaseWish = iota // only see who holds it
	LeaseTake                  // take it when it is free, renew it when it is ours
	LeaseDrop                  // give it up when it is ours
)

// LeaseLogShards applies one wish per shard and returns who holds each then; "" is nobody. id must never be used by two
// processes: it is the token of the lease.
func (s *Store) LeaseLogShards(ctx context.Context, id string, ttl time.Duration, wishes []LeaseWish) ([]string, error) {
	keys := make([]string, len(wishes))
	args := []any{id, ttl.Milliseconds()}
	for n, w := range wishes {
		keys[n] = s.keys.LogLease(strconv.Itoa(n))
		args = append(args, map[LeaseWish]string{LeaseTake: "1", LeaseDrop: "0"}[w])
	}
	holders, err := logLeaseScript.Run(ctx, s.cmd, keys, args...).StringSlice()
	if err != nil {
		return nil, fmt.Errorf("lease log shards: %w", err)
	}
	return holders, nil
}

// LogShardOwner returns the id of the logsink that a shard belongs to, "" when it is nobody's now.
func (s *Store) LogShardOwner(ctx context.Context, shard int) (string, error) {
	id, err := s.cmd.Get(ctx, s.keys.LogLease(strconv.Itoa(shard))).Result()
	if errors.Is(err, redis.Nil) {
		return "", nil
	}
	return id, err
}

// RegisterLogsink writes a logsink's address with a lifetime, so that logs can be read from it.
func (s *Store) RegisterLogsink(ctx context.Context, id, addr string, ttl time.Duration) error {
	_, err := s.cmd.TxPipelined(ctx, func(p redis.Pipeliner) error {
		p.Set(ctx, s.keys.Logsink(id), addr, ttl)
		p.ZAdd(ctx, s.keys.Logsinks(), redis.Z{Score: float64(s.Now().UnixMilli()), Member: id})
		return nil
	})
	return err
}

// UnregisterLogsink removes a logsink that stopped in order.
func (s *Store) UnregisterLogsink(ctx context.Context, id string) error {
	_, err := s.cmd.TxPipelined(ctx, func(p redis.Pipeliner) error {
		p.Del(ctx, s.keys.Logsink(id))
		p.ZRem(ctx, s.keys.Logsinks(), id)
		return nil
	})
	return err
}

// LogsinkAddrs maps the ids of live logsinks to their addresses. Those that have been silent for an hour are forgotten.
func (s *Store) LogsinkAddrs(ctx context.Context) (map[string]string, error) {
	ids, err := s.cmd.ZRangeWithScores(ctx, s.keys.Logsinks(), 0, -1).Result()
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	keys := make([]string, len(ids))
	for i, z := range ids {
		keys[i] = s.keys.Logsink(fmt.Sprint(z.Member))
	}
	vals, err := s.cmd.MGet(ctx, keys...).Result()
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for i, v := range vals {
		if addr, ok := v.(string); ok {
			out[fmt.Sprint(ids[i].Member)] = addr
		} else if s.Now().UnixMilli()-int64(ids[i].Score) > time.Hour.Milliseconds() {
			_ = s.cmd.ZRem(ctx, s.keys.Logsinks(), ids[i].Member).Err() // tried again at the next look
		}
	}
	return out, nil
}

// LogClaim says that a worker ran an attempt.
type LogClaim struct {
	Task    string
	Attempt uint32
	Worker  string
}

// LogVerdict is what the record says of a LogClaim.
type LogVerdict int

// The verdicts.
const (
	LogNoRecord LogVerdict = iota // no record of the task, or it has forgotten the attempt
	LogOwned                      // the worker owns or owned the attempt
	LogForeign                    // another worker did, or the attempt never was
)

// CheckLogs compares claims with the records.
func (s *Store) CheckLogs(ctx context.Context, claims []LogClaim) ([]LogVerdict, error) {
	cmds := make([]*redis.SliceCmd, len(claims))
	_, err := s.cmd.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, c := range claims {
			cmds[i] = p.HMGet(ctx, s.keys.Task(c.Task), "s", "a", "w", "h"+strconv.FormatUint(uint64(c.Attempt), 10))
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("check the owners of logs: %w", err)
	}
	out := make([]LogVerdict, len(claims))
	for i, c := range claims {
		out[i] = verdictOf(c, cmds[i].Val())
	}
	return out, nil
}

func verdictOf(c LogClaim, v []any) LogVerdict {
	if text(v, 0) == "" {
		return LogNoRecord
	}
	attempt := uint32(number(text(v, 1)))
	if h := text(v, 3); h != "" {
		var end millracev1.AttemptEnd
		if proto.Unmarshal([]byte(h), &end) == nil && end.GetWorker() == c.Worker {
			return LogOwned
		}
	}
	switch {
	case attempt == c.Attempt && text(v, 2) == c.Worker:
		return LogOwned
	case c.Attempt > 0 && c.Attempt+keptEnds <= attempt:
		return LogNoRecord
	default:
		return LogForeign
	}
}

// LogState is what a logsink knows of the log of an attempt.
type LogState struct {
	Task    string
	Attempt uint32
	View    *millracev1.LogView
}

// logStatesScript writes states into records that exist.
// KEYS: records. ARGV: per record its field, the value and the field of an attempt so old that it is forgotten.
var logStatesScript = redis.NewScript(`
for i, key in ipairs(KEYS) do
  if redis.call('EXISTS', key) == 1 then
    redis.pcall('HSET', key, ARGV[3*i-2], ARGV[3*i-1])
    redis.pcall('HDEL', key, ARGV[3*i])
  end
end
return #KEYS
`)

// SetLogStates writes what is known of logs into the records of their tasks; tasks without a record are passed over.
func (s *Store) SetLogStates(ctx context.Context, states []LogState) error {
	for len(states) > 0 {
		n := min(len(states), 200)
		keys := make([]string, 0, n)
		args := make([]any, 0, 3*n)
		for _, st := range states[:n] {
			keys = append(keys, s.keys.Task(st.Task))
			old := "g0"
			if st.Attempt > keptEnds {
				old = LogField(st.Attempt - keptEnds)
			}
			args = append(args, LogField(st.Attempt), encode(st.View), old)
		}
		if err := logStatesScript.Run(ctx, s.cmd, keys, args...).Err(); err != nil {
			return fmt.Errorf("write log states: %w", err)
		}
		states = states[n:]
	}
	return nil
}

// LogView returns what the record says of the log of an attempt; nil when nothing is known.
func (s *Store) LogView(ctx context.Context, task string, attempt uint32) (*millracev1.LogView, error) {
	b, err := s.cmd.HGet(ctx, s.keys.Task(task), LogField(attempt)).Bytes()
	if errors.Is(err, redis.Nil) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	v := &millracev1.LogView{}
	return v, proto.Unmarshal(b, v)
}

// LogField is the record's field with the encoded LogView of an attempt.
func LogField(attempt uint32) string { return "g" + strconv.FormatUint(uint64(attempt), 10) }
