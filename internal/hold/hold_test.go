package hold

import (
	"testing"
	"time"
)

var realRules = Rules{TTL: 30 * time.Second, Interval: 10 * time.Second, Margin: 2 * time.Second, Limit: 2 * time.Minute, Vouch: 3 * time.Second}

// TestOutageEndsNothing runs one worker, dispatcher and reaper through an outage of Redis, at every phase of their
// loops and of every length below the hold limit: no task is stopped and nobody is declared dead.
func TestOutageEndsNothing(t *testing.T) {
	t.Parallel()
	for begin := 30 * time.Second; begin < 40*time.Second; begin += 500 * time.Millisecond {
		for length := time.Second; length < realRules.Limit; length += 3500 * time.Millisecond {
			if what := outage(realRules, begin, length); what != "" {
				t.Errorf("redis down at %v for %v: %s", begin, length, what)
			}
		}
	}
}

// TestLongOutageStopsTheTasksFirst is the other side: past the limit the tasks are stopped before the reaper declares.
func TestLongOutageStopsTheTasksFirst(t *testing.T) {
	t.Parallel()
	for _, limit := range []time.Duration{0, 2 * time.Minute} {
		r := realRules
		r.Limit = limit
		if what := outage(r, 33*time.Second, 5*time.Minute); what != "tasks stopped" {
			t.Errorf("hold limit %v, redis down for 5m: %q, want the tasks stopped", limit, what)
		}
	}
}

// outage reports what happened first to the worker, "" for nothing until two minutes after the outage.
func outage(r Rules, begin, length time.Duration) string {
	const step = 500 * time.Millisecond
	var (
		agent   Agent
		peer    Peer
		disp    Dispatcher
		reaper  Reaper
		gone    Absence
		beatEnd = r.TTL
		regEnd  time.Duration
		nextTry time.Duration
		wasUp   = true
	)
	for now := time.Duration(0); now < begin+length+2*time.Minute; now += step {
		up := now < begin || now >= begin+length
		if now >= nextTry {
			if up {
				agent.Renewed(now)
				beatEnd, nextTry = now+r.TTL, now+r.Interval
			} else {
				disp.Vouch(r, "w", now)
				agent.Vouched(r, &peer, now)
				nextTry = now + step
			}
		}
		if agent.Until(r) <= now {
			return "tasks stopped"
		}
		if up {
			for _, w := range disp.Owed(now) {
				beatEnd = now + r.TTL
				disp.Renewed(w)
			}
			if disp.MayRegister(now) {
				regEnd = now + r.Registration()
			}
		}
		if up && !wasUp {
			reaper.Pause(r, now)
		}
		wasUp = up
		if up && now%(5*time.Second) == 0 {
			if beatEnd > now {
				gone.Beating()
			} else if reaper.MayDeclare(r, now, &gone, regEnd > now) {
				return "declared dead"
			}
		}
	}
	return ""
}

func TestScannedPausesOnMassVanishing(t *testing.T) {
	t.Parallel()
	tests := []struct {
		vanished, total int
		want            bool
	}{{4, 4, false}, {5, 10, false}, {6, 11, true}, {5, 9, true}, {100, 1000, false}}
	for _, tt := range tests {
		var p Reaper
		if got := p.Scanned(realRules, 0, tt.vanished, tt.total); got != tt.want {
			t.Errorf("%d of %d vanished: paused %v, want %v", tt.vanished, tt.total, got, tt.want)
		}
		var a Absence
		if got := p.MayDeclare(realRules, time.Second, &a, true); got == tt.want {
			t.Errorf("%d of %d vanished: may declare a second later: %v", tt.vanished, tt.total, got)
		}
	}
}

func TestOwedForgetsWhatRanOut(t *testing.T) {
	t.Parallel()
	var d Dispatcher
	d.Vouch(realRules, "a", 0)
	d.Vouch(realRules, "b", time.Second)
	if d.MayRegister(2 * time.Second) {
		t.Error("may register while two workers rely on a vouch")
	}
	d.Renewed("b")
	if got := d.Owed(2 * time.Second); len(got) != 1 || got[0] != "a" {
		t.Errorf("owed to %v, want a", got)
	}
	if !d.MayRegister(3 * time.Second) {
		t.Error("may not register after the last vouch ran out")
	}
}
