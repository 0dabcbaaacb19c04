package store

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// AddTasks adds encoded Tasks to the public stream, as any producer may, in one pipeline. After an error some may have
// been added: give them ids, so that adding them again joins them.
func (s *Store) AddTasks(ctx context.Context, tasks [][]byte) error {
	_, err := s.cmd.Pipelined(ctx, func(p redis.Pipeliner) error {
		for _, t := range tasks {
			p.XAdd(ctx, &redis.XAddArgs{Stream: s.keys.Tasks(), Values: []any{"task", t}})
		}
		return nil
	})
	return err
}

// CommandStats is what Redis has done since it started.
type CommandStats struct {
	Calls int64         // commands, those that scripts call counted too
	CPU   time.Duration // of the server, user and system
}

// CommandStats reads the server's counters, for measurements.
func (s *Store) CommandStats(ctx context.Context) (CommandStats, error) {
	var out CommandStats
	info, err := s.cmd.Info(ctx, "stats", "cpu").Result()
	if err != nil {
		return out, err
	}
	f := infoFields(info)
	out.Calls = number(f["total_commands_processed"])
	for _, k := range []string{"used_cpu_user", "used_cpu_sys"} {
		sec, _ := strconv.ParseFloat(f[k], 64)
		out.CPU += time.Duration(sec * float64(time.Second))
	}
	return out, nil
}

// Wipe deletes every key of this namespace, which must not be empty: for measurements and tests.
func (s *Store) Wipe(ctx context.Context) error {
	if strings.TrimSuffix(s.keys.prefix, ":") == "" {
		return nil
	}
	for cursor := uint64(0); ; {
		keys, next, err := s.cmd.Scan(ctx, cursor, globEscape(s.keys.prefix)+"*", 1000).Result()
		if err != nil {
			return err
		}
		if len(keys) > 0 {
			if err := s.cmd.Unlink(ctx, keys...).Err(); err != nil {
				return err
			}
		}
		if cursor = next; cursor == 0 {
			return nil
		}
	}
}
