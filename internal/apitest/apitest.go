// Package apitest serves the API over a real Redis for tests, with a dispatcher, agents and logsinks that do only what
// the test says. Tests only.
package apitest

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/millrace/millrace/internal/api"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/spec"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/storetest"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// Worker is the one that claims what a test lets run.
const Worker task.WorkerID = "agent-1"

// Fleet is the API and all around it.
type Fleet struct {
	Store    *store.Store
	API      *api.API
	Logs     *Logs
	Registry *prometheus.Registry
	URL      string

	t      testing.TB
	mu     sync.Mutex
	admit  func(*millracev1.Task) error
	server *httptest.Server
	known  map[task.ID]store.Claimed
}

// Options of a Fleet.
type Options struct {
	Token       config.Secret
	LogPatience time.Duration // 30s when 0
	// Store to use instead of one of its own on the shared Redis.
	Store *store.Store
}

// Start serves until the test ends. The package's TestMain must be redistest.Main.
func Start(t testing.TB, o Options) *Fleet {
	t.Helper()
	f := &Fleet{Store: o.Store, Logs: &Logs{texts: map[string]*text{}}, Registry: prometheus.NewRegistry(), t: t, known: map[task.ID]store.Claimed{}}
	if f.Store == nil {
		f.Store = storetest.Open(t)
	}
	var err error
	f.API, err = api.New(api.Config{Token: o.Token, LogPatience: o.LogPatience},
		api.Deps{Store: f.Store, Admit: f, Cancel: f, Logs: f.Logs, Registry: f.Registry})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	run := make(chan error, 1)
	go func() { run <- f.API.Run(ctx) }() // ends with cancel
	f.server = httptest.NewUnstartedServer(f.API.Handler())
	f.server.Config.Protocols = new(http.Protocols)
	f.server.Config.Protocols.SetHTTP1(true)
	f.server.Config.Protocols.SetUnencryptedHTTP2(true)
	f.server.Start()
	f.URL = f.server.URL
	t.Cleanup(func() {
		f.server.CloseClientConnections()
		f.server.Close()
		cancel()
		if err := <-run; err != nil {
			t.Errorf("api ended with %v", err)
		}
	})
	f.register()
	return f
}

func (f *Fleet) register() {
	err := f.Store.Register(f.t.Context(), store.WorkerMeta{ID: Worker, Slots: 100, Queues: []string{"default", "bulk"}, Host: "h1", PID: 7, Version: "v1", Started: f.Store.Now()}, time.Minute)
	if err != nil {
		f.t.Fatal(err)
	}
	for _, q := range []string{"default", "bulk"} {
		for _, p := range store.Priorities {
			if err := f.Store.EnsureGroup(f.t.Context(), f.Store.Keys().Dispatch(store.Lane(q, p)), store.GroupAgents); err != nil {
				f.t.Fatal(err)
			}
		}
	}
}

// RefuseWith makes Admit call a function first; it may also panic.
func (f *Fleet) RefuseWith(refuse func(*millracev1.Task) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.admit = refuse
}

// Admit implements api.Admitter.
func (f *Fleet) Admit(ctx context.Context, t *millracev1.Task) (string, bool, error) {
	f.mu.Lock()
	refuse := f.admit
	f.mu.Unlock()
	if refuse != nil {
		if err := refuse(t); err != nil {
			return "", false, err
		}
	}
	if t.GetId() == "" {
		t.Id = spec.NewID(f.Store.Now())
	}
	raw, err := proto.Marshal(t)
	if err != nil {
		return "", false, err
	}
	c := &store.Change{
		Move: task.Admit, ID: task.ID(t.GetId()), Guess: store.Snapshot{Record: task.Record{State: task.None}},
		In: task.Input{To: task.Queued}, Spec: t, SpecBytes: raw, Created: f.Store.Now(),
	}
	if nb := spec.NotBefore(t); nb.After(f.Store.Now()) {
		c.In.To, c.Due = task.Delayed, nb
	}
	out, err := f.Store.Do(ctx, []*store.Change{c})
	if err != nil {
		return "", false, err
	}
	return t.GetId(), out[0].Done, out[0].Err
}

// Cancel implements api.Canceller.
func (f *Fleet) Cancel(ctx context.Context, id task.ID) (store.Outcome, error) {
	r, err := f.Store.Record(ctx, id)
	if err != nil {
		return store.Outcome{}, err
	}
	out, err := f.Store.Do(ctx, []*store.Change{{
		Move: task.Cancel, ID: id, Guess: r.Snapshot, In: task.Input{Attempt: r.Attempt},
		Spec: specOf(r), Retention: time.Hour,
	}})
	if err != nil {
		return store.Outcome{}, err
	}
	return out[0], nil
}

