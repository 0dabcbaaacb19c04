package api

import (
	"context"
	"fmt"
	"iter"
	"time"

	"connectrpc.com/connect"

	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// LogRequest asks for output.
type LogRequest struct {
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

// LogReader reads what logsinks have stored.
type LogReader interface {
	// ReadLogs gives out pieces in order. The last piece of an attempt has no data, but Log, and End when its output is
	// complete. An error ends the sequence. A task that never ran gives nothing; with Follow it is waited for. Safe for
	// concurrent use.
	ReadLogs(ctx context.Context, req LogRequest) iter.Seq2[*millracev1.ReadLogsResponse, error]
}

// maxPiece bounds one message of a stream of output.
const maxPiece = 256 << 10

// ReadLogs streams the output of a task. Without Follow it passes on what is there. With Follow it waits for the
// task to start, and goes on from attempt to attempt until the task has ended and its log is complete, or not waited
// for any longer.
func (s *taskService) ReadLogs(ctx context.Context, req *connect.Request[millracev1.ReadLogsRequest], out *connect.ServerStream[millracev1.ReadLogsResponse]) error {
	bodyArrived(ctx)
	const what = "read the log"
	r, err := s.find(ctx, what, req.Msg.GetId())
	if err != nil {
		return err
	}
	if ran, n := ranAttempt(r), req.Msg.GetAttempt(); n > ran && !req.Msg.GetFollow() {
		return connect.NewError(connect.CodeNotFound, fmt.Errorf(
			"task %s has made %d attempts, there is no attempt %d: leave the number out for the newest", r.ID, ran, n))
	}
	if req.Msg.GetStream() > 2 {
		return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("stream %d: use 1 for stdout, 2 for stderr, 0 for both", req.Msg.GetStream()))
	}
	defer writeUntil(ctx, time.Time{})
	pieces := s.logs.ReadLogs(ctx, LogRequest{Task: r.ID, Attempt: req.Msg.GetAttempt(), Offset: req.Msg.GetOffset(),
		Tail: req.Msg.TailLines, Stream: req.Msg.GetStream(), Follow: req.Msg.GetFollow()})
	for p, err := range pieces {
		if err != nil {
			return lookupError(what, string(r.ID), err)
		}
		if err := send(ctx, out, p); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return wireError(what, ctx.Err())
	}
	return nil
}

// send passes on one piece, in parts that no client has to fear.
func send(ctx context.Context, out *connect.ServerStream[millracev1.ReadLogsResponse], p *millracev1.ReadLogsResponse) error {
	for len(p.GetData()) > maxPiece {
		part := &millracev1.ReadLogsResponse{Attempt: p.GetAttempt(), Offset: p.GetOffset(), Data: p.GetData()[:maxPiece], Stream: p.GetStream()}
		if err := sendOne(ctx, out, part); err != nil {
			return err
		}
		p.Data, p.Offset = p.GetData()[maxPiece:], p.GetOffset()+maxPiece
	}
	return sendOne(ctx, out, p)
}

func sendOne(ctx context.Context, out *connect.ServerStream[millracev1.ReadLogsResponse], p *millracev1.ReadLogsResponse) error {
	writeUntil(ctx, time.Now().Add(writePatience))
	return out.Send(p)
}
