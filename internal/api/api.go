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

// LogQuery says which output to read.
type LogQuery struct {
	Task    task.ID
	Attempt uint32
	// Started is when the attempt was claimed, as far as it is known; its files lie in a folder of that day or the next.
	Started time.Time
	// Offset in the attempt's output to begin at.
	Offset uint64
	// Tail begins so many lines before what is there now; nil for no such limit.
	Tail *uint64
	// Stream 1 is stdout, 2 stderr, 0 all.
	Stream uint32
	// Follow goes on until the attempt's output has ended.
	Follow bool
}

// LogPiece is a piece of output, in order.
type LogPiece struct {
	Offset uint64 // where Data begins in the attempt's output
	Stream uint32
	Data   []byte // valid until the callback returns
}

// LogStatus tells how far the reading came.
type LogStatus struct {
	// Ended: the end record is there and all before it was passed on.
	Ended bool
	// View of the log, nil when nothing is known of it.
	View *millracev1.LogView
}

// LogReader reads what logsinks have stored.
type LogReader interface {
	// ReadLog passes the output on until what is there was passed on, or with Follow until the end of the attempt's
	// output. It also ends, without an error and with the status so far, when ctx ends. Output that is not there (yet)
	// is no error. An error of piece is returned as it is. Safe for concurrent use.
	ReadLog(ctx context.Context, q LogQuery, piece func(LogPiece) error) (LogStatus, error)
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

// New builds the API. It starts nothing; Run does.
func New(cfg Config, deps Deps) (*API, error) {
	if deps.Store == nil || deps.Admit == nil || deps.Cancel == nil || deps.Logs == nil {
		return nil, errors.New("api: store, admitter, canceller and log reader are needed")
	}
	if cfg.LogPatience <= 0 {
		cfg.LogPatience = defaultLogPatience
	}
	if deps.Logger == nil {
		deps.Logger = slog.New(slog.DiscardHandler)
	}
	return &API{
		cfg: cfg, store: deps.Store, admit: deps.Admit, cancel: deps.Cancel, logs: deps.Logs, log: deps.Logger,
		metrics: newMetrics(deps.Registry), hub: newHub(deps.Store),
	}, nil
}

// Run keeps waiters informed until ctx ends. Without it they still find out, by looking every few seconds.
func (a *API) Run(ctx context.Context) error { return a.hub.Run(ctx) }

// Hub lets other parts of the process, such as live pages, wait for the end of tasks.
func (a *API) Hub() *Hub { return a.hub }

// Handler returns both services under their Connect paths. The server around it
// must bound the time for headers and end the contexts of requests when it stops; calls that wait end with them.
func (a *API) Handler() http.Handler { return a.routes() }
