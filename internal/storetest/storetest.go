// Package storetest gives tests a store of their own on the test binary's Redis. Tests only.
package storetest

import (
	"context"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/redistest"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
)

// Open returns a store with keys of its own on the shared server; see redistest.Shared.
func Open(t testing.TB) *store.Store {
	t.Helper()
	srv := redistest.Shared(t)
	return OpenAt(t, srv.URL(), srv.Prefix(t))
}

// OpenAt returns a store on any server.
func OpenAt(t testing.TB, url, namespace string) *store.Store {
	t.Helper()
	s, err := store.New(store.Options{URL: url, Namespace: namespace, Name: "test", Readers: 8, Alone: true}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// Until calls check until it is true, at most for a minute, and fails the test with what otherwise. For states that
// nobody signals.
func Until(t testing.TB, what string, check func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !check(); {
		if time.Now().After(end) {
			t.Fatalf("waited a minute in vain: %s", what)
		}
		time.Sleep(5 * time.Millisecond) //nolint:forbidigo // for states that nobody signals
	}
}

// State of a task, None when it has no record.
func State(t testing.TB, s *store.Store, id task.ID) task.State {
	t.Helper()
	sn, err := s.Snapshots(context.Background(), []task.ID{id})
	if err != nil {
		t.Fatal(err)
	}
	return sn[0].State
}

// Run runs a service until the test ends or stop is called, and fails the test when it ends with an error.
func Run(t testing.TB, run func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }() // ends with stop
	stopped := false
	stop = func() {
		t.Helper()
		if stopped {
			return
		}
		stopped = true
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("service ended with %v", err)
			}
		case <-time.After(time.Minute):
			t.Error("service does not stop")
		}
	}
	t.Cleanup(stop)
	return stop
}
