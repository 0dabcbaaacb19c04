package control

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// Callbacks are what the agent does with what it hears. Any may be nil. They run on the goroutine that reads from that
// dispatcher, so that nothing lies between a frame and its effect, and must not block; they may call the Client.
type Callbacks struct {
	// State returns a heartbeat that says what runs now. It is asked after each connect and then at the interval that
	// the dispatcher wishes. Sequence is the callback's to choose; the worker id is filled in.
	State func() *millracev1.ControlHeartbeat
	// OnConnected and OnDisconnected alternate for one dispatcher. In OnConnected the dispatcher has written itself into
	// the worker's meta and counts for holding.
	OnConnected    func(dispatcherID string, w *millracev1.ControlWelcome)
	OnDisconnected func(dispatcherID string)
	OnHeartbeatAck func(dispatcherID string, a *millracev1.ControlHeartbeatAck)
	OnRing         func(dispatcherID, lane string)
	OnCancel       func(dispatcherID string, m *millracev1.ControlCancel)
	OnSignal       func(dispatcherID string, m *millracev1.ControlSignal)
	OnDrain        func(dispatcherID string, m *millracev1.ControlDrain)
	OnResume       func(dispatcherID string)
	OnKill         func(dispatcherID string, m *millracev1.ControlKill)
}

// ClientConfig is what a Client needs to know. Zero durations have defaults.
type ClientConfig struct {
	// WorkerID is the incarnation of the agent.
	WorkerID string
	// AgentVersion is the version of the software, for people.
	AgentVersion string
	// Queues and Slots are told to dispatchers.
	Queues []string
	Slots  int
	// Features are the optional features that the agent understands.
	Features []string
	// Token is the secret that dispatchers must know. Empty: none.
	Token []byte
	// TLS, when set, is used for every connection; with Certificates it is mutual. An empty ServerName becomes the
	// host that is dialled.
	TLS *tls.Config
	// DialTimeout is for the TCP connection alone. It is short, because a dispatcher that comes back while a dial hangs
	// is noticed only by the next one. 1s.
	DialTimeout time.Duration
	// HandshakeTimeout is for everything from there to WELCOME, in which the dispatcher talks to Redis. 10s.
	HandshakeTimeout time.Duration
	// MaxBackoff bounds the pause between two tries to connect. 900ms: with DialTimeout, back within 2 s.
	MaxBackoff time.Duration
	// RefusedBackoff is the pause after a refusal that will not pass by itself: token, version. 15s.
	RefusedBackoff time.Duration
	// AckTimeout bounds how long SendHungry waits. 50ms.
	AckTimeout time.Duration
}

func (c *ClientConfig) setDefaults() {
	defaultTo(&c.DialTimeout, time.Second)
	defaultTo(&c.HandshakeTimeout, 10*time.Second)
	defaultTo(&c.MaxBackoff, 900*time.Millisecond)
	defaultTo(&c.RefusedBackoff, 15*time.Second)
	defaultTo(&c.AckTimeout, 50*time.Millisecond)
}

// Validate reports every problem at once.
func (c ClientConfig) Validate() error {
	var errs []error
	if !ValidID(c.WorkerID) {
		errs = append(errs, fmt.Errorf("worker id %q: use 1 to 128 of A-Z a-z 0-9 . _ -, the first not a dot", c.WorkerID))
	}
	if c.Slots < 0 {
		errs = append(errs, errors.New("slots must not be negative"))
	}
	if min(c.DialTimeout, c.HandshakeTimeout, c.MaxBackoff, c.RefusedBackoff, c.AckTimeout) < 0 {
		errs = append(errs, errors.New("timeouts must not be negative"))
	}
	return errors.Join(errs...)
}

// Client is the agent's end of the channel: one connection to each dispatcher that it is told of. All methods are safe
// for concurrent use.
type Client struct {
	cfg ClientConfig
	cb  Callbacks
	log *slog.Logger
	met *metrics
	lim limits

	changed chan struct{} // size 1: targets has changed

	mu       sync.Mutex // before conn.mu
	targets  map[string]string
	sessions map[string]*session       // welcomed connections by dispatcher
	hungry   *millracev1.ControlHungry // what was said last; nil when not hungry
	sequence uint64                    // of the last HUNGRY
	waits    map[uint64]*ackWait       // by sequence
}

// ackWait is one call of SendHungry in progress.
type ackWait struct {
	from  map[*session]struct{} // who has not answered; guarded by Client.mu
	acked int
	done  chan struct{} // closed when from is empty
}

// NewClient checks the configuration. It starts nothing.
func NewClient(cfg ClientConfig, cb Callbacks, deps Deps) (*Client, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("control client: %w", err)
	}
	cfg.setDefaults()
	return &Client{
		cfg: cfg, cb: cb, log: deps.logger(), met: newMetrics(deps.Registry, sideClient), lim: defaultLimits,
		changed: make(chan struct{}, 1), sessions: make(map[string]*session), waits: make(map[uint64]*ackWait),
	}, nil
}

