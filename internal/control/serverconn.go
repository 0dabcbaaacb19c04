package control

import (
	"context"
	"crypto/hmac"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// serveConn is the goroutine of one connection: handshake, then reading until it ends.
func (s *Server) serveConn(ctx context.Context, nc net.Conn) {
	tune(nc)
	raw := nc
	if s.cfg.TLS != nil {
		nc = tls.Server(nc, s.cfg.TLS)
	}
	c := newConn(nc, raw, s.met, s.lim)
	defer c.close()
	stop := context.AfterFunc(ctx, func() {
		c.stop(&millracev1.ControlError{
			Code:    millracev1.ControlErrorCode_CONTROL_ERROR_CODE_SHUTTING_DOWN,
			Message: "dispatcher " + s.cfg.DispatcherID + " stops; use another one",
		})
	})
	defer stop()

	place := s.lobby.enter(c)
	hello, version, err := s.handshake(c)
	if s.lobby.leave(place) {
		err = &refusal{reason: refusedCrowded, err: errors.New("too many unfinished handshakes")}
	}
	if err != nil {
		s.refuse(c, err)
		return
	}
	s.servePeer(ctx, c, hello, version)
}

// handshake sends the CHALLENGE and checks the HELLO.
func (s *Server) handshake(c *conn) (*millracev1.ControlHello, uint32, error) {
	c.handshakeBy(time.Now().Add(s.cfg.HandshakeTimeout))
	nonce := newNonce()
	c.send(&millracev1.ControlChallenge{
		Nonce: nonce, DispatcherId: s.cfg.DispatcherID,
		ProtocolVersion: ProtocolMax, ProtocolVersionMin: ProtocolMin,
	})
	t, body, err := c.next()
	if err != nil {
		return nil, 0, readRefusal(err)
	}
	if t != TypeHello {
		return nil, 0, &refusal{
			reason: refusedProtocol, code: millracev1.ControlErrorCode_CONTROL_ERROR_CODE_PROTOCOL,
			text: fmt.Sprintf("expected a hello frame, got %s", t),
		}
	}
	hello := &millracev1.ControlHello{}
	if err := decode(t, body, hello); err != nil {
		return nil, 0, readRefusal(err)
	}
	version, err := s.checkHello(hello, nonce)
	return hello, version, err
}

func (s *Server) checkHello(h *millracev1.ControlHello, nonce []byte) (uint32, error) {
	if !ValidID(h.GetWorkerId()) {
		return 0, &refusal{
			reason: refusedProtocol, code: millracev1.ControlErrorCode_CONTROL_ERROR_CODE_PROTOCOL,
			text: fmt.Sprintf("worker id %.200q: use 1 to 128 of A-Z a-z 0-9 . _ -, the first not a dot", h.GetWorkerId()),
		}
	}
	// The token comes first: who does not know it learns nothing else.
	if !hmac.Equal(h.GetMac(), helloMAC(s.cfg.Token, nonce, h.GetWorkerId())) {
		return 0, &refusal{
			reason: refusedToken, code: millracev1.ControlErrorCode_CONTROL_ERROR_CODE_TOKEN,
			text: fmt.Sprintf("wrong token: MILLRACE_TOKEN of worker %s is not that of dispatcher %s; set both to the same value", h.GetWorkerId(), s.cfg.DispatcherID),
		}
	}
	version, ok := negotiate(h.GetProtocolVersionMin(), h.GetProtocolVersionMax(), ProtocolMin, ProtocolMax)
	if !ok {
		return 0, &refusal{
			reason: refusedVersion, code: millracev1.ControlErrorCode_CONTROL_ERROR_CODE_VERSION,
			text: fmt.Sprintf("no common protocol version: dispatcher %s speaks %d to %d, worker %s (version %.100s) speaks %d to %d; upgrade the older of the two",
				s.cfg.DispatcherID, ProtocolMin, ProtocolMax, h.GetWorkerId(), h.GetAgentVersion(), h.GetProtocolVersionMin(), h.GetProtocolVersionMax()),
		}
	}
	if len(h.GetNonce()) != nonceSize {
		return 0, &refusal{
			reason: refusedProtocol, code: millracev1.ControlErrorCode_CONTROL_ERROR_CODE_PROTOCOL,
			text: fmt.Sprintf("the nonce of the hello has %d bytes instead of %d", len(h.GetNonce()), nonceSize),
		}
	}
	return version, nil
}

// refuse ends a connection before its WELCOME.
func (s *Server) refuse(c *conn, err error) {
	var r *refusal
	if !errors.As(err, &r) {
		r = &refusal{reason: refusedGone, err: err}
	}
	s.met.refused[r.reason].Inc()
	if _, ok := errors.AsType[*FrameError](err); ok {
		c.ending(err) // counts the kind
	}
	level := s.log.Warn
	if r.reason == refusedGone || c.stopping.Load() {
		level = s.log.Debug // a port check, or our own end
	}
	level("control handshake refused", "reason", r.reason, "remote", c.raw.RemoteAddr().String(), "err", err)
	if r.code == millracev1.ControlErrorCode_CONTROL_ERROR_CODE_UNSPECIFIED {
		return
	}
	c.hangUp(r.code, r.text)
}

// servePeer owns an authenticated connection to its end.
func (s *Server) servePeer(ctx context.Context, c *conn, hello *millracev1.ControlHello, version uint32) {
	c.handshakeBy(time.Time{}) // the handler has a deadline of its own, and nothing is read meanwhile
	p := &peer{conn: c, gone: make(chan struct{}), info: WorkerInfo{
		ID: hello.GetWorkerId(), AgentVersion: hello.GetAgentVersion(),
		Queues: hello.GetQueues(), Slots: int(hello.GetSlots()), Features: hello.GetFeatures(),
		Protocol: version, RemoteAddr: c.raw.RemoteAddr().String(), ConnectedAt: time.Now(),
	}}
	defer close(p.gone)
	if before := s.peers.claim(p); before != nil {
		s.met.replaced.Inc()
		s.log.Info("control connection replaced by a newer one", "worker", p.info.ID, "remote", p.info.RemoteAddr)
		before.conn.interrupt()
		before.conn.abort()
		<-before.gone // not long: its reading has ended, and Disconnected does not block
	}
	defer s.peers.release(p)
	if !s.peers.current(p) {
		return // replaced while it waited
	}

	if err := s.connect(ctx, p); err != nil {
		s.refuse(c, &refusal{
			reason: refusedUnavailable, code: millracev1.ControlErrorCode_CONTROL_ERROR_CODE_UNAVAILABLE,
			text: fmt.Sprintf("dispatcher %s cannot take worker %s now: %v", s.cfg.DispatcherID, p.info.ID, err),
			err:  err,
		})
		return
	}
	defer func() {
		s.peers.release(p)
		s.bell.hungry(p, nil)
		s.handler.Disconnected(p.info)
	}()
	welcome := &millracev1.ControlWelcome{
		DispatcherId: s.cfg.DispatcherID, HeartbeatInterval: durationpb.New(s.cfg.HeartbeatInterval),
		Features: s.cfg.Features, ProtocolVersion: version,
		Mac: welcomeMAC(s.cfg.Token, hello.GetNonce(), s.cfg.DispatcherID),
	}
	c.established(3 * s.cfg.HeartbeatInterval)
	if !s.peers.welcome(p, welcome) {
		return // replaced, or gone, in the meantime
	}
	s.met.opened.Inc()
	defer s.met.closed.Inc()
	s.log.Info("worker connected", "worker", p.info.ID, "remote", p.info.RemoteAddr, "version", p.info.AgentVersion)
	err := s.read(p)
	s.log.Info("worker disconnected", "worker", p.info.ID, "remote", p.info.RemoteAddr, "err", err)
	if bye := c.ending(err); bye != nil {
		c.hangUp(bye.GetCode(), bye.GetMessage())
	} else if c.stopping.Load() {
		c.linger() // for the goodbye that was queued
	}
}

func (s *Server) connect(ctx context.Context, p *peer) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.ConnectTimeout)
	defer cancel()
	return s.handler.Connected(ctx, p.info)
}

