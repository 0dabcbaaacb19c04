// Package client talks to a dispatcher's API for the command line and for other programs of ours. It knows how to say
// what went wrong in words for people, and how to go on after a dispatcher was restarted: waits and logs are resumed
// where they were, for a bounded time, and a submit that is sent again makes no second task.
package client

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/spec"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
	"github.com/millrace/millrace/proto/millrace/v1/millracev1connect"
)

// DefaultServer is where a dispatcher listens unless told otherwise.
const DefaultServer = "http://127.0.0.1:8080"

// Config of a Client.
type Config struct {
	Server string        // DefaultServer when empty
	Token  config.Secret // shown to the server; may be empty
	// Patience is how long a wait or a log that was under way is resumed while the server does not answer; 1m when 0.
	Patience time.Duration
	// Notify is told, in a line for people, when the server went away and when it is back; may be nil.
	Notify func(line string)
}

// Client of one dispatcher, or of several behind one address. Safe for concurrent use.
type Client struct {
	Tasks millracev1connect.TaskServiceClient
	Fleet millracev1connect.FleetServiceClient

	cfg     Config
	http    *http.Client
	reached atomic.Bool // the server has answered once, so what fails later may pass
}

const (
	defaultPatience = time.Minute
	dialPatience    = 5 * time.Second
	// waitSlice is how long one call waits; proxies tend to cut off calls of a minute.
	waitSlice = 25 * time.Second
)

// New prepares a client; it does not connect.
func New(cfg Config) (*Client, error) {
	if cfg.Server == "" {
		cfg.Server = DefaultServer
	}
	u, err := url.Parse(cfg.Server)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("MILLRACE_SERVER=%s is not the address of a dispatcher: write http://host:8080 or https://host",
			config.RedactURL(cfg.Server))
	}
	if cfg.Patience <= 0 {
		cfg.Patience = defaultPatience
	}
	if cfg.Notify == nil {
		cfg.Notify = func(string) {}
	}
	transport := &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         (&net.Dialer{Timeout: dialPatience}).DialContext,
		TLSHandshakeTimeout: dialPatience,
		ForceAttemptHTTP2:   true,
	}
	c := &Client{cfg: cfg, http: &http.Client{Transport: transport}}
	opts := []connect.ClientOption{connect.WithInterceptors(c)}
	c.Tasks = millracev1connect.NewTaskServiceClient(c.http, cfg.Server, opts...)
	c.Fleet = millracev1connect.NewFleetServiceClient(c.http, cfg.Server, opts...)
	return c, nil
}

// Close ends idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Server is the address that the client talks to.
func (c *Client) Server() string { return config.RedactURL(c.cfg.Server) }

func (c *Client) authorize(h http.Header) {
	if c.cfg.Token != "" {
		h.Set("Authorization", "Bearer "+c.cfg.Token.Reveal())
	}
}

// WrapUnary shows the token and notes whether the server answers.
func (c *Client) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		c.authorize(req.Header())
		resp, err := next(ctx, req)
		if err == nil || connect.IsWireError(err) {
			c.reached.Store(true)
		}
		return resp, err
	}
}

// WrapStreamingClient shows the token.
func (c *Client) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, s connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, s)
		c.authorize(conn.RequestHeader())
		return conn
	}
}

// WrapStreamingHandler is not used by a client.
func (c *Client) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// submitTries bounds how often a submit is sent whose answer got lost.
const submitTries = 4

// Submit admits a task. A task without an id gets one here, so that sending it again when the answer was lost cannot
// make two of it.
func (c *Client) Submit(ctx context.Context, t *millracev1.Task) (id string, created bool, err error) {
	if t.GetId() == "" {
		t.Id = spec.NewID(time.Now())
	}
	for try := 1; ; try++ {
		resp, err := c.Tasks.Submit(ctx, connect.NewRequest(&millracev1.SubmitRequest{Task: t}))
		switch {
		case err == nil:
			// After a lost answer "was there already" only says that the first try came through.
			return resp.Msg.GetId(), resp.Msg.GetCreated() || try > 1, nil
		case try == submitTries || isRefused(err) || !passing(ctx, err):
			return "", false, c.explain(err)
		}
		if !sleep(ctx, time.Duration(try)*200*time.Millisecond) {
			return "", false, c.explain(ctx.Err())
		}
	}
}

// Get shows one task.
func (c *Client) Get(ctx context.Context, id string) (*millracev1.TaskView, error) {
	resp, err := c.Tasks.GetTask(ctx, connect.NewRequest(&millracev1.GetTaskRequest{Id: id}))
	if err != nil {
		return nil, c.explain(err)
	}
	return resp.Msg.GetTask(), nil
}

