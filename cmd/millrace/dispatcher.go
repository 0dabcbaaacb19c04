package main

import (
	"github.com/spf13/cobra"

	"github.com/millrace/millrace/dispatcher"
	"github.com/millrace/millrace/internal/api"
	"github.com/millrace/millrace/internal/logread"
	"github.com/millrace/millrace/internal/spec"
)

func dispatcherCmd() *cobra.Command {
	return serviceCmd("dispatcher", "Run a dispatcher: it admits and routes tasks, serves the API and keeps the control channel",
		func(c *dispatcher.Config) shared { return shared{c.Redis, c.Auth, c.Ops, c.Log} },
		func(c *dispatcher.Config, h *host) (runnable, error) { return buildDispatcher(*c, h) })
}

// buildDispatcher joins a dispatcher with its API:
//
//	HTTP ──▶ api ──▶ dispatcher.Admit, Cancel ──▶ store ──▶ Redis
//	            └──▶ logread ──▶ logsink over HTTP
func buildDispatcher(cfg dispatcher.Config, h *host) (*dispatcher.Service, error) {
	return dispatcher.New(cfg, dispatcher.Deps{
		Store: h.store, Log: h.log, Registry: h.registry, Status: h.status,
		API: func(s *dispatcher.Service) (dispatcher.API, error) {
			return api.New(api.Config{Token: cfg.Token, Limits: spec.Limits{TaskBytes: cfg.TaskLimit}},
				api.Deps{Store: h.store, Admit: s, Cancel: s, Logs: logread.New(logread.Config{Token: cfg.Token}, h.store), Logger: h.log, Registry: h.registry})
		},
	})
}
