package store

import (
	"context"
	"errors"
	"fmt"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/task"
)

// WorkerMeta describes one incarnation of an agent.
type WorkerMeta struct {
	ID       task.WorkerID
	Slots    int
	Queues   []string
	Handlers []string
	Host     string
	PID      int
	Version  string
	Started  time.Time
	Draining bool
	// Dispatchers that it has a control connection to.
	Dispatchers []string
	// Dead: a reaper declared it dead.
	Dead bool
	// Beating: its heartbeat key is there.
	Beating bool
	// Running counts the tasks that the records say it runs; filled by Workers.
	Running int
}

// registerScript writes a worker's description and first heartbeat.
// KEYS: meta, heartbeat, workers, queues. ARGV: worker, TTL in ms, time in ms, value of the heartbeat, number of queues,
// the queues, then field, value pairs of meta. It begins with a write that Redis accepts at its memory limit: the tasks
// that fill the memory can only be worked off if agents can start.
var registerScript = redis.NewScript(`
redis.call('PERSIST', KEYS[1])
local n = tonumber(ARGV[5])
redis.call('HSET', KEYS[1], unpack(ARGV, 6 + n))
redis.call('SET', KEYS[2], ARGV[4], 'PX', ARGV[2])
redis.call('ZADD', KEYS[3], ARGV[3], ARGV[1])
for i = 6, 5 + n do redis.call('SADD', KEYS[4], ARGV[i]) end
return 1
`)

// Register writes a worker's description and first heartbeat. Its id must never have been used before.
func (s *Store) Register(ctx context.Context, w WorkerMeta, ttl time.Duration) error {
	id := string(w.ID)
	args := []any{id, ttl.Milliseconds(), s.Now().UnixMilli(), w.Host, len(w.Queues)}
	for _, q := range w.Queues {
		args = append(args, q)
	}
	args = append(args, "slots", w.Slots, "queues", strings.Join(w.Queues, ","), "handlers", strings.Join(w.Handlers, ","),
		"host", w.Host, "pid", w.PID, "version", w.Version, "started", w.Started.UnixMilli())
	keys := []string{s.keys.WorkerMeta(id), s.keys.WorkerBeat(id), s.keys.Workers(), s.keys.Queues()}
	return registerScript.Run(ctx, s.cmd, keys, args...).Err()
}

// setScript changes fields of a worker's meta if it still lives: a write must not bring a buried worker back.
// KEYS: meta. ARGV: field, value pairs; an empty value deletes. Returns 0 when it is dead or gone.
var setScript = redis.NewScript(`
local m = redis.call('HMGET', KEYS[1], 'dead', 'slots')
if m[1] or not m[2] then return 0 end
for i = 1, #ARGV, 2 do
  if ARGV[i+1] == '' then redis.call('HDEL', KEYS[1], ARGV[i]) else redis.call('HSET', KEYS[1], ARGV[i], ARGV[i+1]) end
end
return 1
`)

// SetDraining shows or hides that a worker takes no new work. ErrFenced when it is dead or gone.
func (s *Store) SetDraining(ctx context.Context, w task.WorkerID, on bool) error {
	v := ""
	if on {
		v = "1"
	}
	return s.setMeta(ctx, w, "draining", v)
}

// Link records that a dispatcher has, or lost, a control connection to a worker. Holding counts only recorded ones.
func (s *Store) Link(ctx context.Context, w task.WorkerID, dispatcher string, on bool) error {
	v := ""
	if on {
		v = "1"
	}
	return s.setMeta(ctx, w, "d:"+dispatcher, v)
}

func (s *Store) setMeta(ctx context.Context, w task.WorkerID, words ...any) error {
	n, err := setScript.Run(ctx, s.cmd, []string{s.keys.WorkerMeta(string(w))}, words...).Int()
	if err == nil && n == 0 {
		return ErrFenced
	}
	return err
}

