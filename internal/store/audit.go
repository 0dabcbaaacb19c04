package store

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/task"
)

// ScanTasks returns the ids of one page of records and the next cursor, 0 at the end. For slow background walks only.
func (s *Store) ScanTasks(ctx context.Context, cursor uint64, count int64) ([]task.ID, uint64, error) {
	keys, next, err := s.cmd.ScanType(ctx, cursor, globEscape(s.keys.TaskOf())+"*", count, "hash").Result()
	if err != nil {
		return nil, cursor, err
	}
	var ids []task.ID
	for _, k := range keys {
		ids = append(ids, task.ID(strings.TrimPrefix(k, s.keys.TaskOf())))
	}
	return ids, next, nil
}

// Placed tells for each record whether the stream or index that its state names knows it. A task in another state is
// where it belongs.
func (s *Store) Placed(ctx context.Context, ids []task.ID, snaps []Snapshot) ([]bool, error) {
	cmds := make([]redis.Cmder, len(ids))
	_, err := s.cmd.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, sn := range snaps {
			switch sn.State {
			case task.Queued:
				if sn.Entry != "" {
					cmds[i] = p.XRange(ctx, s.keys.Dispatch(sn.Lane), sn.Entry, sn.Entry)
				}
			case task.Delayed:
				cmds[i] = p.ZScore(ctx, s.keys.Delayed(), string(ids[i]))
			case task.Running:
				cmds[i] = p.ZScore(ctx, s.keys.Running(), string(ids[i]))
			default:
			}
		}
		return nil
	})
	if err != nil && !isReplyError(err) && !errors.Is(err, redis.Nil) {
		return nil, err
	}
	out := make([]bool, len(ids))
	for i, c := range cmds {
		switch x := c.(type) {
		case nil:
			out[i] = snaps[i].State != task.Queued // queued without an entry is out of place
		case *redis.XMessageSliceCmd:
			out[i] = len(x.Val()) > 0
		default:
			out[i] = !errors.Is(c.Err(), redis.Nil)
		}
	}
	return out, nil
}

// Remind puts an id back into an index, unless it is there.
func (s *Store) Remind(ctx context.Context, i Index, id task.ID, at time.Time) error {
	return s.cmd.ZAddNX(ctx, s.index(i), redis.Z{Score: float64(at.UnixMilli()), Member: string(id)}).Err()
}

// HasGroups tells for each lane whether its stream and group exist.
func (s *Store) HasGroups(ctx context.Context, lanes []string) ([]bool, error) {
	cmds := make([]*redis.XPendingCmd, len(lanes))
	_, err := s.cmd.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, l := range lanes {
			cmds[i] = p.XPending(ctx, s.keys.Dispatch(l), GroupAgents)
		}
		return nil
	})
	if err != nil && !isReplyError(err) {
		return nil, err
	}
	out := make([]bool, len(lanes))
	for i, c := range cmds {
		out[i] = c.Err() == nil
	}
	return out, nil
}
