package store

import (
	"testing"
	"time"

	"github.com/millrace/millrace/internal/redistest"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// setup gives a test keys of its own on the shared server.
func setup(t *testing.T) *Store {
	t.Helper()
	srv := redistest.Shared(t)
	return open(t, srv.URL(), srv.Prefix(t))
}

func open(t *testing.T, url, namespace string) *Store {
	t.Helper()
	s, err := New(Options{URL: url, Namespace: namespace, Name: "test"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// must fails the test on an error.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

const testLane = "default:normal"

func join(t *testing.T, s *Store, w task.WorkerID) {
	t.Helper()
	must(t, s.Register(t.Context(), WorkerMeta{ID: w, Slots: 4, Queues: []string{"default"}, Host: "h", Started: time.Now()}, time.Hour))
}

func admission(id task.ID, to task.State, spec *millracev1.Task) *Change {
	if spec == nil {
		spec = &millracev1.Task{}
	}
	return &Change{
		Move: task.Admit, ID: id, In: task.Input{To: to}, Guess: Snapshot{Record: task.Record{State: task.None}},
		Spec: spec, SpecBytes: encode(spec), Created: time.Now(), Due: time.Now().Add(time.Hour), Retention: time.Hour,
	}
}

// admit queues tasks and fails the test if one was not.
func admit(t *testing.T, s *Store, ids ...task.ID) {
	t.Helper()
	for _, id := range ids {
		one(t, s, admission(id, task.Queued, nil))
	}
}

// one applies a change and fails the test if it was not done.
func one(t *testing.T, s *Store, c *Change) Outcome {
	t.Helper()
	o := try(t, s, c)
	if !o.Done {
		t.Fatalf("%s of %s was not done: %+v", c.Move, c.ID, o.Now)
	}
	return o
}

// try applies a change, whatever comes of it.
func try(t *testing.T, s *Store, c *Change) Outcome {
	t.Helper()
	out, err := s.Do(t.Context(), []*Change{c})
	must(t, err)
	must(t, out[0].Err)
	return out[0]
}

func claim(t *testing.T, s *Store, w task.WorkerID, want int, lanes ...string) []Claimed {
	t.Helper()
	if len(lanes) == 0 {
		lanes = []string{testLane}
	}
	got, err := s.Claim(t.Context(), ClaimFor{Worker: w, Lanes: lanes, Want: want, Lease: time.Minute})
	must(t, err)
	return got
}

func ended(reason millracev1.Reason, attempt uint32) *millracev1.AttemptEnd {
	return &millracev1.AttemptEnd{Attempt: attempt, Reason: reason}
}

// move is a change by the owner of a claimed task.
func (c Claimed) move(m task.Move, to task.State) *Change {
	return &Change{
		Move: m, ID: c.ID, In: task.Input{Attempt: c.Attempt, Worker: c.At.Owner, To: to}, Guess: c.At,
		End: ended(millracev1.Reason_REASON_UNSPECIFIED, c.Attempt), Retention: time.Hour,
	}
}

func snap(t *testing.T, s *Store, id task.ID) Snapshot {
	t.Helper()
	sn, err := s.Snapshots(t.Context(), []task.ID{id})
	must(t, err)
	return sn[0]
}

// age makes all pending entries of a consumer look idle for long, so that they may be adopted.
func age(t *testing.T, s *Store, w string) {
	t.Helper()
	key := s.keys.Dispatch(testLane)
	p, err := s.cmd.Do(t.Context(), "XPENDING", key, GroupAgents, "-", "+", 1000, w).Slice()
	must(t, err)
	for _, e := range p {
		must(t, s.cmd.Do(t.Context(), "XCLAIM", key, GroupAgents, w, 0, e.([]any)[0], "IDLE", 60000, "JUSTID").Err())
	}
}

// die makes a worker dead for Redis.
func die(t *testing.T, s *Store, w task.WorkerID) {
	t.Helper()
	must(t, s.cmd.Del(t.Context(), s.keys.WorkerBeat(string(w))).Err())
	dead, err := s.Declare(t.Context(), w, false)
	must(t, err)
	if !dead {
		t.Fatalf("%s is not dead", w)
	}
}