func specOf(r *store.Record) *millracev1.Task {
	t := &millracev1.Task{}
	_ = proto.Unmarshal(r.Spec, t)
	return t
}

// Command is a task that would run a command.
func Command(id string, argv ...string) *millracev1.Task {
	if len(argv) == 0 {
		argv = []string{"true"}
	}
	return &millracev1.Task{Id: id, Work: &millracev1.Task_Command{Command: &millracev1.Command{Argv: argv}}}
}

// Submit admits tasks.
func (f *Fleet) Submit(tasks ...*millracev1.Task) {
	f.t.Helper()
	for _, t := range tasks {
		if _, created, err := f.Admit(f.t.Context(), t); err != nil || !created {
			f.t.Fatalf("admit %s: created %v, %v", t.GetId(), created, err)
		}
	}
}

// Claim lets the worker claim as many tasks of a lane.
func (f *Fleet) Claim(lane string, n int) []task.ID {
	f.t.Helper()
	got, err := f.Store.Claim(f.t.Context(), store.ClaimFor{Worker: Worker, Lanes: []string{lane}, Want: n, Lease: time.Minute})
	if err != nil || len(got) != n {
		f.t.Fatalf("claim %d of %s: got %d, %v", n, lane, len(got), err)
	}
	ids := make([]task.ID, n)
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, c := range got {
		ids[i] = c.ID
		f.known[c.ID] = c
	}
	return ids
}

// Finish ends a claimed task. The zero End means success.
func (f *Fleet) Finish(id task.ID, end *millracev1.AttemptEnd) {
	f.t.Helper()
	to := task.Succeeded
	switch end.GetReason() {
	case millracev1.Reason_REASON_UNSPECIFIED:
	case millracev1.Reason_REASON_CANCELLED:
		to = task.Cancelled
	default:
		to = task.Failed
	}
	f.leave(id, task.Finish, to, end)
}

// Retry ends a claimed attempt; the next one is due after a pause.
func (f *Fleet) Retry(id task.ID, end *millracev1.AttemptEnd, after time.Duration) {
	f.t.Helper()
	f.leave(id, task.Retry, task.Delayed, end, after)
}

func (f *Fleet) leave(id task.ID, move task.Move, to task.State, end *millracev1.AttemptEnd, after ...time.Duration) {
	f.t.Helper()
	f.mu.Lock()
	cl := f.known[id]
	f.mu.Unlock()
	if end == nil {
		end = &millracev1.AttemptEnd{}
	}
	end.Attempt, end.Worker = cl.Attempt, string(Worker)
	end.EndedAt = timestamppb.New(f.Store.Now())
	c := &store.Change{
		Move: move, ID: id, Guess: cl.At, In: task.Input{Attempt: cl.Attempt, Worker: Worker, To: to}, End: end,
		Spec: &millracev1.Task{}, Retention: time.Hour,
	}
	if len(after) > 0 {
		c.Due = f.Store.Now().Add(after[0])
	}
	out, err := f.Store.Do(f.t.Context(), []*store.Change{c})
	if err != nil || !out[0].Done {
		f.t.Fatalf("%s %s: %+v, %v", move, id, out[0], err)
	}
}

// Promote makes a delayed task due.
func (f *Fleet) Promote(id task.ID) {
	f.t.Helper()
	r, err := f.Store.Record(f.t.Context(), id)
	if err != nil {
		f.t.Fatal(err)
	}
	out, err := f.Store.Do(f.t.Context(), []*store.Change{{Move: task.Promote, ID: id, Guess: r.Snapshot, In: task.Input{Attempt: r.Attempt}, Spec: specOf(r)}})
	if err != nil || !out[0].Done {
		f.t.Fatalf("promote %s: %+v, %v", id, out[0], err)
	}
}

// SetLog writes what a logsink would into the record.
func (f *Fleet) SetLog(id task.ID, attempt uint32, v *millracev1.LogView) {
	f.t.Helper()
	raw, err := proto.Marshal(v)
	if err != nil {
		f.t.Fatal(err)
	}
	if err := f.Store.Client().HSet(f.t.Context(), f.Store.Keys().Task(string(id)), store.LogField(attempt), raw).Err(); err != nil {
		f.t.Fatal(err)
	}
}

// ErrUnknown is for fakes that fail on purpose.
var ErrUnknown = errors.New("made to fail")

// key of an attempt's output.
func key(id task.ID, attempt uint32) string { return fmt.Sprintf("%s/%d", id, attempt) }

// Claimed checks that a task was claimed and returns its id.
func (f *Fleet) Claimed(id string) task.ID {
	f.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.known[task.ID(id)]; !ok {
		f.t.Fatalf("%s was not claimed", id)
	}
	return task.ID(id)
}