// read handles frames until the connection ends, and returns why it did.
func (s *Server) read(p *peer) error {
	for {
		t, body, err := p.conn.next()
		if err != nil {
			return err
		}
		if err := s.handle(p, t, body); err != nil {
			return err
		}
	}
}

func (s *Server) handle(p *peer, t Type, body []byte) error {
	switch t {
	case TypeHeartbeat:
		hb := &millracev1.ControlHeartbeat{}
		if err := decode(t, body, hb); err != nil {
			return err
		}
		return s.heartbeat(p, hb)
	case TypeHungry:
		h := &millracev1.ControlHungry{}
		if err := decode(t, body, h); err != nil {
			return err
		}
		return s.hungry(p, h)
	case TypePing:
		ping := &millracev1.ControlPing{}
		if err := decode(t, body, ping); err != nil {
			return err
		}
		p.conn.send(&millracev1.ControlPong{Sequence: ping.GetSequence()})
		return nil
	case TypeError:
		e := &millracev1.ControlError{}
		if err := decode(t, body, e); err != nil {
			return err
		}
		return peerError(e)
	default:
		// Known, but not for us, or not now: harmless.
		return nil
	}
}

func (s *Server) heartbeat(p *peer, hb *millracev1.ControlHeartbeat) error {
	if id := hb.GetWorkerId(); id != "" && id != p.info.ID {
		return &FrameError{BadBody, fmt.Sprintf("a heartbeat of worker %.200q on the connection of worker %s", id, p.info.ID)}
	}
	sequence := hb.GetSequence()
	s.handler.Heartbeat(p.info, hb, func(ack *millracev1.ControlHeartbeatAck) {
		ack.Sequence = sequence
		p.conn.send(ack)
	})
	return nil
}

func (s *Server) hungry(p *peer, h *millracev1.ControlHungry) error {
	lanes, ok := validLanes(h.GetLanes())
	if !ok {
		return &FrameError{BadBody, fmt.Sprintf("a hungry frame names at most %d lanes of 1 to %d bytes", maxLanes, maxLaneName)}
	}
	if h.GetFreeSlots() == 0 {
		lanes, h.Lanes = nil, nil
	}
	// In line before the ACK: what is added after the agent saw the ACK must ring.
	s.bell.hungry(p, lanes)
	p.conn.send(&millracev1.ControlAck{Sequence: h.GetSequence()})
	s.handler.Hungry(p.info, h)
	return nil
}

// tune sets what every control connection has, whoever dialled it. Frames are small and wanted at once.
func tune(nc net.Conn) {
	tcp, ok := nc.(*net.TCPConn)
	if !ok {
		return
	}
	// Errors mean that the connection is gone already; reading will say so.
	_ = tcp.SetNoDelay(true)
	_ = tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3})
}
