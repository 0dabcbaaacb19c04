package store

import (
	"context"
	"fmt"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/task"
)

// applyScript runs a batch of guarded items. It holds no policy: what to expect and what to do is composed in Go.
//
// KEYS: every key that the items name, referred to by its index.
// ARGV: number of items, then for each item
//
//	record, state, attempt, owner, cancel ("1" a mark stands, "0" none, "" not asked)
//	number of questions, each as: kind, then its words
//	  "ack" key group id    XACK of the entry must return 1; asked last, because a yes has removed it
//	  "dead" key            the worker whose meta this is is dead or buried
//	  "late" key member ms  its lease deadline in the index is older than ms; one that is not there is put back by the audit
//	number of commands, each as: name, key ("0" none), bind, number of words, the words
//	  bind "1" adds the reply of the command before as a last word, to store the id of a new entry
//
// A field of the record that is empty in the item is expected to be absent; state "n" expects no record.
// Returns for each item 1 when it was done, or else a list: the record's small fields as they are (see snapshotFields)
// when a guard failed, or a single text when a command failed; then nothing after it was done.
var applyScript = redis.NewScript(`
local p, out = 2, {}
for i = 1, tonumber(ARGV[1]) do
  local rec, st, at, ow, ca = KEYS[tonumber(ARGV[p])], ARGV[p+1], ARGV[p+2], ARGV[p+3], ARGV[p+4]
  p = p + 5
  local ok, bad = true, nil
  local f = redis.pcall('HMGET', rec, 's', 'a', 'w', 'c')
  if f.err then ok, bad = false, f.err
  elseif st == 'n' then ok = not f[1]
  else
    ok = f[1] == st and (f[2] or '') == at and (ow == '' or (f[3] or '') == ow)
    if ok and ca ~= '' then ok = (ca == '1') == (f[4] and true or false) end
  end
  for q = 1, tonumber(ARGV[p]) do
    local kind = ARGV[p+1]
    if kind == 'ack' then
      if ok then
        local n = redis.pcall('XACK', KEYS[tonumber(ARGV[p+2])], ARGV[p+3], ARGV[p+4])
        if n ~= 1 then ok = false; if type(n) == 'table' then bad = n.err end end
      end
      p = p + 4
    elseif kind == 'dead' then
      if ok then
        local m = redis.pcall('HMGET', KEYS[tonumber(ARGV[p+2])], 'dead', 'slots')
        ok = not m.err and (m[1] or not m[2]) and true or false
      end
      p = p + 2
    else
      if ok then
        local z = redis.pcall('ZSCORE', KEYS[tonumber(ARGV[p+2])], ARGV[p+3])
        ok = type(z) == 'string' and tonumber(z) < tonumber(ARGV[p+4])
      end
      p = p + 4
    end
  end
  p = p + 1
  local reply
  for c = 1, tonumber(ARGV[p]) do
    local name, key, bind, n = ARGV[p+1], ARGV[p+2], ARGV[p+3], tonumber(ARGV[p+4])
    if ok and not bad then
      if bind == '1' then
        local w = {unpack(ARGV, p + 5, p + 4 + n)}
        w[n+1] = reply
        reply = redis.pcall(name, KEYS[tonumber(key)], unpack(w))
      elseif key == '0' then reply = redis.pcall(name, unpack(ARGV, p + 5, p + 4 + n))
      else reply = redis.pcall(name, KEYS[tonumber(key)], unpack(ARGV, p + 5, p + 4 + n)) end
      if type(reply) == 'table' and reply.err then bad = name .. ': ' .. reply.err end
    end
    p = p + 4 + n
  end
  p = p + 1
  if bad then out[i] = {bad}
  elseif ok then out[i] = 1
  else out[i] = redis.call('HMGET', rec, 's', 'a', 'w', 'c', 'f', 'l', 'e', 'q') end
end
return out
`)

// item is one guarded change. It is built in Go and run by applyScript.
type item struct {
	rec       string
	expect    task.Record
	anyOwner  bool
	anyCancel bool
	asks      []ask
	cmds      []cmd
}