// Cancel asks for a task to end.
func (c *Client) Cancel(ctx context.Context, id string) (*millracev1.CancelTaskResponse, error) {
	resp, err := c.Tasks.CancelTask(ctx, connect.NewRequest(&millracev1.CancelTaskRequest{Id: id}))
	if err != nil {
		return nil, c.explain(err)
	}
	return resp.Msg, nil
}

// Wait returns the task when it is final, and with logs when its log is complete or not waited for any longer. It
// goes on when the server was away for a while.
func (c *Client) Wait(ctx context.Context, id string, logs bool) (*millracev1.TaskView, error) {
	var out outage
	for {
		resp, err := c.Tasks.WaitTask(ctx, connect.NewRequest(&millracev1.WaitTaskRequest{
			Id: id, Timeout: durationpb.New(waitSlice), Logs: logs,
		}))
		if err == nil {
			out.over(c)
			if resp.Msg.GetDone() {
				return resp.Msg.GetTask(), nil
			}
			continue
		}
		if err := out.pause(ctx, c, err); err != nil {
			return nil, err
		}
	}
}

// outage is a time in which the server does not answer.
type outage struct {
	since time.Time
	tries int
}

// pause waits before the next try. It returns an error when there is no sense in one.
func (o *outage) pause(ctx context.Context, c *Client, err error) error {
	if !c.reached.Load() || !passing(ctx, err) {
		return c.explain(err)
	}
	if o.since.IsZero() {
		o.since = time.Now()
	}
	if o.tries == 1 { // the first may be no more than a connection that was closed
		c.cfg.Notify(fmt.Sprintf("lost contact with %s: %s; trying again for %s", c.Server(), shortCause(err), c.cfg.Patience))
	}
	if time.Since(o.since) > c.cfg.Patience {
		return fmt.Errorf("%w (tried for %s; the task itself is not touched by this)", c.explain(err), c.cfg.Patience)
	}
	d := min(100*time.Millisecond<<min(o.tries, 5), 2*time.Second)
	o.tries++
	if !sleep(ctx, d) {
		return c.explain(ctx.Err())
	}
	return nil
}

// over notes that the server has answered.
func (o *outage) over(c *Client) {
	if o.tries > 1 {
		c.cfg.Notify("in contact again with " + c.Server())
	}
	*o = outage{}
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// Page calls yield for every task of a listing until it returns false or limit tasks were shown; 0 is no limit.
func (c *Client) Page(ctx context.Context, req *millracev1.ListTasksRequest, limit int, yield func(*millracev1.TaskView) bool) error {
	for shown := 0; ; {
		req.Limit = 1000
		if limit > 0 {
			req.Limit = uint32(min(limit-shown, 1000))
		}
		resp, err := c.Tasks.ListTasks(ctx, connect.NewRequest(req))
		if err != nil {
			return c.explain(err)
		}
		for _, t := range resp.Msg.GetTasks() {
			shown++
			if !yield(t) || limit > 0 && shown >= limit {
				return nil
			}
		}
		if req.PageToken = resp.Msg.GetNextPageToken(); req.PageToken == "" {
			return nil
		}
	}
}

// Workers lists the fleet.
func (c *Client) Workers(ctx context.Context) ([]*millracev1.WorkerView, error) {
	resp, err := c.Fleet.ListWorkers(ctx, connect.NewRequest(&millracev1.ListWorkersRequest{}))
	if err != nil {
		return nil, c.explain(err)
	}
	return resp.Msg.GetWorkers(), nil
}

// Queues lists the queues.
func (c *Client) Queues(ctx context.Context) ([]*millracev1.QueueView, error) {
	resp, err := c.Fleet.ListQueues(ctx, connect.NewRequest(&millracev1.ListQueuesRequest{}))
	if err != nil {
		return nil, c.explain(err)
	}
	return resp.Msg.GetQueues(), nil
}

// Dead lists the newest dead letters.
func (c *Client) Dead(ctx context.Context, limit int) ([]*millracev1.DeadView, error) {
	resp, err := c.Tasks.ListDead(ctx, connect.NewRequest(&millracev1.ListDeadRequest{Limit: uint32(max(limit, 0))}))
	if err != nil {
		return nil, c.explain(err)
	}
	return resp.Msg.GetLetters(), nil
}

// IsNotFound reports whether the error says that there is no such task.
func IsNotFound(err error) bool { return connect.CodeOf(err) == connect.CodeNotFound }
