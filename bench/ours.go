package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"github.com/millrace/millrace/agent"
	"github.com/millrace/millrace/dispatcher"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/store"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// slots of the agent's handlers.
const slots = 200

// system is a dispatcher and an agent with a no-op handler.
type system struct {
	st    *store.Store
	ended chan struct{} // one for each result
	stop  func() error
}

func startOurs(ctx context.Context, url, dir string, log *slog.Logger) (*system, error) {
	st, err := store.New(store.Options{URL: url, Namespace: "ours", Readers: 6, Alone: true}, log)
	if err != nil {
		return nil, err
	}
	if _, err := st.Check(ctx, false); err != nil {
		return nil, err
	}
	var dc dispatcher.Config
	if err := config.Load(&dc); err != nil {
		return nil, err
	}
	dc.ControlAddr, dc.HTTPAddr = "127.0.0.1:0", "127.0.0.1:0"
	d, err := dispatcher.New(dc, dispatcher.Deps{Store: st, Log: log})
	if err != nil {
		return nil, err
	}
	ac, err := agent.ConfigFromEnv()
	if err != nil {
		return nil, err
	}
	ac.StateDir, ac.Slots, ac.DrainTimeout = dir+"/state", slots, 0
	a, err := agent.New(ac, agent.Deps{Store: st, Log: log}, agent.Handle("noop", func(context.Context, *agent.Call) ([]byte, error) { return nil, nil }))
	if err != nil {
		return nil, err
	}
	s := &system{st: st, ended: make(chan struct{}, 1<<16)}
	run, cancel := context.WithCancel(ctx)
	var g errgroup.Group
	g.Go(func() error { return d.Run(run) })
	g.Go(func() error { return a.Run(run) })
	g.Go(func() error { return st.Tail(run, func() {}, func(*millracev1.Result) { s.ended <- struct{}{} }) })
	s.stop = func() error {
		cancel()
		return errors.Join(g.Wait(), st.Close())
	}
	if err := a.Ready(ctx); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	_, err = s.round(ctx, 300) // scripts are loaded, connections made
	return s, err
}

// round produces and consumes n tasks and returns the rate.
func (s *system) round(ctx context.Context, n int) (float64, error) {
	task, err := proto.Marshal(&millracev1.Task{Work: &millracev1.Task_Call{Call: &millracev1.Call{Handler: "noop", Payload: bytes.Repeat([]byte("x"), payload)}}})
	if err != nil {
		return 0, err
	}
	begun := time.Now()
	var g errgroup.Group
	g.Go(func() error {
		for left := n; left > 0; left -= 128 {
			batch := make([][]byte, min(128, left))
			for i := range batch {
				batch[i] = task
			}
			if err := s.st.AddTasks(ctx, batch); err != nil {
				return err
			}
		}
		return nil
	})
	for range n {
		select {
		case <-s.ended:
		case <-ctx.Done():
			return 0, errors.Join(ctx.Err(), g.Wait())
		}
	}
	return float64(n) / time.Since(begun).Seconds(), g.Wait()
}
