// Command bench compares millrace with bare Redis Streams on one machine, in interleaved rounds, so that the ratio holds
// although the machine is noisy.
//
//	cd bench && go run . [-n 20000] [-rounds 5]
//
// "ours" is the whole system: a dispatcher and an agent with a no-op Go handler, records, leases and exactly one outcome.
// "bare" is the least that a task's way through two streams can cost: add, read and move, read, acknowledge, result,
// with pipelines of 128, no record and no script. It has a module of its own, so that rivals can be added here without
// the product carrying them.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/embedded"
)

const payload = 200

func main() {
	n := flag.Int("n", 20000, "tasks a round")
	rounds := flag.Int("rounds", 5, "rounds")
	aof := flag.Bool("aof", false, "Redis writes an append-only file")
	flag.Parse()
	if err := run(*n, *rounds, *aof); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(n, rounds int, aof bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	dir, err := os.MkdirTemp("", "millrace-bench-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	srv, err := embedded.Start(ctx, embedded.Options{Dir: dir + "/redis", Persist: aof})
	if err != nil {
		return err
	}
	defer srv.Stop()
	if srv.InMemory {
		return errors.New("redis-server is not installed; apt-get install redis-server")
	}
	sys, err := startOurs(ctx, srv.URL, dir, slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})))
	if err != nil {
		return err
	}
	var ours, bare, ratio []float64
	for range rounds {
		o, err := sys.round(ctx, n)
		if err != nil {
			return errors.Join(err, sys.stop())
		}
		b, err := bareRound(ctx, srv.Addr, n)
		if err != nil {
			return errors.Join(err, sys.stop())
		}
		ours, bare, ratio = append(ours, o), append(bare, b), append(ratio, o/b)
	}
	out := json.NewEncoder(os.Stdout)
	for name, v := range map[string][]float64{"ours tasks/s": ours, "bare two-hop life tasks/s": bare, "ratio": ratio} {
		slices.Sort(v)
		if err := out.Encode(map[string]any{"case": name, "median": v[len(v)/2], "least": v[0], "most": v[len(v)-1], "rounds": rounds, "n": n, "aof": aof}); err != nil {
			return err
		}
	}
	return sys.stop()
}

// bareRound is the two-hop life of n tasks: producer → in → mover → out → worker → done.
func bareRound(ctx context.Context, addr string, n int) (float64, error) {
	const batch = 128
	client := func() *redis.Client {
		return redis.NewClient(&redis.Options{Addr: addr, PoolSize: 1, MaxRetries: -1, ReadBufferSize: 256 << 10, WriteBufferSize: 256 << 10})
	}
	streams := []string{"bare:in", "bare:out", "bare:done"}
	setup := client()
	defer func() { _ = setup.Close() }()
	if err := setup.Del(ctx, streams...).Err(); err != nil {
		return 0, err
	}
	for _, s := range streams[:2] {
		if err := setup.XGroupCreateMkStream(ctx, s, "g", "0").Err(); err != nil {
			return 0, err
		}
	}
	body := make([]byte, payload)
	begun := time.Now()
	var g errgroup.Group
	g.Go(func() error {
		c := client()
		defer func() { _ = c.Close() }()
		for left := n; left > 0; left -= batch {
			if _, err := c.Pipelined(ctx, func(p redis.Pipeliner) error {
				for range min(batch, left) {
					p.XAdd(ctx, &redis.XAddArgs{Stream: streams[0], Values: []any{"t", body}})
				}
				return nil
			}); err != nil {
				return err
			}
		}
		return nil
	})
	hop := func(from, to, field string) func() error {
		return func() error {
			c := client()
			defer func() { _ = c.Close() }()
			for done := 0; done < n; {
				res, err := c.XReadGroup(ctx, &redis.XReadGroupArgs{Group: "g", Consumer: "c", Streams: []string{from, ">"}, Count: batch, Block: time.Second}).Result()
				if errors.Is(err, redis.Nil) {
					continue
				}
				if err != nil {
					return err
				}
				var ids []string
				if _, err := c.Pipelined(ctx, func(p redis.Pipeliner) error {
					for _, m := range res[0].Messages {
						ids = append(ids, m.ID)
						p.XAdd(ctx, &redis.XAddArgs{Stream: to, Values: []any{field, m.Values["t"]}})
					}
					p.XAck(ctx, from, "g", ids...)
					p.XDel(ctx, from, ids...)
					return nil
				}); err != nil {
					return err
				}
				done += len(ids)
			}
			return nil
		}
	}
	g.Go(hop(streams[0], streams[1], "t"))
	g.Go(hop(streams[1], streams[2], "r"))
	if err := g.Wait(); err != nil {
		return 0, err
	}
	rate := float64(n) / time.Since(begun).Seconds()
	return rate, setup.Del(ctx, streams...).Err()
}
