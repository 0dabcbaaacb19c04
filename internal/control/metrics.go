package control

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

// Which end of the channel a metric belongs to; both can live in one process.
const (
	sideServer = "dispatcher"
	sideClient = "agent"
)

// Why a connection was refused during the handshake; label values.
const (
	refusedToken       = "token"       // the MAC is wrong
	refusedVersion     = "version"     // no common protocol version
	refusedProtocol    = "protocol"    // not a handshake, or one with contents against the rules
	refusedFrame       = "frame"       // not even a frame
	refusedTimeout     = "timeout"     // it took too long
	refusedCrowded     = "crowded"     // the oldest of too many unfinished handshakes
	refusedUnavailable = "unavailable" // the handler refused it
	refusedGone        = "gone"        // the peer hung up
)

var refusals = []string{
	refusedToken, refusedVersion, refusedProtocol, refusedFrame, refusedTimeout, refusedCrowded, refusedUnavailable, refusedGone,
}

type metrics struct {
	opened    prometheus.Counter
	closed    prometheus.Counter
	replaced  prometheus.Counter
	timeouts  prometheus.Counter
	queueFull prometheus.Counter
	refused   map[string]prometheus.Counter
	bad       map[BadFrame]prometheus.Counter

	// By type; index 0 counts the types that are not known.
	in, out [typeEnd]prometheus.Counter
}

// register registers c, or returns what is registered under its names already: a process can have several clients, one
// after another or at once, and their counts add up.
func register[C prometheus.Collector](reg prometheus.Registerer, c C) C {
	if reg == nil {
		return c
	}
	err := reg.Register(c)
	if err == nil {
		return c
	}
	if before, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		if same, ok := before.ExistingCollector.(C); ok {
			return same
		}
	}
	panic(err) // the names are taken by something else: a programmer's mistake, seen at start
}

// newMetrics registers with reg, which may be nil. Every counter shows 0 from the start.
func newMetrics(reg prometheus.Registerer, side string) *metrics {
	opts := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{
			Namespace: "millrace", Subsystem: "control", Name: name, Help: help,
			ConstLabels: prometheus.Labels{"side": side},
		}
	}
	counter := func(name, help string) prometheus.Counter {
		return register(reg, prometheus.NewCounter(opts(name, help)))
	}
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		return register(reg, prometheus.NewCounterVec(opts(name, help), labels))
	}
	m := &metrics{
		opened:    counter("connections_opened_total", "Control connections that finished the handshake."),
		closed:    counter("connections_closed_total", "Control connections that had finished the handshake and ended."),
		replaced:  counter("connections_replaced_total", "Control connections closed because the same worker connected again."),
		timeouts:  counter("read_timeouts_total", "Control connections closed because the peer was silent or sent a frame too slowly."),
		queueFull: counter("queue_full_drops_total", "Control connections dropped because the peer did not read fast enough."),
		refused:   make(map[string]prometheus.Counter, len(refusals)),
		bad:       make(map[BadFrame]prometheus.Counter, len(badFrames)),
	}
	refused := vec("handshakes_refused_total", "Handshakes that did not end in a connection.", "reason")
	for _, r := range refusals {
		m.refused[r] = refused.WithLabelValues(r)
	}
	bad := vec("bad_frames_total", "Frames that could not be read; each ended its connection.", "kind")
	for _, k := range badFrames {
		m.bad[k] = bad.WithLabelValues(string(k))
	}
	frames := vec("frames_total", "Frames by direction and type; unknown types are skipped.", "direction", "type")
	for t := range typeEnd {
		name := "unknown"
		if t.known() {
			name = t.String()
		}
		m.in[t] = frames.WithLabelValues("in", name)
		m.out[t] = frames.WithLabelValues("out", name)
	}
	return m
}

func (m *metrics) frameIn(t Type) {
	if !t.known() {
		t = 0
	}
	m.in[t].Inc()
}
