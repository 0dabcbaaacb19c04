// Package api serves millrace to people and programs: the Connect services of proto/millrace/v1 as one http.Handler,
// which a dispatcher mounts. Connect, gRPC, gRPC-Web and plain HTTP with JSON all work on the same paths.
//
// It reads Redis through the store and asks the dispatcher for the two things that change tasks (Admitter and
// Canceller). It holds no state but the waiters of the moment, so that a client may go on at any other dispatcher.
package api

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/spec"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// Admitter takes tasks in.
type Admitter interface {
	// Admit checks a task, gives it an id if it has none, and writes its record; it is in Redis when Admit returns
	// without an error. Created is false when the same task was there already. The error is a *Refusal when the task
	// itself is at fault, else one of the store. Safe for concurrent use.
	Admit(ctx context.Context, t *millracev1.Task) (id string, created bool, err error)
}

// Canceller cancels tasks.
type Canceller interface {
	// Cancel makes the cancel move and tells the worker. It returns store.ErrNotFound when there is no such task.
	// Safe for concurrent use.
	Cancel(ctx context.Context, id task.ID) (store.Outcome, error)
}

// Config of the API.
type Config struct {
	// Token that clients must show; empty for none, and then only requests for a local host name are answered.
	Token config.Secret
	// Limits of a task; a request may be a little larger.
	Limits spec.Limits
	// LogPatience is how long the end of a log is waited for after its task ended; 30s when 0.
	LogPatience time.Duration
}

// Deps is what the API needs.
type Deps struct {
	Store    *store.Store
	Admit    Admitter
	Cancel   Canceller
	Logs     LogReader
	Hub      *Hub // must be run by the caller
	Logger   *slog.Logger
	Registry prometheus.Registerer
}

// API serves both services.
type API struct {
	cfg     Config
	store   *store.Store
	admit   Admitter
	cancel  Canceller
	logs    LogReader
	log     *slog.Logger
	metrics *metrics
	hub     *Hub
}

const defaultLogPatience = 30 * time.Second

// New builds the API. It starts nothing.
func New(cfg Config, deps Deps) (*API, error) {
	if deps.Store == nil || deps.Admit == nil || deps.Cancel == nil || deps.Logs == nil || deps.Hub == nil {
		return nil, errors.New("api: store, admitter, canceller, log reader and hub are needed")
	}
	if cfg.LogPatience <= 0 {
		cfg.LogPatience = defaultLogPatience
	}
	if deps.Logger == nil {
		deps.Logger = slog.New(slog.DiscardHandler)
	}
	return &API{
		cfg: cfg, store: deps.Store, admit: deps.Admit, cancel: deps.Cancel, logs: deps.Logs, log: deps.Logger,
		metrics: newMetrics(deps.Registry), hub: deps.Hub,
	}, nil
}

// Handler returns both services under their Connect paths. The server around it
// must bound the time for headers and end the contexts of requests when it stops; calls that wait end with them.
func (a *API) Handler() http.Handler { return a.routes() }
