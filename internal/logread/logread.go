// Package logread reads the output of attempts for the dispatcher's API: it finds a logsink, streams from it, and goes
// on with another one, at the same byte, when it dies.
package logread

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/millrace/millrace/internal/api"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/spec"
	"github.com/millrace/millrace/internal/store"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// ErrNoLogsink means that no logsink is registered that could be asked.
var ErrNoLogsink = errors.New("no logsink is running: start one, or look at its log")

// Config of a Client. The zero value of a field means its default.
type Config struct {
	// Token is sent to logsinks.
	Token config.Secret
	// Patience is how long a read that does not follow looks for a logsink. 5s.
	Patience time.Duration
}

// Client reads logs. It is safe for concurrent use.
type Client struct {
	cfg  Config
	st   *store.Store
	http *http.Client
}

var _ api.LogReader = (*Client)(nil)

// New makes a client. Close it after use.
func New(cfg Config, st *store.Store) *Client {
	if cfg.Patience == 0 {
		cfg.Patience = 5 * time.Second
	}
	// There is no limit to the time of an answer: a follower gets its header when the log begins.
	transport := &http.Transport{
		DialContext:         (&net.Dialer{Timeout: 2 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
		DisableCompression:  true,
		MaxIdleConnsPerHost: 4,
		IdleConnTimeout:     30 * time.Second,
		ReadBufferSize:      64 << 10,
	}
	return &Client{cfg: cfg, st: st, http: &http.Client{Transport: transport}}
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// ReadLog implements [api.LogReader]. With Follow it also ends when the record says that the attempt printed nothing:
// such an attempt has no log whose end could come.
func (c *Client) ReadLog(ctx context.Context, q api.LogQuery, piece func(api.LogPiece) error) (api.LogStatus, error) {
	if !spec.ValidID(string(q.Task)) {
		return api.LogStatus{}, fmt.Errorf("%q cannot be the id of a task", q.Task)
	}
	reading, stop := context.WithCancel(ctx)
	silent := make(chan bool, 1)
	if q.Follow {
		go func() { silent <- c.untilSilent(reading, q, stop) }()
	} else {
		silent <- false
	}
	status, err := c.read(reading, q, piece)
	stop()
	if <-silent {
		return api.LogStatus{Ended: true, View: &millracev1.LogView{Complete: true}}, nil
	}
	switch {
	case errors.Is(err, errNoLog):
		return c.withoutLog(ctx, q)
	case ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)):
		return status, nil
	default:
		return status, err
	}
}

func (c *Client) read(ctx context.Context, q api.LogQuery, piece func(api.LogPiece) error) (status api.LogStatus, err error) {
	src := &source{c: c, task: string(q.Task), attempt: q.Attempt, stream: q.Stream, follow: q.Follow, offset: q.Offset, tail: q.Tail}
	defer src.close()
	for {
		p, err := src.next(ctx)
		if err != nil {
			return status, err
		}
		if p.GetLog() != nil {
			return api.LogStatus{Ended: p.GetEnd(), View: p.GetLog()}, nil
		}
		if err := piece(api.LogPiece{Offset: p.GetOffset(), Stream: p.GetStream(), Data: p.GetData()}); err != nil {
			return status, err
		}
	}
}

// untilSilent looks at the record until the attempt has ended. If it printed nothing, the reading is stopped. A silent
// attempt is most likely a short one, so the first looks come soon.
func (c *Client) untilSilent(ctx context.Context, q api.LogQuery, stop func()) bool {
	pause := 5 * time.Millisecond
	for {
		end, err := c.st.AttemptEnd(ctx, q.Task, q.Attempt)
		if err == nil && end != nil {
			if end.GetNoOutput() {
				stop()
			}
			return end.GetNoOutput()
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return false
		case <-timer.C:
		}
		pause = min(pause*3/2, 500*time.Millisecond)
	}
}

// withoutLog tells what is known of an attempt that no logsink has a file of.
func (c *Client) withoutLog(ctx context.Context, q api.LogQuery) (api.LogStatus, error) {
	end, err := c.st.AttemptEnd(ctx, q.Task, q.Attempt)
	if err != nil {
		return api.LogStatus{}, fmt.Errorf("read how attempt %d of task %s ended: %w", q.Attempt, q.Task, err)
	}
	if end.GetNoOutput() {
		return api.LogStatus{Ended: true, View: &millracev1.LogView{Complete: true}}, nil
	}
	view, err := c.st.LogView(ctx, string(q.Task), q.Attempt)
	if err != nil {
		return api.LogStatus{}, fmt.Errorf("read the state of the log of task %s: %w", q.Task, err)
	}
	if view.GetBytes() > 0 {
		return api.LogStatus{View: view}, fmt.Errorf("the log of task %s attempt %d was deleted: MILLRACE_LOG_RETENTION or MILLRACE_LOG_MAX_BYTES is over", q.Task, q.Attempt)
	}
	return api.LogStatus{View: view}, nil
}
