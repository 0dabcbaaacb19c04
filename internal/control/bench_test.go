package control

import (
	"fmt"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// Three to compare: a bare ping-pong of 48 bytes; PING and PONG with a Server; and a CANCEL answered by a heartbeat over
// a whole Server and a whole Client, with one more change of goroutine, from the Server's reader to the caller. Hot: one after another; idle: with a pause, so that every hop pays for waking up.

func BenchmarkRoundTrip(b *testing.B) {
	for _, gap := range []time.Duration{0, 2 * time.Millisecond} {
		b.Run(fmt.Sprintf("bare/gap=%v", gap), func(b *testing.B) { roundTrips(b, gap, bareTrip(b)) })
		b.Run(fmt.Sprintf("ping/gap=%v", gap), func(b *testing.B) { roundTrips(b, gap, pingTrip(b)) })
		b.Run(fmt.Sprintf("cancel/gap=%v", gap), func(b *testing.B) { roundTrips(b, gap, cancelTrip(b)) })
	}
}

func roundTrips(b *testing.B, gap time.Duration, trip func()) {
	b.Helper()
	took := make([]time.Duration, 0, b.N)
	for b.Loop() {
		if gap > 0 {
			time.Sleep(gap)
		}
		start := time.Now()
		trip()
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1e3, "p50-µs")
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/1e3, "p99-µs")
	b.ReportAllocs()
}

func bareTrip(b *testing.B) func() {
	b.Helper()
	lc := net.ListenConfig{}
	ln, err := lc.Listen(b.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	go func() {
		nc, err := ln.Accept()
		if err != nil {
			return
		}
		defer nc.Close()
		buf := make([]byte, 48)
		for {
			if _, err := io.ReadFull(nc, buf); err != nil {
				return
			}
			if _, err := nc.Write(buf); err != nil {
				return
			}
		}
	}()
	d := net.Dialer{}
	nc, err := d.DialContext(b.Context(), "tcp", ln.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = nc.Close(); _ = ln.Close() })
	buf := make([]byte, 48)
	return func() {
		if _, err := nc.Write(buf); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(nc, buf); err != nil {
			b.Fatal(err)
		}
	}
}

// pingTrip is PING and PONG.
func pingTrip(b *testing.B) func() {
	b.Helper()
	r := connectRaw(b, startServer(b, newRecorder(), nil).addr, "w-1")
	_ = r.nc.SetDeadline(time.Time{})
	var frame []byte
	ping, pong := &millracev1.ControlPing{}, &millracev1.ControlPong{}
	return func() {
		ping.Sequence++
		frame, _ = AppendFrame(frame[:0], ping)
		r.write(frame)
		if r.recv(pong); pong.GetSequence() != ping.GetSequence() {
			b.Fatal("another pong")
		}
	}
}

// echo is a handler whose heartbeats come out of a channel.
type echo struct {
	*recorder
	beats chan struct{}
}

func (e echo) Heartbeat(WorkerInfo, *millracev1.ControlHeartbeat, func(*millracev1.ControlHeartbeatAck)) {
	e.beats <- struct{}{}
}

// cancelTrip goes from Send to OnCancel, and back by Heartbeat to the Handler.
func cancelTrip(b *testing.B) func() {
	b.Helper()
	e := echo{newRecorder(), make(chan struct{}, 1)}
	s := startServer(b, e.recorder, nil)
	s.handler = e
	var c *Client
	hb := &millracev1.ControlHeartbeat{WorkerId: "w-1", Sequence: 1, RunningCount: 1}
	c, err := NewClient(ClientConfig{WorkerID: "w-1", Token: []byte(testToken)}, Callbacks{
		OnCancel: func(id string, _ *millracev1.ControlCancel) { c.Heartbeat(id, hb) },
	}, Deps{Registry: prometheus.NewRegistry()})
	if err != nil {
		b.Fatal(err)
	}
	done := make(chan error, 1)
	c.SetTargets(map[string]string{"d-1": s.addr})
	ctx := b.Context() // ends before Cleanup
	go func() { done <- c.Run(ctx) }()
	b.Cleanup(func() {
		if err := <-done; err != nil {
			b.Error(err)
		}
	})
	<-e.beats // the first, after WELCOME
	m := &millracev1.ControlCancel{TaskId: "01J9ZQ4V7M3K2X8T5B6C7D8E9F", Attempt: 1}
	return func() {
		if !s.Send("w-1", m) {
			b.Fatal("not sent")
		}
		<-e.beats
	}
}

func BenchmarkRing(b *testing.B) {
	s := startServer(b, newRecorder(), nil)
	r := connectRaw(b, s.addr, "w-1")
	go func() { _, _ = io.Copy(io.Discard, r.nc) }()
	p := s.peers.ready("w-1")
	lanes := []string{"default"}
	b.ReportAllocs()
	for b.Loop() {
		s.bell.hungry(p, lanes)
		s.Ring("default", 1)
	}
}
