package store

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/protobuf/proto"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// Hint words.
const (
	HintDue    = "due"  // something due now was put into `delayed`
	HintBell   = "bell" // entries were added to a lane: "bell <lane> <n>"
	HintCancel = "stop" // a running task got a cancel mark: "stop <worker> <attempt> <id>"
)

// Hint tells the dispatchers to look at something now. It may be lost; everything is also found by looking.
func (s *Store) Hint(ctx context.Context, words string) error {
	return s.cmd.Publish(ctx, s.keys.Hints(), words).Err()
}

// Hints delivers hints until ctx ends. resync is called after every (re)connection, because hints were missed.
func (s *Store) Hints(ctx context.Context, resync func(), hint func(words string)) error {
	return s.listen(ctx, s.sub.Subscribe(ctx, s.keys.Hints()), resync, hint)
}

// Expired delivers the names of keys that expired until ctx ends, when Redis is configured to tell. It is a hint:
// events come late under load, or never.
func (s *Store) Expired(ctx context.Context, resync func(), key func(name string)) error {
	s.enableExpired(ctx)
	ch := fmt.Sprintf("__keyevent@%d__:expired", s.cmd.Options().DB)
	return s.listen(ctx, s.sub.Subscribe(ctx, ch), resync, func(name string) {
		if k, ok := strings.CutPrefix(name, s.keys.prefix); ok {
			key(k)
		}
	})
}

// enableExpired merges the flags we need into notify-keyspace-events; without the right all works, by scanning.
func (s *Store) enableExpired(ctx context.Context) {
	if s.opts.Embedded {
		return
	}
	m, err := s.cmd.ConfigGet(ctx, "notify-keyspace-events").Result()
	if err != nil {
		s.log.Info("expired-key events cannot be had; scanning alone finds dead workers", "err", err)
		return
	}
	flags := m["notify-keyspace-events"]
	want := flags
	if !strings.Contains(want, "E") {
		want += "E"
	}
	if !strings.ContainsAny(want, "xA") {
		want += "x"
	}
	if want != flags {
		if err := s.cmd.ConfigSet(ctx, "notify-keyspace-events", want).Err(); err != nil {
			s.log.Info("expired-key events cannot be switched on; scanning alone finds dead workers", "err", err)
		}
	}
}

func (s *Store) listen(ctx context.Context, ps *redis.PubSub, resync func(), got func(string)) error {
	defer func() { _ = ps.Close() }()
	ch := ps.ChannelWithSubscriptions(redis.WithChannelSize(1000))
	for {
		select {
		case <-ctx.Done():
			return nil
		case m, ok := <-ch:
			if !ok {
				return nil
			}
			switch x := m.(type) {
			case *redis.Subscription:
				resync()
			case *redis.Message:
				got(x.Payload)
			}
		}
	}
}

// Tail follows `results` without a group, from now on, until ctx ends. It never misses an entry that is still in the
// stream; gap is called when entries may have been missed.
func (s *Store) Tail(ctx context.Context, gap func(), each func(*millracev1.Result)) error {
	last := ""
	for tries := 0; ctx.Err() == nil; {
		if last == "" {
			id, err := s.lastID(ctx, s.keys.Results())
			if err != nil {
				if !Backoff(ctx, tries) {
					return nil
				}
				tries++
				continue
			}
			last = id
			gap()
		}
		res, err := s.block.XRead(ctx, &redis.XReadArgs{Streams: []string{s.keys.Results(), last}, Count: 512, Block: time.Second}).Result()
		if errors.Is(err, redis.Nil) {
			tries = 0
			if id, err := s.lastID(ctx, s.keys.Results()); err == nil && lessID(id, last) {
				last = "" // the stream was deleted and began again
			}
			continue
		}
		if err != nil {
			if !Backoff(ctx, tries) {
				return nil
			}
			tries++
			gap() // Redis may have come back with older data
			if tries > 1 {
				last = ""
			}
			continue
		}
		tries = 0
		for _, m := range res[0].Messages {
			last = m.ID
			raw, ok := m.Values["r"].(string)
			r := &millracev1.Result{}
			if ok && proto.Unmarshal([]byte(raw), r) == nil {
				each(r)
			}
		}
	}
	return nil
}

func (s *Store) lastID(ctx context.Context, stream string) (string, error) {
	msgs, err := s.cmd.XRevRangeN(ctx, stream, "+", "-", 1).Result()
	if err != nil {
		return "", err
	}
	if len(msgs) == 0 {
		return "0-0", nil
	}
	return msgs[0].ID, nil
}

func lessID(a, b string) bool {
	am, as, _ := strings.Cut(a, "-")
	bm, bs, _ := strings.Cut(b, "-")
	if number(am) != number(bm) {
		return number(am) < number(bm)
	}
	return number(as) < number(bs)
}

