// Package hold decides when tasks may run on although Redis cannot be reached, and when a silent worker may be
// declared dead. The agent, the dispatcher and the reaper each ask their own part; together the parts keep two
// promises: a task never has two live copies, and an outage of Redis that is shorter than the hold limit ends nothing.
//
// The package has no I/O, no clock and no lock: callers pass times and guard their values. Every actor uses one clock
// of its own that never steps (an agent's must count sleep); times of different actors are never compared.
package hold

import "time"

// Instant is a time on the caller's own clock, counted from any fixed zero.
type Instant = time.Duration

// Rules are the times that all parts must agree on.
type Rules struct {
	TTL      time.Duration // lifetime of a worker's heartbeat
	Interval time.Duration // between renewals
	Margin   time.Duration // an agent stops its tasks this long before its heartbeat can have run out
	Limit    time.Duration // how long an agent may hold past its deadline; 0: never
	Vouch    time.Duration // how long "I cannot reach Redis either" may be relied on
}

// Vouch is the Rules.Vouch that all parts use; part of the protocol between agents and dispatchers.
const Vouch = 3 * time.Second

// Registration is the lifetime of a dispatcher's entry in Redis. It ends before the heartbeat of every worker that may
// hold on this dispatcher's word, so that whoever sees the heartbeat gone also sees the dispatcher gone. Such a worker
// was renewed at most silence before the dispatcher lost Redis; what is left of two intervals is for slow answers.
func (r Rules) Registration() time.Duration { return r.TTL - 2*r.Interval }

// silence is how long a worker may have heard nothing before a vouch does not count any more: an interval, and what a
// renewal that fails slowly takes.
func (r Rules) silence() time.Duration { return r.Interval + r.Interval/2 }

// Agent is what a worker knows about its right to run tasks.
type Agent struct {
	renewed Instant // when the last good renewal was sent
	alive   bool    // there was one
	vouched Instant // until when a dispatcher has vouched
}

// Peer is what an agent remembers about one dispatcher that it is connected to. A new connection starts a new Peer.
type Peer struct {
	heard Instant // when the last heartbeat was sent that it answered with a vouch
	known bool
}

// Renewed notes a good renewal, by whichever way, by the time at which it was sent.
func (a *Agent) Renewed(sent Instant) {
	if !a.alive || sent > a.renewed {
		a.renewed, a.alive = sent, true
	}
}

// Vouched notes that p, asked at the time sent, cannot reach Redis either. It reports whether that counts.
//
// It does not count when neither a renewal nor p's last vouch is recent: p may have had Redis in between, and its
// registration would then outlive our heartbeat and let p pass for alive.
func (a *Agent) Vouched(r Rules, p *Peer, sent Instant) bool {
	last := a.renewed
	if p.known {
		last = max(last, p.heard)
	}
	if !a.alive || sent-last > r.silence() {
		return false
	}
	p.heard, p.known = max(p.heard, sent), true
	a.vouched = max(a.vouched, sent+r.Vouch)
	return true
}

// Sure is until when nobody may declare the worker dead whatever else happens: new tasks may begin only before it.
func (a *Agent) Sure(r Rules) Instant { return a.renewed + r.TTL - r.Margin }

// Until is when all tasks must have been stopped: at the deadline, or later while a dispatcher vouches, within the limit.
func (a *Agent) Until(r Rules) Instant {
	d := a.Sure(r)
	return max(d, min(a.vouched, d+r.Limit))
}

// Dispatcher is what a dispatcher remembers about the workers that it vouched for.
type Dispatcher struct {
	given map[string]Instant // end of the newest vouch
}

// Vouch notes that a worker is being told that Redis cannot be reached. It must be called before the word is sent.
func (d *Dispatcher) Vouch(r Rules, worker string, now Instant) {
	if d.given == nil {
		d.given = map[string]Instant{}
	}
	d.given[worker] = now + r.Vouch
}

// Renewed notes that we have set the worker's heartbeat in Redis since the last Vouch, or that Redis has fenced it:
// nobody can be misled about it by our registration any more.
func (d *Dispatcher) Renewed(worker string) { delete(d.given, worker) }

// Owed lists the workers that rely on a vouch of ours. With Redis back their heartbeats are renewed first. Whether a
// worker still is connected does not matter: a connection can be dead without our knowing.
func (d *Dispatcher) Owed(now Instant) []string {
	var out []string
	for w, until := range d.given {
		if until <= now {
			delete(d.given, w)
			continue
		}
		out = append(out, w)
	}
	return out
}

// MayRegister reports whether our registration may be written: nobody may rely on our being without Redis while the
// registration says that we are not.
func (d *Dispatcher) MayRegister(now Instant) bool { return len(d.Owed(now)) == 0 }

// Reaper is what a reaper knows about its own view of Redis.
type Reaper struct {
	paused Instant // nobody is declared before
	from   Instant // absences count from here
}

// Absence is a worker whose heartbeat is gone, since when this reaper has seen it gone. The zero value is for one that
// was not missed yet.
type Absence struct {
	since, last Instant
	seen        bool
}

// Pause is called after anything that may have kept the living from renewing, or this reaper from seeing that they did:
// its own disconnection, a restart or fail-over of Redis, a forward step of Redis' clock. The living renew first.
func (p *Reaper) Pause(r Rules, now Instant) {
	p.paused = max(p.paused, now+r.TTL)
	p.from = p.paused
}

// massVanishing is how many workers must be gone in one scan before more than half of all is taken as a fault of ours.
const massVanishing = 5

// Scanned is told how many heartbeats one scan found newly gone, of how many workers. It reports whether that led to a pause.
func (p *Reaper) Scanned(r Rules, now Instant, vanished, total int) bool {
	if vanished < massVanishing || 2*vanished <= total {
		return false
	}
	p.Pause(r, now)
	return true
}

// Beating notes that the worker's heartbeat is there.
func (a *Absence) Beating() { *a = Absence{} }

// MayDeclare reports whether the worker, whose heartbeat is gone now, may be declared dead: at once when all
// dispatchers recorded for it live, because then none of them can be what lets it hold; else after the hold limit.
//
// A reaper that has not looked for a whole TTL, because it was frozen or slow, cannot know that the heartbeat did not
// come and go meanwhile, and counts anew like after a pause.
func (p *Reaper) MayDeclare(r Rules, now Instant, a *Absence, dispatchersLive bool) bool {
	if !a.seen || a.since < p.from || now-a.last >= r.TTL {
		a.since, a.seen = max(now, p.from), true
	}
	a.last = now
	if now < p.paused {
		return false
	}
	return dispatchersLive || now-a.since >= r.Limit
}
