package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/millrace/millrace/internal/api"
	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/ops"
	"github.com/millrace/millrace/internal/spec"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// errUnknownQueue: no agent ever served the queue.
var errUnknownQueue = errors.New("unknown queue")

// batchSize of intake: large enough to share the cost of a script among many tasks, small enough that one script
// holds Redis for about a millisecond.
const batchSize = 128

// Admit takes one task from the API: it is in Redis when the call returns. created is false when the same task was
// there already. The error is an *api.Refusal when the task itself is at fault. Safe for concurrent use.
func (s *Service) Admit(ctx context.Context, t *millracev1.Task) (id string, created bool, err error) {
	if why := s.full.Load(); why != nil {
		return "", false, api.Refuse(api.CodeFull, fmt.Errorf("no task is admitted at present: %s: try again later", *why))
	}
	if err := spec.Validate(t, s.limits); err != nil {
		return "", false, api.Refuse(spec.Code(err), err)
	}
	if err := s.checkQueue(ctx, t); errors.Is(err, errUnknownQueue) {
		return "", false, api.Refuse(spec.CodeBadTask, err)
	} else if err != nil {
		return "", false, err
	}
	if t.GetId() == "" {
		t = proto.CloneOf(t)
		t.Id = spec.NewID(s.st.Now())
	}
	c, err := s.admission(t, store.Entry{})
	if err != nil {
		return "", false, err
	}
	out, err := s.st.Do(ctx, []*store.Change{c})
	if err != nil {
		return "", false, err
	}
	if err := out[0].Err; err != nil {
		return "", false, err
	}
	if out[0].Done {
		s.admitted(ctx, out)
		return t.GetId(), true, nil
	}
	same, err := s.sameAsStored(ctx, t)
	if err != nil {
		return "", false, err
	}
	if !same {
		return "", false, api.Refuse(api.CodeIDTaken, takenError(t.GetId()))
	}
	s.met.joined.Inc()
	return t.GetId(), false, nil
}

func takenError(id string) error {
	return fmt.Errorf("another task has the id %q: use another id, or leave it empty to get one", id)
}

func (s *Service) checkQueue(ctx context.Context, t *millracev1.Task) error {
	known, err := s.st.KnownQueue(ctx, spec.Queue(t))
	if err != nil {
		return err
	}
	if !known {
		return fmt.Errorf("%w %q: no agent has ever served it; start one with MILLRACE_QUEUES=%s, or mend the name", errUnknownQueue, spec.Queue(t), spec.Queue(t))
	}
	return nil
}

// admission is the change that gives a valid task its record. The stored spec leaves out the id, which is in the key.
func (s *Service) admission(t *millracev1.Task, took store.Entry) (*store.Change, error) {
	now := s.st.Now()
	stored := t
	if t.GetId() != "" {
		stored = proto.CloneOf(t)
		stored.Id = ""
	}
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(stored)
	if err != nil {
		return nil, fmt.Errorf("encode task: %w", err)
	}
	c := &store.Change{
		Move: task.Admit, ID: task.ID(t.GetId()), Guess: store.Snapshot{Record: task.Record{State: task.None}},
		In: task.Input{To: task.Queued}, Spec: t, SpecBytes: raw, Created: now, Took: took,
	}
	if nb := spec.NotBefore(t); nb.After(now) {
		c.In.To, c.Due = task.Delayed, nb
	}
	return c, nil
}

func (s *Service) sameAsStored(ctx context.Context, t *millracev1.Task) (bool, error) {
	raw, err := s.st.Spec(ctx, t.GetId())
	if err != nil {
		return false, err
	}
	old := &millracev1.Task{}
	if err := proto.Unmarshal(raw, old); err != nil {
		return false, nil //nolint:nilerr // a record that this version cannot read is another task
	}
	return spec.Equal(old, t), nil
}

// admitted rings for what was queued.
func (s *Service) admitted(ctx context.Context, out []store.Outcome) {
	lanes := map[string]int{}
	for _, o := range out {
		if !o.Done {
			continue
		}
		s.met.admitted.Inc()
		if o.Now.State == task.Queued {
			lanes[o.Now.Lane]++
		}
	}
	s.ring(ctx, lanes)
}

