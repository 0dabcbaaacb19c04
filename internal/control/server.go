package control

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// WorkerInfo is one connection of one worker, as its HELLO told. Nobody writes to it.
type WorkerInfo struct {
	ID           string
	AgentVersion string
	Queues       []string
	Slots        int
	Features     []string
	Protocol     uint32 // the version agreed on
	RemoteAddr   string
	ConnectedAt  time.Time
}

// Handler is what the dispatcher does with what it hears. For one worker Connected and Disconnected alternate strictly,
// also when the worker connects again before its old connection has ended: Disconnected for the old one comes first.
type Handler interface {
	// Connected is called before WELCOME is sent, when nothing of this worker is read yet. It may do I/O and should
	// keep to the deadline of ctx. An error refuses the connection; its text goes to the agent, and Disconnected is
	// not called.
	Connected(ctx context.Context, w WorkerInfo) error
	// Disconnected is called once after every Connected that returned nil. It must not block.
	Disconnected(w WorkerInfo)
	// Heartbeat runs on the reading goroutine and must not block. reply may be called from any goroutine, now or later,
	// or never; it fills in the sequence and does not block. After the connection has ended it does nothing.
	Heartbeat(w WorkerInfo, hb *millracev1.ControlHeartbeat, reply func(*millracev1.ControlHeartbeatAck))
	// Hungry runs on the reading goroutine after the worker was put in line and ACKed, and must not block. It is the
	// moment to look for a backlog of its lanes. A worker that is no longer hungry comes without lanes.
	Hungry(w WorkerInfo, h *millracev1.ControlHungry)
}

// ServerConfig is what a Server needs to know. Zero durations and counts have defaults.
type ServerConfig struct {
	// DispatcherID is the incarnation of the dispatcher.
	DispatcherID string
	// Token is the secret that agents must know. Without one the server listens on loopback addresses only.
	Token []byte
	// HeartbeatInterval is how often agents shall send HEARTBEAT. Three of them without a frame end a connection. 10s.
	HeartbeatInterval time.Duration
	// HandshakeTimeout is for everything up to HELLO. 5s.
	HandshakeTimeout time.Duration
	// FrameTimeout is for one frame, from its first byte to its last. 10s.
	FrameTimeout time.Duration
	// ConnectTimeout is for Handler.Connected. 5s.
	ConnectTimeout time.Duration
	// MaxUnauthenticated bounds the connections that have not shown a good HELLO yet; one more closes the oldest. 1024.
	MaxUnauthenticated int
	// QueueBytes bounds what may wait for an agent that does not read. 256 KiB.
	QueueBytes int
	// TLS, when set, is used for every connection; with ClientCAs and RequireAndVerifyClientCert it is mutual.
	TLS *tls.Config
	// Features are the optional features that the dispatcher understands.
	Features []string
}

func (c *ServerConfig) setDefaults() {
	defaultTo(&c.HeartbeatInterval, 10*time.Second)
	defaultTo(&c.HandshakeTimeout, 5*time.Second)
	defaultTo(&c.FrameTimeout, defaultLimits.frame)
	defaultTo(&c.ConnectTimeout, 5*time.Second)
	defaultTo(&c.MaxUnauthenticated, 1024)
	defaultTo(&c.QueueBytes, defaultLimits.queue)
}

