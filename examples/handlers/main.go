// Command handlers is an agent of its own: it runs Go functions in its process, for tasks that call them by name.
//
//	go run ./examples/handlers
//	redis-cli XADD tasks '*' json '{"queue":"images","call":{"handler":"resize","payload":"eyJ3IjozMDAsImgiOjIwMH0="}}'
//
// It is configured like every agent, by MILLRACE_*; the queue is "images" here, so that agents without this handler do
// not get such tasks.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/millrace/millrace/agent"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "handlers:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	cfg, err := agent.ConfigFromEnv()
	if err != nil {
		return err
	}
	if os.Getenv("MILLRACE_QUEUES") == "" {
		cfg.Queues = []string{"images"}
	}
	a, err := agent.New(cfg, agent.Deps{Log: slog.New(slog.NewTextHandler(os.Stderr, nil))}, agent.Handle("resize", resize))
	if err != nil {
		return err
	}
	return a.Run(ctx)
}

// size is the payload of a resize.
type size struct{ W, H int }

// resize computes the size of a picture that fits into 100 × 100. A real one would move pixels, look at ctx between rows,
// and write (c.ID, c.Attempt) beside its output, so that a later attempt can be told from an earlier one.
func resize(ctx context.Context, c *agent.Call) ([]byte, error) {
	var s size
	if err := json.Unmarshal(c.Payload, &s); err != nil {
		return nil, fmt.Errorf(`payload: %w: want {"w": 300, "h": 200}`, err)
	}
	if s.W <= 0 || s.H <= 0 {
		return nil, errors.New("w and h must be positive")
	}
	fmt.Fprintf(c.Output, "resizing %d × %d, attempt %d\n", s.W, s.H, c.Attempt)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	longest := max(s.W, s.H, 100)
	return json.Marshal(size{s.W * 100 / longest, s.H * 100 / longest})
}