// renewScript proves that a worker and its tasks live, and tells it what it must know.
//
// KEYS: meta, heartbeat, view of tasks, running, workers, then the dispatch streams.
// ARGV: worker, heartbeat TTL ms, lease ms, prefix of records, group, number of streams, value of the heartbeat, then id and attempt of each task.
// The first write is one that Redis accepts at its memory limit, so that the others are accepted too.
// Returns 0 when fenced, else the server's time, a list with 0 (ours), 1 (ours, cancel mark) or 2 (not ours) for each
// task, and for each stream the entries that are pending for the worker.
var renewScript = redis.NewScript(`
local m = redis.call('HMGET', KEYS[1], 'dead', 'slots')
if m[1] or not m[2] then return 0 end
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local w, ttl, lease, nstreams = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[6])
if redis.call('PEXPIRE', KEYS[2], ttl) == 0 then redis.call('SET', KEYS[2], ARGV[7], 'PX', ttl) end
redis.call('ZADD', KEYS[5], now, w)
redis.call('DEL', KEYS[3])
local st = {}
for i = 8, #ARGV, 2 do
  local rec = ARGV[4] .. ARGV[i]
  local f = redis.pcall('HMGET', rec, 's', 'a', 'w', 'c')
  if not f.err and f[1] == 'r' and f[2] == ARGV[i+1] and f[3] == w then
    redis.call('ZADD', KEYS[4], now + lease, ARGV[i])
    redis.call('SET', rec .. ':workerId', w, 'PX', lease)
    redis.call('SADD', KEYS[3], ARGV[i])
    st[#st+1] = f[4] and 1 or 0
  else
    st[#st+1] = 2
  end
end
if #st > 0 then redis.call('PEXPIRE', KEYS[3], lease) end
local pend = {}
for k = 1, nstreams do
  local ids = {}
  local r = redis.pcall('XPENDING', KEYS[5+k], ARGV[5], '-', '+', 10000, w)
  if type(r) == 'table' and not r.err then
    for j, e in ipairs(r) do ids[j] = e[1] end
  end
  pend[k] = ids
end
return {now, st, pend}
`)

// Held is an attempt that a worker says it runs.
type Held struct {
	ID      task.ID
	Attempt uint32
}

// Status of a Held at a renewal.
type Status int

// What Redis says about an attempt.
const (
	Ours       Status = iota // renewed
	OursCancel               // renewed, and it is to be cancelled
	NotOurs                  // it is no longer ours: kill it, its outcome does not count
)

// RenewFor names what is renewed.
type RenewFor struct {
	Worker task.WorkerID
	Beat   string // value of the heartbeat, for people
	TTL    time.Duration
	Lease  time.Duration
	Held   []Held
	Lanes  []string // lanes that the worker claims from
}

// Renewal is what Redis answered.
type Renewal struct {
	Status  []Status   // for each Held
	Pending [][]string // for each lane, the entries that Redis counts as the worker's
}

// Renew sets the heartbeat again, even when it had expired, and the leases of all tasks, in one step. ErrFenced when
// the worker is dead for Redis.
func (s *Store) Renew(ctx context.Context, r RenewFor) (Renewal, error) {
	w := string(r.Worker)
	keys := make([]string, 0, 5+len(r.Lanes))
	keys = append(keys, s.keys.WorkerMeta(w), s.keys.WorkerBeat(w), s.keys.WorkerTasks(w), s.keys.Running(), s.keys.Workers())
	for _, l := range r.Lanes {
		keys = append(keys, s.keys.Dispatch(l))
	}
	args := make([]any, 0, 7+2*len(r.Held))
	args = append(args, w, r.TTL.Milliseconds(), r.Lease.Milliseconds(), s.keys.TaskOf(), GroupAgents, len(r.Lanes), r.Beat)
	for _, h := range r.Held {
		args = append(args, string(h.ID), h.Attempt)
	}
	reply, err := renewScript.Run(ctx, s.cmd, keys, args...).Result()
	if err != nil {
		return Renewal{}, err
	}
	v, ok := reply.([]any)
	if !ok || len(v) < 3 {
		return Renewal{}, ErrFenced
	}
	if ms, ok := v[0].(int64); ok {
		s.noteTime(ms)
	}
	var out Renewal
	for _, x := range v[1].([]any) {
		out.Status = append(out.Status, Status(x.(int64)))
	}
	if len(out.Status) != len(r.Held) {
		return Renewal{}, fmt.Errorf("renew: %d answers for %d tasks", len(out.Status), len(r.Held))
	}
	for _, x := range v[2].([]any) {
		var ids []string
		for _, id := range x.([]any) {
			ids = append(ids, id.(string))
		}
		out.Pending = append(out.Pending, ids)
	}
	return out, nil
}

// EntryTask tells which task and attempt a dispatch entry is about; ok is false when the entry is gone.
func (s *Store) EntryTask(ctx context.Context, lane, entry string) (h Held, ok bool, err error) {
	msgs, err := s.cmd.XRange(ctx, s.keys.Dispatch(lane), entry, entry).Result()
	if err != nil || len(msgs) == 0 {
		return Held{}, false, err
	}
	id, _ := msgs[0].Values["i"].(string)
	a, _ := msgs[0].Values["a"].(string)
	return Held{ID: task.ID(id), Attempt: uint32(number(a))}, id != "", nil
}

