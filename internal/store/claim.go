package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/task"
)

// ErrFenced says that the worker was declared dead or buried. It must kill what it runs and go on under a new id.
var ErrFenced = errors.New("worker was declared dead")

// claimScript takes exactly as many tasks as asked for from the streams in their order.
//
// KEYS: worker meta, running, dead, then the dispatch streams.
// ARGV: worker, how many, lease in ms, prefix of records, group.
// Entries that do not belong to a queued record of that attempt are stale copies and dropped; entries without any
// record go to the dead letters. Returns 0 when the worker is fenced, else the server's time in ms and for each task:
// id, attempt, spec, entry, index of the stream from 1, failures, lost, "1" when it expired and was not claimed.
var claimScript = redis.NewScript(`
local m = redis.call('HMGET', KEYS[1], 'dead', 'slots')
if m[1] or not m[2] then return 0 end
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local want, group = tonumber(ARGV[2]), ARGV[5]
local out = {now}
for k = 4, #KEYS do
  while want > 0 do
    local r = redis.pcall('XREADGROUP', 'GROUP', group, ARGV[1], 'COUNT', want, 'STREAMS', KEYS[k], '>')
    if type(r) == 'table' and r.err then
      if string.sub(r.err, 1, 7) == 'NOGROUP' and redis.call('EXISTS', KEYS[k]) == 1 then
        redis.call('XGROUP', 'CREATE', KEYS[k], group, '0')
        r = redis.pcall('XREADGROUP', 'GROUP', group, ARGV[1], 'COUNT', want, 'STREAMS', KEYS[k], '>')
      end
      if type(r) == 'table' and r.err then r = false end
    end
    if not r or not r[1] then break end
    for _, e in ipairs(r[1][2]) do
      local id, a
      for j = 1, #e[2], 2 do
        if e[2][j] == 'i' then id = e[2][j+1] elseif e[2][j] == 'a' then a = e[2][j+1] end
      end
      local rec = ARGV[4] .. (id or '')
      local f = id and redis.pcall('HMGET', rec, 's', 'a', 'p', 'f', 'l', 'x') or {}
      if f[1] == 'q' and f[2] == a then
        local gone = f[6] and tonumber(f[6]) <= now
        if gone then
          redis.call('HSET', rec, 'e', e[1])
        else
          redis.call('HSET', rec, 's', 'r', 'w', ARGV[1], 'e', e[1], 'b', now)
          redis.call('ZADD', KEYS[2], now + ARGV[3], id)
          want = want - 1
        end
        out[#out+1] = {id, a, f[3], e[1], k - 3, f[4] or '', f[5] or '', gone and '1' or ''}
      else
        redis.call('XACK', KEYS[k], group, e[1])
        redis.call('XDEL', KEYS[k], e[1])
        if not f[1] then
          redis.call('XADD', KEYS[3], '*', 'code', f.err and 'bad_entry' or 'record_missing', 'source', KEYS[k], 'entry', e[1], 'task', id or '', 'attempt', a or '')
        end
      end
    end
  end
end
return out
`)

// Claimed is a task that a worker owns now.
type Claimed struct {
	ID      task.ID
	Attempt uint32
	Spec    []byte // encoded Task
	At      Snapshot
	// Expired: its time is over; it was not claimed and the caller has to make the Expire move.
	Expired bool
}

// ClaimFor names the worker that claims and the lanes it looks at, in order.
type ClaimFor struct {
	Worker task.WorkerID
	Lanes  []string
	Want   int
	Lease  time.Duration
}

// Claim takes up to Want tasks. ErrFenced when the worker is dead for Redis. After any other error tasks may have
// been claimed all the same: the next renewals show them.
func (s *Store) Claim(ctx context.Context, c ClaimFor) ([]Claimed, error) {
	if c.Want <= 0 {
		return nil, nil
	}
	keys := make([]string, 0, 3+len(c.Lanes))
	keys = append(keys, s.keys.WorkerMeta(string(c.Worker)), s.keys.Running(), s.keys.Dead())
	for _, l := range c.Lanes {
		keys = append(keys, s.keys.Dispatch(l))
	}
	reply, err := claimScript.Run(ctx, s.cmd, keys, string(c.Worker), c.Want, c.Lease.Milliseconds(), s.keys.TaskOf(), GroupAgents).Result()
	if err != nil {
		return nil, err
	}
	rows, ok := reply.([]any)
	if !ok || len(rows) == 0 {
		return nil, ErrFenced
	}
	if ms, ok := rows[0].(int64); ok {
		s.noteTime(ms)
	}
	out := make([]Claimed, 0, len(rows)-1)
	for _, r := range rows[1:] {
		v, ok := r.([]any)
		if !ok || len(v) < 8 {
			return out, fmt.Errorf("claim: unexpected reply %T", r)
		}
		lane := int(v[4].(int64)) - 1
		cl := Claimed{ID: task.ID(text(v, 0)), Attempt: uint32(number(text(v, 1))), Spec: []byte(text(v, 2)), Expired: text(v, 7) == "1"}
		cl.At = Snapshot{Record: task.Record{
			State: task.Running, Attempt: cl.Attempt, Owner: c.Worker,
			Failures: uint32(number(text(v, 5))), Lost: uint32(number(text(v, 6))),
		}, Entry: text(v, 3), Lane: c.Lanes[lane]}
		if cl.Expired {
			cl.At.State, cl.At.Owner = task.Queued, ""
		}
		out = append(out, cl)
	}
	return out, nil
}