// SetTargets says which dispatchers there are: host:port by dispatcher id. Connections to others are closed.
func (c *Client) SetTargets(addrs map[string]string) {
	c.mu.Lock()
	c.targets = maps.Clone(addrs)
	c.mu.Unlock()
	select {
	case c.changed <- struct{}{}:
	default: // Run will look anyhow
	}
}

// link is the goroutine that keeps up the connection to one dispatcher.
type link struct {
	addr string
	stop context.CancelFunc
	done chan struct{}
}

// Run keeps the connections up until ctx ends, and returns after all of them have ended.
func (c *Client) Run(ctx context.Context) error {
	links := make(map[string]*link)
	defer func() {
		for _, l := range links {
			l.stop()
		}
		for _, l := range links {
			<-l.done
		}
	}()
	for {
		c.mu.Lock()
		targets := maps.Clone(c.targets)
		c.mu.Unlock()
		c.reconcile(ctx, links, targets)
		select {
		case <-ctx.Done():
			return nil
		case <-c.changed:
		}
	}
}

// reconcile makes links what targets says.
func (c *Client) reconcile(ctx context.Context, links map[string]*link, targets map[string]string) {
	var ended []*link
	for id, l := range links {
		if addr, ok := targets[id]; !ok || addr != l.addr {
			l.stop()
			ended = append(ended, l)
			delete(links, id)
		}
	}
	for _, l := range ended {
		<-l.done // so that a dispatcher with a new address has one connection
	}
	for id, addr := range targets {
		if links[id] != nil {
			continue
		}
		lctx, stop := context.WithCancel(ctx)
		l := &link{addr: addr, stop: stop, done: make(chan struct{})}
		links[id] = l
		go func() { // ends by stop; waited for by done
			defer close(l.done)
			c.keepUp(lctx, id, addr)
		}()
	}
}

// Connected returns the ids of the dispatchers that have welcomed this worker, sorted.
func (c *Client) Connected() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Sorted(maps.Keys(c.sessions))
}

// SendHungry tells every connected dispatcher that the agent waits for up to free tasks of these lanes, and waits until
// each has registered that, at most for the ack timeout. It returns how many have. What was said is said again to every
// dispatcher that is connected later, until NotHungry.
//
// A ring makes the agent sated for the dispatcher that rang, not for the others; after a ring and a fetch that found
// too little, call it again.
func (c *Client) SendHungry(ctx context.Context, lanes []string, free int) int {
	if len(lanes) == 0 || free <= 0 {
		c.NotHungry()
		return 0
	}
	sequence, w := c.sayHungry(lanes, free)
	timer := time.NewTimer(c.cfg.AckTimeout)
	defer timer.Stop()
	select {
	case <-w.done:
	case <-ctx.Done():
	case <-timer.C:
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.waits, sequence)
	return w.acked
}

func (c *Client) sayHungry(lanes []string, free int) (uint64, *ackWait) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sequence++
	c.hungry = &millracev1.ControlHungry{Sequence: c.sequence, Lanes: slices.Clone(lanes), FreeSlots: uint32(free)}
	w := &ackWait{from: make(map[*session]struct{}, len(c.sessions)), done: make(chan struct{})}
	for _, s := range c.sessions {
		if s.conn.send(c.hungry) {
			w.from[s] = struct{}{}
		}
	}
	if len(w.from) == 0 {
		close(w.done)
	} else {
		c.waits[c.sequence] = w
	}
	return c.sequence, w
}

// NotHungry takes back what SendHungry said. A ring may still be under way.
func (c *Client) NotHungry() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.hungry == nil {
		return
	}
	c.hungry = nil
	c.sequence++
	m := &millracev1.ControlHungry{Sequence: c.sequence}
	for _, s := range c.sessions {
		s.conn.send(m)
	}
}

// answered notes that s has acknowledged a HUNGRY, or (when it is gone) that it never will.
func (c *Client) answered(s *session, w *ackWait, ack bool) {
	if _, ok := w.from[s]; !ok {
		return
	}
	delete(w.from, s)
	if ack {
		w.acked++
	}
	if len(w.from) == 0 {
		close(w.done)
	}
}

// Heartbeat sends a heartbeat to one dispatcher, now, beside those that go at intervals; with WantsRenewal it asks to
// renew on the agent's behalf. It reports whether that dispatcher is connected. The answer comes to OnHeartbeatAck.
func (c *Client) Heartbeat(dispatcherID string, hb *millracev1.ControlHeartbeat) bool {
	c.mu.Lock()
	s := c.sessions[dispatcherID]
	c.mu.Unlock()
	if s == nil {
		return false
	}
	c.sign(hb)
	return s.conn.send(hb)
}

// HeartbeatAll sends a heartbeat to every connected dispatcher and returns to how many.
func (c *Client) HeartbeatAll(hb *millracev1.ControlHeartbeat) int {
	c.sign(hb)
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for _, s := range c.sessions {
		if s.conn.send(hb) {
			n++
		}
	}
	return n
}

// sign fills in the worker id. A heartbeat that has it is not written to: it may be on its way to another dispatcher.
func (c *Client) sign(hb *millracev1.ControlHeartbeat) {
	if hb.GetWorkerId() != c.cfg.WorkerID {
		hb.WorkerId = c.cfg.WorkerID
	}
}