// declareScript puts the dead mark on a worker whose heartbeat is gone.
// KEYS: meta, heartbeat. ARGV: time in ms, "1" to declare although it beats (its state directory's lock proved it dead).
// Returns 1 when it is dead now, 0 when it lives, -1 when nobody knows it.
var declareScript = redis.NewScript(`
if redis.call('EXISTS', KEYS[1]) == 0 then return -1 end
if redis.call('HEXISTS', KEYS[1], 'dead') == 1 then return 1 end
if ARGV[2] ~= '1' and redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('DEL', KEYS[2])
redis.call('HSET', KEYS[1], 'dead', ARGV[1])
return 1
`)

// Declare marks a worker dead if its heartbeat is gone, or in any case when proven. It reports whether it is dead.
func (s *Store) Declare(ctx context.Context, w task.WorkerID, proven bool) (bool, error) {
	p := ""
	if proven {
		p = "1"
	}
	n, err := declareScript.Run(ctx, s.cmd, []string{s.keys.WorkerMeta(string(w)), s.keys.WorkerBeat(string(w))}, s.Now().UnixMilli(), p).Int()
	return n != 0, err
}

// adoptScript moves entries of a dead worker to the reaper that handles them.
//
// KEYS: meta of the worker, dispatch stream. ARGV: group, worker, reaper, how many, min idle ms, first id.
// Returns 0 when the worker is not dead, else the last id that was looked at ("" when there was none) and for each
// entry: its id, task id and attempt; the latter two are "" for a ghost, which is acknowledged at once.
var adoptScript = redis.NewScript(`
local m = redis.call('HMGET', KEYS[1], 'dead', 'slots')
if not m[1] and m[2] then return 0 end
local r = redis.pcall('XPENDING', KEYS[2], ARGV[1], ARGV[6], '+', tonumber(ARGV[4]), ARGV[2])
local out = {''}
if type(r) ~= 'table' or r.err then return out end
for _, e in ipairs(r) do
  out[1] = e[1]
  if tonumber(e[3]) >= tonumber(ARGV[5]) then
    local c = redis.call('XCLAIM', KEYS[2], ARGV[1], ARGV[3], ARGV[5], e[1])
    local b = c[1]
    if b and b[2] then
      local id, a = '', ''
      for j = 1, #b[2], 2 do
        if b[2][j] == 'i' then id = b[2][j+1] elseif b[2][j] == 'a' then a = b[2][j+1] end
      end
      out[#out+1] = {e[1], id, a}
    else
      redis.call('XACK', KEYS[2], ARGV[1], e[1])
      out[#out+1] = {e[1], '', ''}
    end
  end
end
return out
`)

// Orphan is a pending entry of a dead worker, now pending for the reaper that asked.
type Orphan struct {
	Entry   string
	Task    Held // zero for a ghost: the entry's body was gone
	IsGhost bool
}

// minIdle keeps two reapers from claiming the same entry from each other.
const minIdle = time.Second

// Adopt claims up to count pending entries of a dead worker in one lane, from the id after on ("" to begin); next is
// "" at the end. It adopts nothing when the worker is not dead.
func (s *Store) Adopt(ctx context.Context, w task.WorkerID, reaper, lane, after string, count int) (orphans []Orphan, next string, err error) {
	from := "-"
	if after != "" {
		from = "(" + after
	}
	reply, err := adoptScript.Run(ctx, s.cmd, []string{s.keys.WorkerMeta(string(w)), s.keys.Dispatch(lane)},
		GroupAgents, string(w), reaper, count, minIdle.Milliseconds(), from).Result()
	if err != nil {
		return nil, after, err
	}
	rows, ok := reply.([]any)
	if !ok {
		return nil, "", nil
	}
	next = text(rows, 0)
	for _, r := range rows[1:] {
		v := r.([]any)
		o := Orphan{Entry: text(v, 0), Task: Held{ID: task.ID(text(v, 1)), Attempt: uint32(number(text(v, 2)))}}
		o.IsGhost = o.Task.ID == ""
		orphans = append(orphans, o)
	}
	return orphans, next, nil
}

