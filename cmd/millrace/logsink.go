package main

import (
	"github.com/spf13/cobra"

	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/logsink"
)

// logsinkConfig adds to a logsink's own settings what every service has.
type logsinkConfig struct {
	config.Redis
	config.Auth
	config.Ops
	config.Log
	logsink.Config
}

func logsinkCmd() *cobra.Command {
	return serviceCmd("logsink", "Run a logsink: it drains log streams to files and serves them",
		func(c *logsinkConfig) shared { return shared{c.Redis, c.Auth, c.Ops, c.Log} },
		func(c *logsinkConfig, h *host) (runnable, error) { return buildLogsink(c.Config, c.Auth.Token, h) })
}

func buildLogsink(cfg logsink.Config, token config.Secret, h *host) (*logsink.Service, error) {
	cfg.Token = token
	return logsink.New(cfg, logsink.Deps{Store: h.store, Logger: h.log, Registerer: h.registry, Status: h.status})
}
