// Package logread reads the output of tasks for the dispatcher's API: it finds a logsink, streams from it, goes on with
// another one when it dies, and follows a task over its attempts to the end.
package logread

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// ErrNoLogsink means that no logsink is registered that could be asked.
var ErrNoLogsink = errors.New("no logsink can be reached: start one, or look at its log")

// Config of a Client. The zero value of a field means its default.
type Config struct {
	// Token is sent to logsinks.
	Token config.Secret
	// EndWait is how long the end of a log is waited for after its task has become final. 30s.
	EndWait time.Duration
	// LostWait replaces EndWait where the end probably never comes: an attempt lost with its worker, or one that was
	// followed by another. 2s.
	LostWait time.Duration
	// Patience is how long a read that does not follow looks for a logsink. 5s.
	Patience time.Duration
}

// Deps are what a Client works with.
type Deps struct {
	Store *store.Store
	// Logger may be nil.
	Logger *slog.Logger
	// Changes, if set, returns a channel that gets a value, or is closed, when the task may have become final or begun
	// another attempt, and what ends that. Without it followers look at the record once a second.
	Changes func(id task.ID) (changed <-chan struct{}, stop func())
}

// Client reads logs. It is safe for concurrent use.
type Client struct {
	cfg   Config
	st    *store.Store
	log   *slog.Logger
	http  *http.Client
	watch func(id task.ID) (<-chan struct{}, func())
}

// New makes a client. Close it after use.
func New(cfg Config, deps Deps) *Client {
	setDefault(&cfg.EndWait, 30*time.Second)
	setDefault(&cfg.LostWait, 2*time.Second)
	setDefault(&cfg.Patience, 5*time.Second)
	log := deps.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	watch := deps.Changes
	if watch == nil {
		watch = func(task.ID) (<-chan struct{}, func()) { return nil, func() {} }
	}
	transport := &http.Transport{
		DialContext:           (&net.Dialer{Timeout: 2 * time.Second}).DialContext,
		ResponseHeaderTimeout: 0, // a follower gets its header when the log begins
		DisableCompression:    true,
		MaxIdleConnsPerHost:   4,
		IdleConnTimeout:       30 * time.Second,
		ReadBufferSize:        64 << 10,
	}
	return &Client{cfg: cfg, st: deps.Store, log: log, http: &http.Client{Transport: transport}, watch: watch}
}

func setDefault(d *time.Duration, v time.Duration) {
	if *d == 0 {
		*d = v
	}
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Request asks for output.
type Request struct {
	// Task is a whole id.
	Task task.ID
	// Attempt is its number; 0 means the newest one that ran, and with Follow every later one too.
	Attempt uint32
	// Offset skips so many bytes of the first attempt.
	Offset uint64
	// Tail, if set, gives only the last so many lines of what is there.
	Tail *uint64
	// Stream gives only stdout (1) or stderr (2) of a task that keeps them apart; 0 gives all.
	Stream uint32
	// Follow waits for more, to the end of the task.
	Follow bool
}

// Read gives out pieces in order. The last piece of an attempt has no data, but End, when its log has ended, and Log.
// An error ends the sequence; store.ErrNotFound means that there is no such task. A task that never ran gives nothing.
func (c *Client) Read(ctx context.Context, req Request) iter.Seq2[*millracev1.ReadLogsResponse, error] {
	return func(yield func(*millracev1.ReadLogsResponse, error) bool) {
		r := &reader{c: c, req: req, yield: yield}
		err := r.run(ctx)
		if err != nil && !errors.Is(err, errStopped) {
			yield(nil, err)
		}
	}
}

// errStopped means that the caller has left the loop.
var errStopped = errors.New("stopped")

// reader is one Read.
type reader struct {
	c     *Client
	req   Request
	yield func(*millracev1.ReadLogsResponse, error) bool
}

func (r *reader) run(ctx context.Context) error {
	rec, err := r.c.st.Record(ctx, r.req.Task)
	if err != nil {
		return fmt.Errorf("read the record of task %s: %w", r.req.Task, err)
	}
	attempt := r.req.Attempt
	if attempt == 0 {
		attempt = newest(rec)
	}
	if !r.req.Follow {
		if attempt == 0 {
			return nil
		}
		return r.readOnce(ctx, attempt)
	}
	return r.follow(ctx, max(attempt, 1))
}

// newest is the last attempt that began; 0 when none did.
func newest(rec *store.Record) uint32 {
	if rec.State == task.Running {
		return rec.Attempt
	}
	if n := len(rec.Ends); n > 0 {
		return rec.Ends[n-1].GetAttempt()
	}
	return 0
}

// give hands a piece to the caller.
func (r *reader) give(p *millracev1.ReadLogsResponse) error {
	if !r.yield(p, nil) {
		return errStopped
	}
	return nil
}

// readOnce gives out what there is of an attempt.
func (r *reader) readOnce(ctx context.Context, attempt uint32) error {
	src := r.source(attempt, false)
	for {
		p, err := src.next(ctx)
		switch {
		case errors.Is(err, errNoLog):
			return r.giveEnd(ctx, attempt)
		case err != nil:
			return err
		}
		if err := r.give(p); err != nil || p.GetLog() != nil {
			src.close()
			return err
		}
	}
}

// giveEnd ends an attempt that has no log on disk, or none that ends.
func (r *reader) giveEnd(ctx context.Context, attempt uint32) error {
	view, err := r.c.st.LogView(ctx, string(r.req.Task), attempt)
	if err != nil {
		return fmt.Errorf("read the log state of task %s: %w", r.req.Task, err)
	}
	if view == nil {
		view = &millracev1.LogView{}
	}
	return r.give(&millracev1.ReadLogsResponse{Attempt: attempt, Offset: view.GetBytes(), End: view.GetComplete(), Log: view})
}