// buryWorkerScript removes a dead worker that has nothing pending.
// KEYS: meta, heartbeat, view of tasks, workers, then the dispatch streams. ARGV: group, worker.
// Returns -1 when it is not dead, else the number of entries still pending, 0 when it is buried.
var buryWorkerScript = redis.NewScript(`
local m = redis.call('HMGET', KEYS[1], 'dead', 'slots')
if not m[1] and m[2] then return -1 end
local n = 0
for k = 5, #KEYS do
  local r = redis.pcall('XPENDING', KEYS[k], ARGV[1], '-', '+', 1, ARGV[2])
  if type(r) == 'table' and not r.err then n = n + #r end
end
if n > 0 then return n end
for k = 5, #KEYS do redis.pcall('XGROUP', 'DELCONSUMER', KEYS[k], ARGV[1], ARGV[2]) end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
redis.call('ZREM', KEYS[4], ARGV[2])
return 0
`)

// Bury forgets a dead worker if nothing is pending for it in the lanes. It reports whether it did.
func (s *Store) Bury(ctx context.Context, w task.WorkerID, lanes []string) (bool, error) {
	id := string(w)
	keys := []string{s.keys.WorkerMeta(id), s.keys.WorkerBeat(id), s.keys.WorkerTasks(id), s.keys.Workers()}
	for _, l := range lanes {
		keys = append(keys, s.keys.Dispatch(l))
	}
	n, err := buryWorkerScript.Run(ctx, s.cmd, keys, GroupAgents, id).Int()
	return err == nil && n == 0, err
}

// Leave removes a worker that stopped in order and holds nothing: it marks itself dead first, so that nobody can
// claim under its name any more.
func (s *Store) Leave(ctx context.Context, w task.WorkerID, lanes []string) error {
	if _, err := s.Declare(ctx, w, true); err != nil {
		return err
	}
	_, err := s.Bury(ctx, w, lanes)
	return err
}

// Consumers lists the consumers of a lane's group and how much is pending for each.
func (s *Store) Consumers(ctx context.Context, lane string) (map[string]int64, error) {
	cs, err := s.cmd.XInfoConsumers(ctx, s.keys.Dispatch(lane), GroupAgents).Result()
	if err != nil {
		if isReplyError(err) && !IsUnavailable(err) {
			return nil, nil // no stream or no group
		}
		return nil, err
	}
	m := make(map[string]int64, len(cs))
	for _, c := range cs {
		m[c.Name] = c.Pending
	}
	return m, nil
}

// DropConsumer removes a consumer without pending entries whose worker is dead or unknown.
func (s *Store) DropConsumer(ctx context.Context, w string, lanes []string) error {
	_, err := s.Bury(ctx, task.WorkerID(w), lanes)
	return err
}

// Lanes lists all lanes of all queues.
func (s *Store) Lanes(ctx context.Context) ([]string, error) {
	qs, err := s.QueueNames(ctx)
	if err != nil {
		return nil, err
	}
	var out []string
	sort.Strings(qs)
	for _, q := range qs {
		for _, p := range Priorities {
			out = append(out, Lane(q, p))
		}
	}
	return out, nil
}

// Workers lists the registered workers, with Beating and Dead as they are now.
func (s *Store) Workers(ctx context.Context) ([]WorkerMeta, error) {
	ids, err := s.cmd.ZRange(ctx, s.keys.Workers(), 0, -1).Result()
	if err != nil {
		return nil, err
	}
	return s.workerMetas(ctx, ids)
}

func (s *Store) workerMetas(ctx context.Context, ids []string) ([]WorkerMeta, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	metas := make([]*redis.MapStringStringCmd, len(ids))
	beats := make([]*redis.IntCmd, len(ids))
	_, err := s.cmd.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, id := range ids {
			metas[i] = p.HGetAll(ctx, s.keys.WorkerMeta(id))
			beats[i] = p.Exists(ctx, s.keys.WorkerBeat(id))
		}
		return nil
	})
	if err != nil && !errors.Is(err, redis.Nil) {
		return nil, err
	}
	var out []WorkerMeta
	for i, id := range ids {
		m := metas[i].Val()
		w := WorkerMeta{ID: task.WorkerID(id), Beating: beats[i].Val() == 1, Host: m["host"], Version: m["version"]}
		w.Slots, _ = strconv.Atoi(m["slots"])
		w.PID, _ = strconv.Atoi(m["pid"])
		w.Started = time.UnixMilli(number(m["started"]))
		w.Queues, w.Handlers = words(m["queues"]), words(m["handlers"])
		w.Draining = m["draining"] != ""
		// Without meta a worker cannot renew or claim: it is as good as dead.
		w.Dead = m["dead"] != "" || len(m) == 0
		for f := range m {
			if d, ok := strings.CutPrefix(f, "d:"); ok {
				w.Dispatchers = append(w.Dispatchers, d)
			}
		}
		sort.Strings(w.Dispatchers)
		out = append(out, w)
	}
	return out, nil
}

func words(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(s, ",")
}
