package reaper

import (
	"fmt"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/millrace/millrace/internal/spec"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// loss is the move that an attempt of a dead worker makes: back to the queue, or, when it was lost too often, to the
// end with a dead letter that tells the story. w is the worker in whose name the entry was pending.
func (r *Reaper) loss(rec *store.Record, attempt uint32, w task.WorkerID) *store.Change {
	t := &millracev1.Task{}
	_ = proto.Unmarshal(rec.Spec, t) // what cannot be read has the default budget
	t.Id = string(rec.ID)
	owner := w
	if rec.State == task.Running {
		owner = rec.Owner
	}
	c := &store.Change{
		Move: task.Lose, ID: rec.ID, Guess: rec.Snapshot, Spec: t, SpecBytes: rec.Spec, Retention: spec.Retention(t),
		In: task.Input{Attempt: attempt, Worker: owner, Dead: true, Acked: true}, Reason: millracev1.Reason_REASON_WORKER_LOST, Ends: rec.Ends,
	}
	c.End = &millracev1.AttemptEnd{
		Attempt: attempt, Worker: string(owner), Reason: millracev1.Reason_REASON_WORKER_LOST,
		Message: fmt.Sprintf("its worker %s died, froze or was cut off", owner), StartedAt: timestamppb.New(rec.Started), EndedAt: timestamppb.New(r.st.Now()),
	}
	if rec.State == task.Running && int(rec.Lost)+1 >= spec.MaxLost(t) {
		c.Move = task.LoseFinal
		c.End.Message += fmt.Sprintf("; agent lost %d times", rec.Lost+1)
	}
	return c
}
