package main

import (
	"github.com/spf13/cobra"

	"github.com/millrace/millrace/reaper"
)

func reaperCmd() *cobra.Command {
	return serviceCmd("reaper", "Run a reaper: it finds dead workers and gives their tasks to others",
		func(c *reaper.Config) shared { return shared{c.Redis, c.Auth, c.Ops, c.Log} },
		func(c *reaper.Config, h *host) (runnable, error) { return buildReaper(*c, h) })
}

func buildReaper(cfg reaper.Config, h *host) (*reaper.Reaper, error) {
	return reaper.New(cfg, reaper.Deps{Store: h.store, Log: h.log, Registry: h.registry, Status: h.status})
}