type ask struct {
	kind, key string
	words     []any
}

type cmd struct {
	name, key string
	bind      bool
	words     []any
}

// verdict of one item.
type verdict struct {
	done bool
	now  Snapshot // when a guard failed
	err  error    // when a command failed
}

// Snapshot is the small part of a record that moves are chosen on.
type Snapshot struct {
	task.Record
	Entry string // id of the current dispatch entry, "" when there is none
	Lane  string // where it waits or waited
}

// batch encodes items; keys are sent once each.
type batch struct {
	keys  []string
	index map[string]string
	args  []any
	n     int
}

func newBatch(size int) *batch {
	return &batch{index: make(map[string]string, size+8), args: append(make([]any, 0, size*48), 0)}
}

func (b *batch) key(k string) string {
	if k == "" {
		return "0"
	}
	if i, ok := b.index[k]; ok {
		return i
	}
	b.keys = append(b.keys, k)
	i := strconv.Itoa(len(b.keys))
	b.index[k] = i
	return i
}

func (b *batch) add(it *item) {
	b.n++
	cancel, owner := "0", string(it.expect.Owner)
	if it.expect.Cancel {
		cancel = "1"
	}
	if it.anyCancel {
		cancel = ""
	}
	if it.anyOwner {
		owner = ""
	}
	b.args = append(b.args, b.key(it.rec), string(it.expect.State), strconv.FormatUint(uint64(it.expect.Attempt), 10), owner, cancel)
	b.args = append(b.args, len(it.asks))
	for _, q := range it.asks {
		b.args = append(b.args, q.kind, b.key(q.key))
		b.args = append(b.args, q.words...)
	}
	b.args = append(b.args, len(it.cmds))
	for _, c := range it.cmds {
		bind := "0"
		if c.bind {
			bind = "1"
		}
		b.args = append(b.args, c.name, b.key(c.key), bind, len(c.words))
		b.args = append(b.args, c.words...)
	}
}

// apply runs the items in one script. The error is Redis' or the network's: then nothing is known about any item.
func (s *Store) apply(ctx context.Context, items []*item) ([]verdict, error) {
	if len(items) == 0 {
		return nil, nil
	}
	b := newBatch(len(items))
	for _, it := range items {
		b.add(it)
	}
	b.args[0] = b.n
	reply, err := applyScript.Run(ctx, s.cmd, b.keys, b.args...).Slice()
	if err != nil {
		return nil, err
	}
	if len(reply) != len(items) {
		return nil, fmt.Errorf("apply: %d replies for %d items", len(reply), len(items))
	}
	out := make([]verdict, len(items))
	for i, r := range reply {
		switch v := r.(type) {
		case int64:
			out[i].done = true
		case []any:
			if len(v) == 1 {
				out[i].err = fmt.Errorf("%s: %v", items[i].rec, v[0])
				continue
			}
			out[i].now = snapshot(v)
		default:
			return nil, fmt.Errorf("apply: unexpected reply %T", r)
		}
	}
	return out, nil
}

// snapshotFields are read for a Snapshot, in this order, here and in applyScript.
var snapshotFields = []string{"s", "a", "w", "c", "f", "l", "e", "q"}

func snapshot(v []any) Snapshot {
	var n Snapshot
	n.State = task.None
	if st := text(v, 0); st != "" {
		n.State = task.State(st[0])
	}
	n.Attempt = uint32(number(text(v, 1)))
	n.Owner = task.WorkerID(text(v, 2))
	n.Cancel = text(v, 3) != ""
	n.Failures = uint32(number(text(v, 4)))
	n.Lost = uint32(number(text(v, 5)))
	n.Entry, n.Lane = text(v, 6), text(v, 7)
	return n
}

func text(v []any, i int) string {
	if i >= len(v) {
		return ""
	}
	switch x := v[i].(type) {
	case string:
		return x
	case int64:
		return strconv.FormatInt(x, 10)
	default:
		return ""
	}
}

func number(s string) int64 {
	n, _ := strconv.ParseInt(s, 10, 64)
	return n
}
