package main

import (
	"github.com/spf13/cobra"

	"github.com/millrace/millrace/agent"
)

func agentCmd() *cobra.Command {
	return serviceCmd("agent", "Run an agent: it pulls tasks and runs them",
		func(c *agent.Config) shared { return shared{c.Redis, c.Auth, c.Ops, c.Log} },
		func(c *agent.Config, h *host) (runnable, error) { return buildAgent(*c, h) })
}

func buildAgent(cfg agent.Config, h *host) (*agent.Agent, error) {
	return agent.New(cfg, agent.Deps{
		Store: h.store, Log: h.log, Registry: h.registry, Status: h.status, Guard: guardLink,
		Hurry: h.signals.hurry, Version: buildVersion(),
	})
}