// TrimResults deletes results older than age that every group has read and acknowledged. Groups other than ours that
// have not read for an hour are removed; their names are returned.
func (s *Store) TrimResults(ctx context.Context, age time.Duration) (stale []string, err error) {
	key := s.keys.Results()
	limit := fmt.Sprintf("%d-0", s.Now().Add(-age).UnixMilli())
	groups, err := s.cmd.XInfoGroups(ctx, key).Result()
	if err != nil {
		if isReplyError(err) && !IsUnavailable(err) {
			return nil, nil // no stream yet
		}
		return nil, err
	}
	hourAgo := fmt.Sprintf("%d-0", s.Now().Add(-time.Hour).UnixMilli())
	for _, g := range groups {
		low := g.LastDeliveredID
		if g.Pending > 0 {
			p, err := s.cmd.XPending(ctx, key, g.Name).Result()
			if err != nil {
				return stale, err
			}
			if p.Lower != "" && lessID(p.Lower, low) {
				low = p.Lower
			}
		}
		behind := lessID(low, limit)
		if behind && g.Name != GroupDispatcher {
			oldest, err := s.cmd.XRangeN(ctx, key, "("+low, "+", 1).Result()
			if err != nil {
				return stale, err
			}
			if len(oldest) > 0 && lessID(oldest[0].ID, hourAgo) {
				if err := s.cmd.XGroupDestroy(ctx, key, g.Name).Err(); err != nil {
					return stale, err
				}
				stale = append(stale, g.Name)
				continue
			}
		}
		if behind {
			limit = low
		}
	}
	return stale, s.cmd.XTrimMinID(ctx, key, limit).Err()
}

// dispatcherScript keeps a dispatcher known. Its first write is one that Redis accepts at its memory limit.
// KEYS: registration, registry. ARGV: id, address, TTL in ms, time in ms.
var dispatcherScript = redis.NewScript(`
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', KEYS[2], ARGV[4], ARGV[1])
return 0
`)

// RegisterDispatcher writes a dispatcher's address with a lifetime, so that agents find it.
func (s *Store) RegisterDispatcher(ctx context.Context, id, addr string, ttl time.Duration) error {
	return dispatcherScript.Run(ctx, s.cmd, []string{s.keys.Dispatcher(id), s.keys.Dispatchers()}, id, addr, ttl.Milliseconds(), s.Now().UnixMilli()).Err()
}

// UnregisterDispatcher removes a dispatcher that stopped in order.
func (s *Store) UnregisterDispatcher(ctx context.Context, id string) error {
	_, err := s.cmd.TxPipelined(ctx, func(p redis.Pipeliner) error {
		p.Del(ctx, s.keys.Dispatcher(id))
		p.ZRem(ctx, s.keys.Dispatchers(), id)
		return nil
	})
	return err
}

// DispatcherAddrs maps the ids of live dispatchers to their addresses. Those whose registration ended are forgotten.
func (s *Store) DispatcherAddrs(ctx context.Context) (map[string]string, error) {
	ids, err := s.cmd.ZRange(ctx, s.keys.Dispatchers(), 0, -1).Result()
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	keys := make([]string, len(ids))
	for i, id := range ids {
		keys[i] = s.keys.Dispatcher(id)
	}
	vals, err := s.cmd.MGet(ctx, keys...).Result()
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for i, v := range vals {
		if a, ok := v.(string); ok {
			out[ids[i]] = a
			continue
		}
		// Forget it once it has been silent for long: an id is never used again.
		sc, err := s.cmd.ZScore(ctx, s.keys.Dispatchers(), ids[i]).Result()
		if err == nil && s.Now().UnixMilli()-int64(sc) > time.Hour.Milliseconds() {
			_ = s.cmd.ZRem(ctx, s.keys.Dispatchers(), ids[i]).Err()
		}
	}
	return out, nil
}

// HintDead tells the reapers that a worker was declared dead: "dead <worker>".
const HintDead = "dead"

// Watch waits until an entry is added to one of the lanes, at most for the given time. It reads nothing from groups.
func (s *Store) Watch(ctx context.Context, lanes []string, block time.Duration) error {
	streams := make([]string, 0, 2*len(lanes))
	for _, l := range lanes {
		streams = append(streams, s.keys.Dispatch(l))
	}
	for range lanes {
		streams = append(streams, "$")
	}
	err := s.block.XRead(ctx, &redis.XReadArgs{Streams: streams, Count: 1, Block: max(block, time.Millisecond)}).Err()
	if errors.Is(err, redis.Nil) || isNoGroup(err) {
		return nil
	}
	return err
}
