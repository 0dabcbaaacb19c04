package control

import (
	"context"
	"crypto/hmac"
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

const (
	// The pause before the first try after a lost connection: enough for a restarted dispatcher's thousand agents not
	// to come in the same millisecond.
	firstBackoff = 200 * time.Millisecond
	// The same failure is logged once in this time.
	logEvery = 30 * time.Second
)

// session is one welcomed connection to one dispatcher.
type session struct {
	client *Client
	id     string // the dispatcher's
	conn   *conn
	heard  atomic.Bool // something came since the last tick
}

// keepUp connects to one dispatcher, again and again, until ctx ends.
func (c *Client) keepUp(ctx context.Context, id, addr string) {
	log := c.log.With("dispatcher", id, "addr", addr)
	var (
		pause  time.Duration
		said   string
		saidAt time.Time
	)
	for ctx.Err() == nil {
		welcome, err := c.connectOnce(ctx, id, addr)
		if ctx.Err() != nil {
			return
		}
		switch {
		case welcome:
			pause = firstBackoff
		case lasting(err):
			pause = c.cfg.RefusedBackoff
		default:
			pause = min(max(2*pause, firstBackoff), c.cfg.MaxBackoff)
		}
		if text := err.Error(); welcome || text != said || time.Since(saidAt) > logEvery {
			log.Warn("no control connection, trying again; meanwhile Redis serves, slower", "err", err, "pause", pause)
			said, saidAt = text, time.Now()
		}
		sleep(ctx, pause/2+rand.N(pause/2+1))
	}
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// lasting reports whether err is a refusal that will not pass by itself.
func lasting(err error) bool {
	r, ok := errors.AsType[*refusal](err)
	return ok && (r.code == millracev1.ControlErrorCode_CONTROL_ERROR_CODE_TOKEN ||
		r.code == millracev1.ControlErrorCode_CONTROL_ERROR_CODE_VERSION)
}

// connectOnce is one connection from dial to end. It reports whether there was a WELCOME, and why it ended.
func (c *Client) connectOnce(ctx context.Context, id, addr string) (welcomed bool, err error) {
	d := net.Dialer{Timeout: c.cfg.DialTimeout}
	raw, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return false, fmt.Errorf("dial dispatcher: %w", err)
	}
	tune(raw)
	nc := raw
	if c.cfg.TLS != nil {
		nc = tls.Client(raw, c.tlsConfig(addr))
	}
	conn := newConn(nc, raw, c.met, c.lim)
	defer conn.close()
	stop := context.AfterFunc(ctx, conn.abort)
	defer stop()

	w, err := c.handshake(conn, id)
	if err != nil {
		c.refuse(conn, err)
		return false, err
	}
	err = c.serve(ctx, conn, id, w)
	if bye := conn.ending(err); bye != nil {
		conn.hangUp(bye.GetCode(), bye.GetMessage())
	}
	return true, err
}

func (c *Client) tlsConfig(addr string) *tls.Config {
	if c.cfg.TLS.ServerName != "" {
		return c.cfg.TLS
	}
	cfg := c.cfg.TLS.Clone()
	if host, _, err := net.SplitHostPort(addr); err == nil {
		cfg.ServerName = host
	}
	return cfg
}

// handshake waits for the CHALLENGE, answers it, and checks the WELCOME.
func (c *Client) handshake(conn *conn, id string) (*millracev1.ControlWelcome, error) {
	conn.handshakeBy(time.Now().Add(c.cfg.HandshakeTimeout))
	ch := &millracev1.ControlChallenge{}
	if err := expect(conn, TypeChallenge, ch); err != nil {
		return nil, err
	}
	if err := checkChallenge(ch, id); err != nil {
		return nil, err
	}
	nonce := newNonce()
	conn.send(&millracev1.ControlHello{
		WorkerId: c.cfg.WorkerID, ProtocolVersionMin: ProtocolMin, ProtocolVersionMax: ProtocolMax,
		AgentVersion: c.cfg.AgentVersion, Queues: c.cfg.Queues, Slots: uint32(c.cfg.Slots), Features: c.cfg.Features,
		Mac: helloMAC(c.cfg.Token, ch.GetNonce(), c.cfg.WorkerID), Nonce: nonce,
	})
	w := &millracev1.ControlWelcome{}
	if err := expect(conn, TypeWelcome, w); err != nil {
		return nil, err
	}
	if w.GetDispatcherId() != id || !hmac.Equal(w.GetMac(), welcomeMAC(c.cfg.Token, nonce, id)) {
		return nil, &refusal{
			reason: refusedToken, code: millracev1.ControlErrorCode_CONTROL_ERROR_CODE_TOKEN,
			text: "the dispatcher did not prove that it knows MILLRACE_TOKEN; is it really dispatcher " + id + "?",
		}
	}
	if v := w.GetProtocolVersion(); v < ProtocolMin || v > ProtocolMax {
		return nil, &refusal{
			reason: refusedVersion, code: millracev1.ControlErrorCode_CONTROL_ERROR_CODE_VERSION,
			text: fmt.Sprintf("the dispatcher chose protocol version %d, this agent speaks %d to %d; upgrade the older of the two", v, ProtocolMin, ProtocolMax),
		}
	}
	return w, nil
}

func checkChallenge(ch *millracev1.ControlChallenge, id string) error {
	if got := ch.GetDispatcherId(); got != id {
		// Ids are never used again: the dispatcher that was to be called is gone, and its address belongs to another.
		return &refusal{
			reason: refusedProtocol, code: millracev1.ControlErrorCode_CONTROL_ERROR_CODE_PROTOCOL,
			text: fmt.Sprintf("at this address is dispatcher %.200q, not %q", got, id),
		}
	}
	if len(ch.GetNonce()) != nonceSize {
		return &refusal{
			reason: refusedProtocol, code: millracev1.ControlErrorCode_CONTROL_ERROR_CODE_PROTOCOL,
			text: fmt.Sprintf("the nonce of the challenge has %d bytes instead of %d", len(ch.GetNonce()), nonceSize),
		}
	}
	if _, ok := negotiate(ch.GetProtocolVersionMin(), ch.GetProtocolVersion(), ProtocolMin, ProtocolMax); !ok {
		return &refusal{
			reason: refusedVersion, code: millracev1.ControlErrorCode_CONTROL_ERROR_CODE_VERSION,
			text: fmt.Sprintf("no common protocol version: the dispatcher speaks %d to %d, this agent %d to %d; upgrade the older of the two",
				ch.GetProtocolVersionMin(), ch.GetProtocolVersion(), ProtocolMin, ProtocolMax),
		}
	}
	return nil
}

// expect reads the one frame that may come now, or the ERROR that comes instead.
func expect(conn *conn, want Type, m Message) error {
	t, body, err := conn.next()
	if err != nil {
		return readRefusal(err)
	}
	switch t {
	case want:
		if err := decode(t, body, m); err != nil {
			return readRefusal(err)
		}
		return nil
	case TypeError:
		e := &millracev1.ControlError{}
		if err := decode(t, body, e); err != nil {
			return readRefusal(err)
		}
		return peerError(e)
	default:
		return &refusal{
			reason: refusedProtocol, code: millracev1.ControlErrorCode_CONTROL_ERROR_CODE_PROTOCOL,
			text: fmt.Sprintf("expected a %s frame, got %s", want, t),
		}
	}
}

// refuse ends a connection on which the handshake did not work out.
func (c *Client) refuse(conn *conn, err error) {
	r, ok := errors.AsType[*refusal](err)
	if !ok {
		return
	}
	c.met.refused[r.reason].Inc()
	conn.ending(err) // counts bad frames
	// Who heard an ERROR does not answer with one.
	if !r.heard && r.code != millracev1.ControlErrorCode_CONTROL_ERROR_CODE_UNSPECIFIED {
		conn.hangUp(r.code, r.text)
	}
}

// serve announces what the agent waits for and runs, and reads until the connection ends.
func (c *Client) serve(ctx context.Context, conn *conn, id string, w *millracev1.ControlWelcome) error {
	interval := w.GetHeartbeatInterval().AsDuration()
	if interval <= 0 {
		interval = 10 * time.Second
	}
	conn.handshakeBy(time.Time{})
	conn.established(3 * interval)
	s := &session{client: c, id: id, conn: conn}
	c.met.opened.Inc()
	defer c.met.closed.Inc()
	c.log.Info("connected to dispatcher", "dispatcher", id, "remote", conn.raw.RemoteAddr().String())
	if c.cb.OnConnected != nil {
		c.cb.OnConnected(id, w)
	}
	if c.cb.OnDisconnected != nil {
		defer c.cb.OnDisconnected(id)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c.join(s)
	defer c.leave(s)
	s.beat()
	wg.Go(func() { s.tick(ctx, interval) })
	return s.read()
}

// join makes s one of the connections, behind the HUNGRY that was said before it: under the lock, so that a HUNGRY of
// now is either that one or goes to s too.
func (c *Client) join(s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sessions[s.id] = s
	if c.hungry != nil {
		s.conn.send(c.hungry)
	}
}

func (c *Client) leave(s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sessions[s.id] == s {
		delete(c.sessions, s.id)
	}
	for _, w := range c.waits {
		c.answered(s, w, false)
	}
}

// beat sends a heartbeat of the agent's state.
func (s *session) beat() {
	hb := &millracev1.ControlHeartbeat{}
	if s.client.cb.State != nil {
		hb = s.client.cb.State()
	}
	s.client.sign(hb)
	s.conn.send(hb)
}

// tick sends heartbeats, and a PING when the dispatcher was silent: it may be slow to answer heartbeats, for which it
// asks Redis, but PONG comes from its reading goroutine.
func (s *session) tick(ctx context.Context, interval time.Duration) {
	var pings uint64
	for {
		sleep(ctx, interval-interval/10+rand.N(interval/10+1))
		if ctx.Err() != nil {
			return
		}
		s.beat()
		if !s.heard.Swap(false) {
			pings++
			s.conn.send(&millracev1.ControlPing{Sequence: pings})
		}
	}
}

func (s *session) read() error {
	for {
		t, body, err := s.conn.next()
		if err != nil {
			return fmt.Errorf("read from dispatcher: %w", err)
		}
		s.heard.Store(true)
		if err := s.handle(t, body); err != nil {
			return err
		}
	}
}

// handle runs the callback of one frame.
func (s *session) handle(t Type, body []byte) error {
	cb := &s.client.cb
	switch t {
	case TypeCancel:
		return deliver(t, body, s.id, &millracev1.ControlCancel{}, cb.OnCancel)
	case TypeKill:
		return deliver(t, body, s.id, &millracev1.ControlKill{}, cb.OnKill)
	case TypeSignal:
		return deliver(t, body, s.id, &millracev1.ControlSignal{}, cb.OnSignal)
	case TypeRing:
		return deliver(t, body, s.id, &millracev1.ControlRing{}, s.ring)
	case TypeHeartbeatAck:
		return deliver(t, body, s.id, &millracev1.ControlHeartbeatAck{}, cb.OnHeartbeatAck)
	case TypeDrain:
		return deliver(t, body, s.id, &millracev1.ControlDrain{}, cb.OnDrain)
	case TypeResume:
		return deliver(t, body, s.id, &millracev1.ControlResume{}, s.resume)
	case TypeAck:
		return deliver(t, body, s.id, &millracev1.ControlAck{}, s.ack)
	case TypePing:
		return deliver(t, body, s.id, &millracev1.ControlPing{}, s.ping)
	case TypeError:
		m := &millracev1.ControlError{}
		if err := decode(t, body, m); err != nil {
			return err
		}
		return peerError(m)
	default:
		// Known, but not for us, or not now: harmless.
		return nil
	}
}

func deliver[M Message](t Type, body []byte, id string, m M, to func(string, M)) error {
	if to == nil {
		return nil
	}
	if err := decode(t, body, m); err != nil {
		return err
	}
	to(id, m)
	return nil
}

func (s *session) ring(id string, m *millracev1.ControlRing) {
	if s.client.cb.OnRing != nil {
		s.client.cb.OnRing(id, m.GetLane())
	}
}

func (s *session) resume(id string, _ *millracev1.ControlResume) {
	if s.client.cb.OnResume != nil {
		s.client.cb.OnResume(id)
	}
}

func (s *session) ping(_ string, m *millracev1.ControlPing) {
	s.conn.send(&millracev1.ControlPong{Sequence: m.GetSequence()})
}

func (s *session) ack(_ string, m *millracev1.ControlAck) {
	s.client.mu.Lock()
	defer s.client.mu.Unlock()
	if w := s.client.waits[m.GetSequence()]; w != nil {
		s.client.answered(s, w, true)
	}
}
