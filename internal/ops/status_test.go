package ops

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestExpectMakesASilentLoopNotReady(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	s := NewStatus()
	s.now = func() time.Time { return now }
	loop := s.Loop("reaper.scan")
	loop.Expect(10 * time.Second)
	wantNotReady := func(want ...string) {
		t.Helper()
		if diff := cmp.Diff(want, s.NotReady()); diff != "" {
			t.Errorf("NotReady (-want +got):\n%s", diff)
		}
	}
	wantNotReady()
	now = now.Add(11 * time.Second)
	wantNotReady("reaper.scan: no success for 11s (expected every 10s)")
	loop.Failure(errors.New("boom"))
	wantNotReady("reaper.scan: no success for 11s (expected every 10s): boom")
	loop.Success("")
	wantNotReady()
	now = now.Add(time.Minute)
	wantNotReady("reaper.scan: no success for 1m0s (expected every 10s)")
	loop.Expect(0)
	wantNotReady()
}

func TestLoopIsOnePerName(t *testing.T) {
	t.Parallel()
	s := NewStatus()
	if first, second := s.Loop("a"), s.Loop("a"); first != second {
		t.Error("Loop made a second one of the same name")
	}
	s.Loop("b").Doing("x")
	var names []string
	for _, l := range s.Loops() {
		names = append(names, l.Name)
	}
	if diff := cmp.Diff([]string{"a", "b"}, names); diff != "" {
		t.Errorf("Loops (-want +got):\n%s", diff)
	}
}

// Parts run without a status too: in tests, or embedded in another program.
func TestNilStatusDoesNothing(t *testing.T) {
	t.Parallel()
	var s *Status
	l := s.Loop("x")
	l.Doing("y")
	l.Success("z")
	l.Failure(errors.New("e"))
	l.Expect(time.Second)
	s.SetNotReady("c", "r")
	s.SetReady("c")
	s.Section("n", func() any { return nil })
	if s.NotReady() != nil || len(s.Loops()) != 0 || s.sectionValues() != nil || !s.Started().IsZero() || l.State().Name != "" {
		t.Error("a nil status has something to say")
	}
}

func TestStatusConcurrently(t *testing.T) {
	t.Parallel()
	s := NewStatus()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 100 {
				l := s.Loop("x")
				l.Doing("a")
				l.Success("b")
				l.Failure(errors.New("c"))
				l.Expect(time.Hour)
				s.SetNotReady("c", "r")
				_, _ = s.NotReady(), s.Loops()
				s.SetReady("c")
			}
		})
	}
	wg.Wait()
	if got := s.Loop("x").State().Rounds; got != 400 {
		t.Errorf("rounds = %d, want 400", got)
	}
}