func defaultTo[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// Validate reports every problem at once.
func (c ServerConfig) Validate() error {
	var errs []error
	if !ValidID(c.DispatcherID) {
		errs = append(errs, fmt.Errorf("dispatcher id %q: use 1 to 128 of A-Z a-z 0-9 . _ -, the first not a dot", c.DispatcherID))
	}
	if min(c.HeartbeatInterval, c.HandshakeTimeout, c.FrameTimeout, c.ConnectTimeout) < 0 {
		errs = append(errs, errors.New("heartbeat interval and timeouts must not be negative"))
	}
	if c.MaxUnauthenticated < 0 || c.QueueBytes < 0 {
		errs = append(errs, errors.New("limits must not be negative"))
	}
	return errors.Join(errs...)
}

// Deps are what a Server or a Client is given; both may be nil. Several that share a registry share
// their counters.
type Deps struct {
	Log      *slog.Logger
	Registry prometheus.Registerer
}

func (d Deps) logger() *slog.Logger {
	if d.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return d.Log
}

// Server is the dispatcher's end of the channel. All methods are safe for concurrent use.
type Server struct {
	cfg     ServerConfig
	handler Handler
	log     *slog.Logger
	met     *metrics
	lim     limits

	bell  *bell
	peers *registry
	lobby *lobby
}

// NewServer checks the configuration. It starts nothing.
func NewServer(cfg ServerConfig, h Handler, deps Deps) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("control server: %w", err)
	}
	cfg.setDefaults()
	s := &Server{
		cfg: cfg, handler: h, log: deps.logger(), met: newMetrics(deps.Registry, sideServer), lim: defaultLimits,
		bell: newBell(), peers: newRegistry(), lobby: newLobby(cfg.MaxUnauthenticated),
	}
	s.lim.queue, s.lim.frame = cfg.QueueBytes, cfg.FrameTimeout
	return s, nil
}

// Serve accepts connections until ctx ends, and returns after all of them have ended. It closes ln.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	if err := s.mayListen(ln.Addr()); err != nil {
		_ = ln.Close()
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = ln.Close() })
	defer stop()
	var wg sync.WaitGroup
	err := s.accept(ctx, ln, &wg)
	cancel()
	_ = ln.Close()
	wg.Wait()
	return err
}

// mayListen keeps a server without a token from being reachable from elsewhere, whatever its configuration says.
func (s *Server) mayListen(addr net.Addr) error {
	mutual := s.cfg.TLS != nil && s.cfg.TLS.ClientAuth == tls.RequireAndVerifyClientCert
	if tcp, ok := addr.(*net.TCPAddr); ok && len(s.cfg.Token) == 0 && !mutual && !tcp.IP.IsLoopback() {
		return fmt.Errorf("control server: refusing to listen on %s without a token: set MILLRACE_TOKEN, or listen on 127.0.0.1", addr)
	}
	return nil
}

func (s *Server) accept(ctx context.Context, ln net.Listener, wg *sync.WaitGroup) error {
	var pause time.Duration
	for {
		nc, err := ln.Accept()
		switch {
		case err == nil:
			pause = 0
			wg.Go(func() { s.serveConn(ctx, nc) })
			continue
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("control server: listener was closed: %w", err)
		}
		// Out of file descriptors, for example: it passes when connections end.
		pause = min(max(2*pause, 5*time.Millisecond), time.Second)
		s.log.Warn("control accept failed, trying again", "err", err, "pause", pause)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

// Ring tells up to n agents that wait for tasks of this lane that there are some, those that have waited longest first.
// It returns how many were told; they are not hungry any more until they say so again.
func (s *Server) Ring(lane string, n int) int {
	rung := 0
	var m *millracev1.ControlRing
	for rung < n {
		p := s.bell.next(lane)
		if p == nil {
			break
		}
		if m == nil {
			m = &millracev1.ControlRing{Lane: lane}
		}
		// One that cannot be told has lost its connection, and will be hungry again on the next one.
		if p.conn.send(m) {
			rung++
		}
	}
	return rung
}

// HungryFor returns how many agents wait for tasks, by lane; lanes for which nobody waits are not in it.
func (s *Server) HungryFor() map[string]int { return s.bell.waiting() }

// Send queues m for the worker and reports whether it has a connection here that took it. It never blocks. True does
// not mean that the worker has got it.
func (s *Server) Send(workerID string, m Message) bool {
	p := s.peers.ready(workerID)
	return p != nil && p.conn.send(m)
}

// Workers returns the workers that are connected now, by id.
func (s *Server) Workers() []WorkerInfo { return s.peers.infos() }