// intake reads the public stream. An entry that cannot be admitted goes to the dead letters; nothing ends the loop.
func (s *Service) intake(ctx context.Context, loop *ops.Loop) {
	loop.Expect(30 * time.Second)
	r := s.st.NewReader(s.st.Keys().Tasks(), store.GroupDispatcher, s.id)
	steal, tries := time.Now(), 0
	for ctx.Err() == nil {
		if why := s.full.Load(); why != nil {
			loop.Success("intake is closed: " + *why)
			if !sleep(ctx, 200*time.Millisecond) {
				return
			}
			continue
		}
		entries, err := r.Read(ctx, batchSize, time.Second)
		if err == nil && time.Since(steal) > 5*time.Second {
			steal = time.Now()
			var left []store.Entry
			left, err = s.stealAll(ctx, r)
			entries = append(entries, left...)
		}
		if err == nil {
			err = s.take(ctx, entries)
			if err != nil {
				r.Rewind()
			}
		}
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			loop.Failure(err)
			s.errs.Error(ctx, "intake", "intake failed, tries again", err)
			if !store.Backoff(ctx, tries) {
				return
			}
			tries++
			continue
		}
		tries = 0
		loop.Success("")
	}
}

// stealIdle is how long another dispatcher may sit on entries of `tasks` before we take them: it has died.
const stealIdle = 30 * time.Second

func (s *Service) stealAll(ctx context.Context, r *store.Reader) ([]store.Entry, error) {
	var all []store.Entry
	for cursor := ""; ; {
		got, next, err := r.Steal(ctx, stealIdle, cursor, batchSize)
		all = append(all, got...)
		if err != nil || next == "" || len(all) >= batchSize {
			return all, err
		}
		cursor = next
	}
}

// take admits a batch of entries. After an error entries may be left pending for us, to be read again.
func (s *Service) take(ctx context.Context, entries []store.Entry) error {
	for len(entries) > 0 {
		n := min(len(entries), batchSize)
		if err := s.takeBatch(ctx, entries[:n]); err != nil {
			return err
		}
		entries = entries[n:]
	}
	return nil
}

func (s *Service) takeBatch(ctx context.Context, entries []store.Entry) error {
	changes := make([]*store.Change, 0, len(entries))
	took := make([]store.Entry, 0, len(entries))
	var gone []string
	for _, e := range entries {
		if e.Fields == nil {
			gone = append(gone, e.ID) // deleted by somebody while it was ours
			continue
		}
		t, err := spec.DecodeEntry(e.Fields, s.limits)
		code := ""
		if err != nil {
			code = spec.Code(err)
		} else if err = s.checkQueue(ctx, t); errors.Is(err, errUnknownQueue) {
			code = spec.CodeBadTask
		} else if err != nil {
			return err
		}
		if err != nil {
			if rerr := s.reject(ctx, e, code, err.Error(), ""); rerr != nil {
				return rerr
			}
			continue
		}
		if t.GetId() == "" {
			t.Id = spec.DeriveID(e.Stream, e.ID)
		}
		c, err := s.admission(t, e)
		if err != nil {
			return err
		}
		changes, took = append(changes, c), append(took, e)
	}
	if err := s.st.Ack(ctx, s.st.Keys().Tasks(), store.GroupDispatcher, gone); err != nil {
		return err
	}
	if len(changes) == 0 {
		return nil
	}
	out, err := s.st.Do(ctx, changes)
	s.admitted(ctx, out)
	if err != nil {
		return err
	}
	for i, o := range out {
		if o.Done {
			continue
		}
		if err := s.notAdmitted(ctx, changes[i], took[i], o); err != nil {
			return err
		}
	}
	return nil
}

// notAdmitted settles an entry whose task did not get a new record.
func (s *Service) notAdmitted(ctx context.Context, c *store.Change, e store.Entry, o store.Outcome) error {
	switch {
	case store.IsOutOfMemory(o.Err):
		return o.Err
	case o.Err != nil:
		return s.reject(ctx, e, "bad_task", "Redis refused it: "+o.Err.Error(), string(c.ID))
	case o.Now.State == task.None:
		return nil // another dispatcher has taken the entry
	}
	same, err := s.sameAsStored(ctx, c.Spec)
	if errors.Is(err, store.ErrNotFound) {
		return fmt.Errorf("task %s: its record went away meanwhile", c.ID)
	}
	if err != nil {
		return err
	}
	if same {
		s.met.joined.Inc()
		return s.st.Ack(ctx, e.Stream, store.GroupDispatcher, []string{e.ID})
	}
	return s.reject(ctx, e, api.CodeIDTaken, takenError(string(c.ID)).Error(), string(c.ID))
}

func (s *Service) reject(ctx context.Context, e store.Entry, code, reason, id string) error {
	if err := s.st.Reject(ctx, store.GroupDispatcher, e, code, reason, id); err != nil {
		return err
	}
	s.met.rejected.WithLabelValues(code).Inc()
	s.log.Warn("entry moved to the dead letters", logkey.Entry, e.ID, "code", code, logkey.Reason, reason)
	return nil
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
