package dispatcher

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/spec"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// Cancel cancels a task: at once when it does not run, else its record gets a mark first, so that no crash forgets
// it, and then its worker is told. Done tells whether this call changed anything; Now what the task is.
func (s *Service) Cancel(ctx context.Context, id task.ID) (store.Outcome, error) {
	for range 8 {
		r, err := s.st.Record(ctx, id)
		if err != nil {
			return store.Outcome{}, err
		}
		if r.State.Final() {
			return store.Outcome{Now: r.Snapshot}, nil
		}
		if r.State == task.Running && r.Cancel {
			s.tell(ctx, id, r)
			return store.Outcome{Done: true, Now: r.Snapshot}, nil
		}
		out, err := s.st.Do(ctx, []*store.Change{finalChange(task.Cancel, id, r)})
		if err != nil {
			return store.Outcome{}, err
		}
		o := out[0]
		if o.Err != nil {
			return o, o.Err
		}
		if o.Done {
			s.met.cancelled.Inc()
			s.log.Info("task cancelled", logkey.Task, id, logkey.State, o.Now.State.String(), logkey.Attempt, o.Now.Attempt)
			if o.Now.State == task.Running {
				r.Snapshot = o.Now
				s.tell(ctx, id, r)
			}
			return o, nil
		}
		// The task moved on between the look and the move: look again.
	}
	return store.Outcome{}, fmt.Errorf("cancel %s: the task changes too fast, try again", id)
}

// tell sends CANCEL to the owner; when it is connected to another dispatcher, through that one. If all is lost the
// agent sees the mark at its next renewal.
func (s *Service) tell(ctx context.Context, id task.ID, r *store.Record) {
	t := &millracev1.Task{}
	_ = proto.Unmarshal(r.Spec, t)
	m := &millracev1.ControlCancel{TaskId: string(id), Attempt: r.Attempt, Grace: durationpb.New(spec.Grace(t)), Reason: "cancelled"}
	if s.ctl.Send(string(r.Owner), m) {
		return
	}
	if err := s.st.Hint(ctx, fmt.Sprintf("%s %s %d %s", store.HintCancel, r.Owner, r.Attempt, id)); err != nil {
		s.errs.Warn(ctx, "hint", "hint not sent, the agent sees the cancel at its next renewal", err)
	}
}
