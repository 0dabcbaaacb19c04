package client

import (
	"context"

	"connectrpc.com/connect"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// Follow passes on the output of a task to the end, from attempt to attempt, as ReadLogs with follow does. When the
// connection breaks it goes on where it was. req is not changed. An error of piece ends it and is returned as it is.
func (c *Client) Follow(ctx context.Context, req *millracev1.ReadLogsRequest, piece func(*millracev1.ReadLogsResponse) error) error {
	f := &follower{
		c: c, piece: piece, one: req.GetAttempt() > 0,
		next: &millracev1.ReadLogsRequest{
			Id: req.GetId(), Attempt: req.GetAttempt(), Follow: true, Offset: req.GetOffset(),
			TailLines: req.TailLines, Stream: req.GetStream(),
		},
	}
	return f.run(ctx)
}

// follower is one Follow. Once an attempt has begun it is asked for by its number and offset, so that a break neither
// loses nor repeats a byte; the server then ends with that attempt, and the next one is asked for.
type follower struct {
	c     *Client
	piece func(*millracev1.ReadLogsResponse) error
	one   bool // only the attempt that was asked for
	next  *millracev1.ReadLogsRequest

	resumed bool
	out     outage
	failed  error // of piece
}

func (f *follower) run(ctx context.Context) error {
	for {
		err := f.stream(ctx)
		switch {
		case f.failed != nil:
			return f.failed
		case err != nil:
			if err := f.out.pause(ctx, f.c, err); err != nil {
				return err
			}
			f.resumed = f.next.GetAttempt() > 0 && !f.one
			continue
		case !f.resumed:
			return nil
		}
		// The server has ended with the attempt that we resumed. There may be later ones.
		done, err := f.ended(ctx)
		if err != nil {
			if err := f.out.pause(ctx, f.c, err); err != nil {
				return err
			}
			continue
		}
		if done {
			return nil
		}
	}
}

// ended reports whether the attempt at hand was the last one; if not, the next one is asked for.
func (f *follower) ended(ctx context.Context) (bool, error) {
	resp, err := f.c.Tasks.GetTask(ctx, connect.NewRequest(&millracev1.GetTaskRequest{Id: f.next.GetId()}))
	if err != nil {
		return false, err
	}
	t := resp.Msg.GetTask()
	if Final(t.GetState()) && t.GetAttempt() <= f.next.GetAttempt() {
		return true, nil
	}
	f.next.Offset, f.next.TailLines = 0, nil
	f.next.Attempt++
	return false, nil
}

// stream makes one call and passes on what it brings.
func (f *follower) stream(ctx context.Context) error {
	s, err := f.c.Tasks.ReadLogs(ctx, connect.NewRequest(f.next))
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }()
	for s.Receive() {
		f.c.reached.Store(true)
		f.out.over(f.c)
		p := s.Msg()
		f.note(p)
		if f.failed = f.piece(p); f.failed != nil {
			return f.failed
		}
	}
	if err := s.Err(); err != nil {
		if connect.IsWireError(err) {
			f.c.reached.Store(true)
		}
		return err
	}
	f.out.over(f.c)
	return nil
}

// note remembers where to go on.
func (f *follower) note(p *millracev1.ReadLogsResponse) {
	if p.GetAttempt() == 0 {
		return
	}
	f.next.Attempt = p.GetAttempt()
	f.next.Offset = p.GetOffset() + uint64(len(p.GetData()))
	f.next.TailLines = nil // what comes next is behind it
}

// Read passes on the output that is there now. It is not resumed.
func (c *Client) Read(ctx context.Context, req *millracev1.ReadLogsRequest, piece func(*millracev1.ReadLogsResponse) error) error {
	s, err := c.Tasks.ReadLogs(ctx, connect.NewRequest(req))
	if err != nil {
		return c.explain(err)
	}
	defer func() { _ = s.Close() }()
	for s.Receive() {
		if err := piece(s.Msg()); err != nil {
			return err
		}
	}
	if err := s.Err(); err != nil {
		return c.explain(err)
	}
	return nil
}

// Final reports whether nothing changes a task in that state any more.
func Final(s millracev1.State) bool {
	switch s {
	case millracev1.State_STATE_SUCCEEDED, millracev1.State_STATE_FAILED, millracev1.State_STATE_CANCELLED, millracev1.State_STATE_EXPIRED:
		return true
	default:
		return false
	}
}
