package ops

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// Status collects what the loops of a process are doing and whether it can
// take work. All its methods and those of [Loop] are safe for concurrent use,
// and do nothing on a nil receiver, so that a part which reports can also run
// without anybody to report to.
type Status struct {
	started time.Time
	now     func() time.Time

	mu       sync.Mutex
	loops    map[string]*Loop
	causes   map[string]string // why not ready, by cause
	sections map[string]func() any
}

// NewStatus returns an empty status, which is ready.
func NewStatus() *Status {
	return &Status{
		started:  time.Now(),
		now:      time.Now,
		loops:    make(map[string]*Loop),
		causes:   make(map[string]string),
		sections: make(map[string]func() any),
	}
}

// Started returns when the status was made.
func (s *Status) Started() time.Time {
	if s == nil {
		return time.Time{}
	}
	return s.started
}

// Loop returns the loop of that name, such as "agent.renew", and adds it when
// it is new.
func (s *Status) Loop(name string) *Loop {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.loops[name]
	if l == nil {
		l = &Loop{now: s.now, state: LoopState{Name: name, Since: s.now()}}
		s.loops[name] = l
	}
	return l
}

// SetNotReady makes the process not ready until [Status.SetReady] is called
// with the same cause. The cause is a constant such as "draining", the reason
// one line for people.
func (s *Status) SetNotReady(cause, reason string) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.causes[cause] = reason
}

// SetReady takes a cause of not being ready away.
func (s *Status) SetReady(cause string) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.causes, cause)
}

// NotReady returns why work cannot be taken now: what [Status.SetNotReady]
// said, and every loop that went without success for longer than it may (see
// [Loop.Expect]). An empty result means ready.
func (s *Status) NotReady() []string {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	var reasons []string
	for _, cause := range slices.Sorted(maps.Keys(s.causes)) {
		reasons = append(reasons, cause+": "+s.causes[cause])
	}
	s.mu.Unlock()
	for _, l := range s.sortedLoops() {
		if reason := l.late(); reason != "" {
			reasons = append(reasons, reason)
		}
	}
	return reasons
}

// Section adds a named part to /statusz. The function is called for each
// request and must be quick; its result is encoded as JSON.
func (s *Status) Section(name string, value func() any) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sections[name] = value
}

func (s *Status) sectionValues() map[string]any {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	sections := maps.Clone(s.sections)
	s.mu.Unlock()
	values := make(map[string]any, len(sections))
	for name, value := range sections {
		values[name] = value() // not under our lock: it may take others
	}
	return values
}

// Loops returns the state of every loop, sorted by name.
func (s *Status) Loops() []LoopState {
	states := []LoopState{}
	if s == nil {
		return states
	}
	for _, l := range s.sortedLoops() {
		states = append(states, l.State())
	}
	return states
}

func (s *Status) sortedLoops() []*Loop {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.SortedFunc(maps.Values(s.loops), func(a, b *Loop) int {
		return strings.Compare(a.state.Name, b.state.Name)
	})
}

// Loop is one loop's entry in a [Status].
type Loop struct {
	now func() time.Time

	mu     sync.Mutex
	state  LoopState
	within time.Duration // 0 for no expectation
	from   time.Time     // when the expectation began
}

// LoopState is what is known of a loop.
type LoopState struct {
	Name        string    `json:"name"`
	Doing       string    `json:"doing"`  // what it does now
	Since       time.Time `json:"since"`  // since when
	Rounds      uint64    `json:"rounds"` // successful ones
	LastSuccess time.Time `json:"lastSuccess,omitzero"`
	Note        string    `json:"note,omitempty"`      // what the last success did
	LastError   string    `json:"lastError,omitempty"` // kept after the next success
	LastErrorAt time.Time `json:"lastErrorAt,omitzero"`
}

// Doing says what the loop is about to do, for example "waiting for a task".
func (l *Loop) Doing(what string) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state.Doing, l.state.Since = what, l.now()
}

// Success says that a round went well, also when there was nothing to do. The
// note is one line on what it did and may be empty.
func (l *Loop) Success(note string) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state.Rounds++
	l.state.LastSuccess, l.state.Note = l.now(), note
}

// Failure says that a round failed. A nil error is ignored.
func (l *Loop) Failure(err error) {
	if l == nil || err == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state.LastError, l.state.LastErrorAt = err.Error(), l.now()
}

// Expect makes the process not ready whenever the loop's last success (or
// this call, if later) is longer ago than within. Zero expects nothing any more,
// for a loop that has ended.
func (l *Loop) Expect(within time.Duration) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.within, l.from = within, l.now()
}

// late returns why the loop makes the process not ready, or nothing.
func (l *Loop) late() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	last := l.from
	if l.state.LastSuccess.After(last) {
		last = l.state.LastSuccess
	}
	silent := l.now().Sub(last)
	if l.within == 0 || silent <= l.within {
		return ""
	}
	reason := fmt.Sprintf("%s: no success for %v (expected every %v)", l.state.Name, silent.Round(time.Millisecond), l.within)
	if l.state.LastErrorAt.After(last) {
		reason += ": " + l.state.LastError
	}
	return reason
}

// State returns what is known of the loop.
func (l *Loop) State() LoopState {
	if l == nil {
		return LoopState{}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state
}
