package dispatcher

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/millrace/millrace/internal/ops"
	"github.com/millrace/millrace/internal/store"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// ring tells hungry agents that there are tasks: those connected here, and through a hint those of our peers.
func (s *Service) ring(ctx context.Context, lanes map[string]int) {
	for lane, n := range lanes {
		rung := s.ctl.Ring(lane, n)
		s.met.rings.Add(float64(rung))
		if rung < n && s.vouches.hasPeers() {
			if err := s.st.Hint(ctx, fmt.Sprintf("%s %s %d", store.HintBell, lane, n-rung)); err != nil {
				s.errs.Warn(ctx, "hint", "hint not sent, peers ring a little later", err)
			}
		}
	}
}

// bellTick is how often the backlog of hungry agents' lanes is looked at. The bell is level-triggered: a ring that got
// lost, or an entry that somebody else added, costs one tick.
const bellTick = 200 * time.Millisecond

func (s *Service) bell(ctx context.Context, loop *ops.Loop) {
	for tries := 0; ctx.Err() == nil; {
		if !sleep(ctx, bellTick) {
			return
		}
		hungry := s.ctl.HungryFor()
		if len(hungry) == 0 {
			loop.Success("")
			continue
		}
		lanes := slices.Sorted(maps.Keys(hungry))
		waiting, _, err := s.st.Backlog(ctx, lanes)
		if err != nil {
			loop.Failure(err)
			s.errs.Warn(ctx, "bell", "backlog not read, tries again", err)
			if !store.Backoff(ctx, tries) {
				return
			}
			tries++
			continue
		}
		tries = 0
		loop.Success("")
		for i, lane := range lanes {
			if waiting[i] > 0 {
				s.met.rings.Add(float64(s.ctl.Ring(lane, int(min(waiting[i], int64(hungry[lane]))))))
			}
		}
	}
}

// hints follows what peers and agents say: look at what is due, ring, cancel.
func (s *Service) hints(ctx context.Context, loop *ops.Loop) {
	for tries := 0; ctx.Err() == nil; tries++ {
		err := s.st.Hints(ctx, func() { loop.Success("subscribed"); s.lookNow() }, s.hint)
		loop.Failure(err)
		if !store.Backoff(ctx, tries) {
			return
		}
	}
}

func (s *Service) hint(words string) {
	w := strings.Fields(words)
	switch {
	case len(w) >= 1 && w[0] == store.HintDue:
		s.lookNow()
	case len(w) == 3 && w[0] == store.HintBell:
		if n, err := strconv.Atoi(w[2]); err == nil {
			s.met.rings.Add(float64(s.ctl.Ring(w[1], n)))
		}
	case len(w) == 4 && w[0] == store.HintCancel:
		if a, err := strconv.ParseUint(w[2], 10, 32); err == nil {
			s.ctl.Send(w[1], &millracev1.ControlCancel{TaskId: w[3], Attempt: uint32(a), Reason: "cancelled"})
		}
	}
}

func (s *Service) lookNow() {
	select {
	case s.wake <- struct{}{}:
	default: // a look is on its way already
	}
}
