package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/testing/protocmp"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

const (
	testToken = "a token for tests"
	patience  = 10 * time.Second // far longer than anything takes
)

// event is a call of a Handler or of a callback.
type event struct {
	What string
	Who  string
	Msg  Message
}

// recorder is a Handler that tells what it hears.
type recorder struct {
	events  chan event
	connect func(context.Context, WorkerInfo) error                            // nil: accept
	answer  func(*millracev1.ControlHeartbeat) *millracev1.ControlHeartbeatAck // nil: a plain ack
}

func newRecorder() *recorder { return &recorder{events: make(chan event, 10_000)} }

func (r *recorder) Connected(ctx context.Context, w WorkerInfo) error {
	if r.connect != nil {
		if err := r.connect(ctx, w); err != nil {
			return err
		}
	}
	r.events <- event{What: "connected", Who: w.ID}
	return nil
}

func (r *recorder) Disconnected(w WorkerInfo) { r.events <- event{What: "disconnected", Who: w.ID} }

func (r *recorder) Heartbeat(w WorkerInfo, hb *millracev1.ControlHeartbeat, reply func(*millracev1.ControlHeartbeatAck)) {
	r.events <- event{"heartbeat", w.ID, hb}
	ack := &millracev1.ControlHeartbeatAck{}
	if r.answer != nil {
		ack = r.answer(hb)
	}
	reply(ack)
}

func (r *recorder) Hungry(w WorkerInfo, h *millracev1.ControlHungry) {
	r.events <- event{"hungry", w.ID, h}
}

// await waits for the event what of who and drops those before it.
func await(t *testing.T, events <-chan event, what, who string) event {
	t.Helper()
	timeout := time.After(patience)
	for {
		select {
		case e := <-events:
			if e.What == what && (who == "" || e.Who == who) {
				return e
			}
		case <-timeout:
			t.Fatalf("no %s %s", what, who)
		}
	}
}

// testServer is a server that runs until the test ends.
type testServer struct {
	*Server
	rec  *recorder
	addr string
	reg  *prometheus.Registry
	stop func() // and wait; may be called more than once
}

func startServer(t testing.TB, rec *recorder, change func(*ServerConfig)) *testServer {
	t.Helper()
	return startServerAt(t, rec, "127.0.0.1:0", change)
}

func startServerAt(t testing.TB, rec *recorder, addr string, change func(*ServerConfig)) *testServer {
	t.Helper()
	cfg := ServerConfig{DispatcherID: "d-1", Token: []byte(testToken), HeartbeatInterval: patience}
	if change != nil {
		change(&cfg)
	}
	reg := prometheus.NewRegistry()
	s, err := NewServer(cfg, rec, Deps{Log: testLog(t), Registry: reg})
	if err != nil {
		t.Fatal(err)
	}
	lc := net.ListenConfig{}
	ln, err := lc.Listen(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, ln) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	t.Cleanup(stop)
	return &testServer{Server: s, rec: rec, addr: ln.Addr().String(), reg: reg, stop: stop}
}

func testLog(t testing.TB) *slog.Logger {
	t.Helper()
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
}

// metric sums the series of a counter whose labels include these values.
func metric(t *testing.T, reg *prometheus.Registry, name string, values ...string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() != "millrace_control_"+name {
			continue
		}
	series:
		for _, m := range f.GetMetric() {
			have := map[string]bool{}
			for _, l := range m.GetLabel() {
				have[l.GetValue()] = true
			}
			for _, v := range values {
				if !have[v] {
					continue series
				}
			}
			sum += m.GetCounter().GetValue()
		}
	}
	return sum
}

// awaitThat waits for something that no event announces.
func awaitThat(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("never: %s", what)
}

// raw is an agent made of bare frames, so that it can do what a Client never would.
type raw struct {
	t  testing.TB
	nc net.Conn
	fr *frameReader
}

func dialRaw(t testing.TB, addr string) *raw {
	t.Helper()
	d := net.Dialer{Timeout: patience}
	nc, err := d.DialContext(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nc.Close() })
	_ = nc.SetDeadline(time.Now().Add(3 * patience))
	return &raw{t: t, nc: nc, fr: newFrameReader(nc, MaxFrame)}
}

func (r *raw) write(b []byte) {
	r.t.Helper()
	if _, err := r.nc.Write(b); err != nil {
		r.t.Fatal(err)
	}
}

func (r *raw) send(ms ...Message) {
	r.t.Helper()
	r.write(mustFrame(r.t, ms...))
}

// recv reads one frame into m, which must be of its type.
func (r *raw) recv(m Message) {
	r.t.Helper()
	t, body, err := r.fr.next()
	if err != nil {
		r.t.Fatalf("waiting for %T: %v", m, err)
	}
	if want, _ := TypeOf(m); t != want {
		r.t.Fatalf("got a %s frame, want %s", t, want)
	}
	if err := decode(t, body, m); err != nil {
		r.t.Fatal(err)
	}
}

func (r *raw) want(m Message) {
	r.t.Helper()
	got := m.ProtoReflect().New().Interface()
	r.recv(got)
	if diff := cmp.Diff(m, got, protocmp.Transform()); diff != "" {
		r.t.Fatalf("%T (-want +got):\n%s", m, diff)
	}
}

// wantEnd reads an ERROR of this code and then the end.
func (r *raw) wantEnd(code millracev1.ControlErrorCode) string {
	r.t.Helper()
	e := &millracev1.ControlError{}
	r.recv(e)
	if e.GetCode() != code {
		r.t.Fatalf("got error %v, want code %v", e, code)
	}
	r.wantClosed()
	return e.GetMessage()
}

func (r *raw) wantClosed() {
	r.t.Helper()
	for {
		_, _, err := r.fr.next()
		if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
			r.t.Fatal("the connection is still open")
		}
		if err != nil {
			return
		}
	}
}

// hello answers the challenge as this worker would, changed by change.
func (r *raw) hello(worker string, change func(*millracev1.ControlHello)) {
	r.t.Helper()
	ch := &millracev1.ControlChallenge{}
	r.recv(ch)
	h := &millracev1.ControlHello{
		WorkerId: worker, ProtocolVersionMin: 1, ProtocolVersionMax: 1, AgentVersion: "test",
		Queues: []string{"default"}, Slots: 4, Nonce: make([]byte, nonceSize),
		Mac: helloMAC([]byte(testToken), ch.GetNonce(), worker),
	}
	if change != nil {
		change(h)
	}
	r.send(h)
}

// connectRaw is a connection of this worker with the handshake done.
func connectRaw(t testing.TB, addr, worker string) *raw {
	t.Helper()
	r := dialRaw(t, addr)
	r.hello(worker, nil)
	r.recv(&millracev1.ControlWelcome{})
	return r
}

// hungry announces hunger and waits until that is registered.
func (r *raw) hungry(sequence uint64, lanes ...string) {
	r.t.Helper()
	r.send(&millracev1.ControlHungry{Sequence: sequence, Lanes: lanes, FreeSlots: 1})
	r.want(&millracev1.ControlAck{Sequence: sequence})
}

// settle returns when the server has handled all that was sent before, and fails on anything but the PONG: what the
// server sent before it is not lost.
func (r *raw) settle() {
	r.t.Helper()
	r.send(&millracev1.ControlPing{Sequence: 4711})
	r.want(&millracev1.ControlPong{Sequence: 4711})
}

func workerName(i int) string { return fmt.Sprintf("w-%d", i) }
