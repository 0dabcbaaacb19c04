package control

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// testClient is a client that runs until the test ends, and tells what it hears.
type testClient struct {
	*Client
	events chan event
	stop   func()
}

func startClient(t testing.TB, change func(*ClientConfig)) *testClient {
	t.Helper()
	cfg := ClientConfig{WorkerID: "w-1", Token: []byte(testToken), Queues: []string{"default"}, Slots: 4, AckTimeout: patience}
	if change != nil {
		change(&cfg)
	}
	events := make(chan event, 10_000)
	var beats uint64
	var mu sync.Mutex
	c, err := NewClient(cfg, Callbacks{
		State: func() *millracev1.ControlHeartbeat {
			mu.Lock()
			defer mu.Unlock()
			beats++
			return &millracev1.ControlHeartbeat{
				Sequence: beats, RunningListed: true, RunningCount: 1,
				Running: []*millracev1.ControlAttempt{{TaskId: "t", Attempt: 2}},
			}
		},
		OnConnected:    func(id string, w *millracev1.ControlWelcome) { events <- event{"connected", id, w} },
		OnDisconnected: func(id string) { events <- event{What: "disconnected", Who: id} },
		OnHeartbeatAck: func(id string, m *millracev1.ControlHeartbeatAck) { events <- event{"ack", id, m} },
		OnRing:         func(id, lane string) { events <- event{"ring " + lane, id, nil} },
		OnCancel:       func(id string, m *millracev1.ControlCancel) { events <- event{"cancel", id, m} },
		OnSignal:       func(id string, m *millracev1.ControlSignal) { events <- event{"signal", id, m} },
		OnDrain:        func(id string, m *millracev1.ControlDrain) { events <- event{"drain", id, m} },
		OnResume:       func(id string) { events <- event{What: "resume", Who: id} },
		OnKill:         func(id string, m *millracev1.ControlKill) { events <- event{"kill", id, m} },
	}, Deps{Log: testLog(t), Registry: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	return &testClient{Client: c, events: events, stop: stop}
}

func named(id string) func(*ServerConfig) { return func(c *ServerConfig) { c.DispatcherID = id } }

func TestClientHearsEverything(t *testing.T) {
	t.Parallel()
	s := startServer(t, newRecorder(), nil)
	c := startClient(t, nil)
	c.SetTargets(map[string]string{"d-1": s.addr})
	await(t, c.events, "connected", "d-1")
	await(t, c.events, "ack", "d-1")
	if diff := cmp.Diff([]string{"d-1"}, c.Connected()); diff != "" {
		t.Errorf("connected (-want +got):\n%s", diff)
	}
	for _, tt := range []struct {
		what string
		m    Message
	}{
		{"cancel", &millracev1.ControlCancel{TaskId: "t", Attempt: 2, Grace: durationpb.New(time.Second)}},
		{"signal", &millracev1.ControlSignal{TaskId: "t", Attempt: 2, Signal: "USR1", Tree: true}},
		{"drain", &millracev1.ControlDrain{Deadline: durationpb.New(time.Hour), Reason: "kernel"}},
		{"kill", &millracev1.ControlKill{TaskId: "t", Attempt: 2}},
	} {
		if !s.Send("w-1", tt.m) {
			t.Fatalf("%s not sent", tt.what)
		}
		e := await(t, c.events, tt.what, "d-1")
		if diff := cmp.Diff(tt.m, e.Msg, protocmp.Transform()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.what, diff)
		}
	}
	s.Send("w-1", &millracev1.ControlResume{})
	await(t, c.events, "resume", "d-1")
}

func TestHungryReachesEveryDispatcher(t *testing.T) {
	t.Parallel()
	s1, s2 := startServer(t, newRecorder(), named("d-1")), startServer(t, newRecorder(), named("d-2"))
	c := startClient(t, nil)
	c.SetTargets(map[string]string{"d-1": s1.addr, "d-2": s2.addr})
	awaitThat(t, "both", func() bool { return len(c.Connected()) == 2 })
	if got := c.SendHungry(t.Context(), []string{"default"}, 2); got != 2 {
		t.Fatalf("%d acked, want 2", got)
	}
	want := map[string]int{"default": 1}
	if diff := cmp.Diff([]map[string]int{want, want}, []map[string]int{s1.HungryFor(), s2.HungryFor()}); diff != "" {
		t.Errorf("hungry (-want +got):\n%s", diff)
	}
	if s2.Ring("default", 5) != 1 {
		t.Error("not rung")
	}
	await(t, c.events, "ring default", "d-2")
	if s2.Ring("default", 5) != 0 {
		t.Error("rung while sated")
	}
	c.NotHungry()
	awaitThat(t, "taken back", func() bool { return len(s1.HungryFor()) == 0 })
	if got := c.SendHungry(t.Context(), nil, 2); got != 0 {
		t.Errorf("%d acked for no lane", got)
	}
}

// A dispatcher that does not answer costs the ack timeout, one that is gone nothing.
func TestSendHungryDoesNotWaitLong(t *testing.T) {
	t.Parallel()
	s := startServer(t, newRecorder(), named("d-1"))
	mute := startMute(t, "d-mute", patience)
	c := startClient(t, func(c *ClientConfig) { c.AckTimeout = 500 * time.Millisecond })
	if got := c.SendHungry(t.Context(), []string{"default"}, 1); got != 0 {
		t.Errorf("%d acked without a connection", got)
	}
	c.SetTargets(map[string]string{"d-1": s.addr, "d-mute": mute})
	awaitThat(t, "both", func() bool { return len(c.Connected()) == 2 })
	start := time.Now()
	if got := c.SendHungry(t.Context(), []string{"default"}, 1); got != 1 {
		t.Errorf("%d acked, want 1", got)
	}
	if d := time.Since(start); d < 450*time.Millisecond || d > 5*time.Second {
		t.Errorf("waited %v, want 500ms", d)
	}
}

// startMute is a dispatcher that never says anything after its WELCOME.
func startMute(t *testing.T, id string, interval time.Duration) string {
	t.Helper()
	lc := net.ListenConfig{}
	ln, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer nc.Close()
				fr := newFrameReader(nc, MaxFrame)
				_, _ = nc.Write(mustFrame(t, &millracev1.ControlChallenge{Nonce: make([]byte, 32), DispatcherId: id, ProtocolVersion: 1, ProtocolVersionMin: 1}))
				typ, body, err := fr.next()
				hello := &millracev1.ControlHello{}
				if err != nil || decode(typ, body, hello) != nil {
					return
				}
				_, _ = nc.Write(mustFrame(t, &millracev1.ControlWelcome{
					DispatcherId: id, ProtocolVersion: 1, HeartbeatInterval: durationpb.New(interval),
					Mac: welcomeMAC([]byte(testToken), hello.GetNonce(), id),
				}))
				for err == nil {
					_, _, err = fr.next()
				}
			})
		}
	})
	t.Cleanup(func() { _ = ln.Close(); wg.Wait() })
	return ln.Addr().String()
}

// A dispatcher that is silent for three heartbeats, PINGs included, is given up and tried again.
func TestClientGivesUpSilentDispatcher(t *testing.T) {
	t.Parallel()
	addr := startMute(t, "d-mute", 100*time.Millisecond)
	c := startClient(t, nil)
	t.Cleanup(c.stop) // before the listener, which waits for its connections
	c.SetTargets(map[string]string{"d-mute": addr})
	await(t, c.events, "connected", "d-mute")
	await(t, c.events, "disconnected", "d-mute")
	await(t, c.events, "connected", "d-mute")
}

// A dispatcher whose Redis is slow answers no heartbeat, but PING keeps the connection.
func TestPingKeepsConnection(t *testing.T) {
	t.Parallel()
	rec := newRecorder()
	s := startServer(t, rec, func(c *ServerConfig) { c.HeartbeatInterval = 200 * time.Millisecond })
	s.handler = neverAnswers{rec}
	c := startClient(t, nil)
	c.SetTargets(map[string]string{"d-1": s.addr})
	await(t, c.events, "connected", "d-1")
	for range 12 {
		await(t, rec.events, "heartbeat", "w-1")
	}
	select {
	case e := <-c.events:
		t.Errorf("heard %s", e.What)
	default:
	}
}

type neverAnswers struct{ *recorder }

func (n neverAnswers) Heartbeat(w WorkerInfo, hb *millracev1.ControlHeartbeat, _ func(*millracev1.ControlHeartbeatAck)) {
	n.recorder.Heartbeat(w, hb, func(*millracev1.ControlHeartbeatAck) {})
}

func TestReconnectAnnouncesAgain(t *testing.T) {
	t.Parallel()
	first := startServer(t, newRecorder(), nil)
	c := startClient(t, nil)
	c.SetTargets(map[string]string{"d-1": first.addr})
	await(t, c.events, "connected", "d-1")
	if c.SendHungry(t.Context(), []string{"default", "gpu"}, 3) != 1 {
		t.Fatal("not acked")
	}
	first.stop()
	await(t, c.events, "disconnected", "d-1")
	time.Sleep(time.Second) // long enough that the pauses have grown to their longest
	second := startServerAt(t, newRecorder(), first.addr, nil)
	back := time.Now()
	await(t, c.events, "connected", "d-1")
	if d := time.Since(back); d > 2*time.Second {
		t.Errorf("back after %v, want at most 2s", d)
	}
	h := await(t, second.rec.events, "hungry", "w-1")
	if diff := cmp.Diff(&millracev1.ControlHungry{Sequence: 1, Lanes: []string{"default", "gpu"}, FreeSlots: 3}, h.Msg, protocmp.Transform()); diff != "" {
		t.Errorf("hungry (-want +got):\n%s", diff)
	}
	hb := await(t, second.rec.events, "heartbeat", "w-1")
	if m, ok := hb.Msg.(*millracev1.ControlHeartbeat); !ok || len(m.GetRunning()) != 1 || m.GetWorkerId() != "w-1" {
		t.Errorf("heartbeat %v", hb.Msg)
	}
	second.Ring("default", 1)
	await(t, c.events, "ring default", "d-1")
}

// A dispatcher with many agents is restarted: all of them come back, and none is turned out for coming together.
func TestHerdComesBack(t *testing.T) {
	t.Parallel()
	first := startServer(t, newRecorder(), nil)
	const n = 300
	cs := make([]*testClient, n)
	for i := range cs {
		cs[i] = startClient(t, func(c *ClientConfig) { c.WorkerID = workerName(i) })
		cs[i].SetTargets(map[string]string{"d-1": first.addr})
	}
	awaitThat(t, "all connected", func() bool { return len(first.Workers()) == n })
	first.stop()
	second := startServerAt(t, newRecorder(), first.addr, nil)
	start := time.Now()
	awaitThat(t, "all are back", func() bool { return len(second.Workers()) == n })
	t.Logf("%d agents back after %v", n, time.Since(start))
	if crowded := metric(t, second.reg, "handshakes_refused_total", refusedCrowded); crowded > 0 {
		t.Errorf("%v were turned out", crowded)
	}
}

func TestTargetsChangeLive(t *testing.T) {
	t.Parallel()
	s1, s2 := startServer(t, newRecorder(), named("d-1")), startServer(t, newRecorder(), named("d-2"))
	c := startClient(t, nil)
	c.SetTargets(map[string]string{"d-1": s1.addr})
	await(t, c.events, "connected", "d-1")
	c.SetTargets(map[string]string{"d-2": s2.addr})
	await(t, c.events, "disconnected", "d-1")
	await(t, c.events, "connected", "d-2")
	if diff := cmp.Diff([]string{"d-2"}, c.Connected()); diff != "" {
		t.Errorf("connected (-want +got):\n%s", diff)
	}
	s3 := startServer(t, newRecorder(), named("d-2"))
	c.SetTargets(map[string]string{"d-2": s3.addr})
	await(t, s3.rec.events, "connected", "w-1")
	c.SetTargets(nil)
	await(t, s3.rec.events, "disconnected", "w-1")
}

func TestClientRefuses(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		server func(*ServerConfig)
		reason string
	}{
		{"another token", func(c *ServerConfig) { c.Token = []byte("other") }, refusedToken},
		{"another dispatcher at the address", named("d-9"), refusedProtocol},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t, newRecorder(), tt.server)
			c := startClient(t, nil)
			c.SetTargets(map[string]string{"d-1": s.addr})
			reg := s.reg
			awaitThat(t, "refused", func() bool {
				return metric(t, reg, "handshakes_refused_total", tt.reason)+metric(t, reg, "frames_total", "in", "error") > 0
			})
			if len(c.Connected()) != 0 || len(c.events) != 0 {
				t.Error("connected")
			}
		})
	}
	t.Run("a dispatcher without the token", func(t *testing.T) {
		t.Parallel()
		// It welcomes everybody, but cannot prove that it knows the token.
		c := &Client{cfg: ClientConfig{WorkerID: "w-1", Token: []byte("real"), HandshakeTimeout: patience}, met: newMetrics(nil, sideClient)}
		a, b := net.Pipe()
		conn := newConn(a, a, c.met, defaultLimits)
		defer conn.close()
		go func() {
			defer b.Close()
			_, _ = b.Write(mustFrame(t, &millracev1.ControlChallenge{Nonce: make([]byte, 32), DispatcherId: "d-1", ProtocolVersion: 1, ProtocolVersionMin: 1}))
			_, _, _ = newFrameReader(b, MaxFrame).next()
			_, _ = b.Write(mustFrame(t, &millracev1.ControlWelcome{DispatcherId: "d-1", ProtocolVersion: 1}))
		}()
		if _, err := c.handshake(conn, "d-1"); err == nil || !strings.Contains(err.Error(), "prove") {
			t.Errorf("handshake: %v", err)
		}
	})
}

func TestHeartbeatToOneDispatcher(t *testing.T) {
	t.Parallel()
	rec := newRecorder()
	rec.answer = func(hb *millracev1.ControlHeartbeat) *millracev1.ControlHeartbeatAck {
		if !hb.GetWantsRenewal() {
			return &millracev1.ControlHeartbeatAck{}
		}
		return &millracev1.ControlHeartbeatAck{RedisUnreachable: true, HoldLease: durationpb.New(3 * time.Second)}
	}
	s := startServer(t, rec, nil)
	c := startClient(t, nil)
	hb := &millracev1.ControlHeartbeat{Sequence: 900, WantsRenewal: true}
	if c.Heartbeat("d-1", hb) || c.HeartbeatAll(hb) != 0 {
		t.Error("sent without a connection")
	}
	c.SetTargets(map[string]string{"d-1": s.addr})
	await(t, c.events, "ack", "d-1")
	if !c.Heartbeat("d-1", hb) {
		t.Error("not sent")
	}
	got := await(t, c.events, "ack", "d-1")
	want := &millracev1.ControlHeartbeatAck{Sequence: 900, RedisUnreachable: true, HoldLease: durationpb.New(3 * time.Second)}
	if diff := cmp.Diff(want, got.Msg, protocmp.Transform()); diff != "" {
		t.Errorf("ack (-want +got):\n%s", diff)
	}
	if c.HeartbeatAll(hb) != 1 {
		t.Error("not sent to all")
	}
}

func TestManyClients(t *testing.T) {
	t.Parallel()
	s := startServer(t, newRecorder(), nil)
	const n = 50
	cs := make([]*testClient, n)
	for i := range cs {
		cs[i] = startClient(t, func(c *ClientConfig) { c.WorkerID = workerName(i) })
		cs[i].SetTargets(map[string]string{"d-1": s.addr})
	}
	var wg sync.WaitGroup
	for i, c := range cs {
		await(t, c.events, "connected", "d-1")
		wg.Go(func() {
			for round := range 20 {
				if c.SendHungry(context.Background(), []string{"default", fmt.Sprint("lane", i%3)}, round+1) != 1 {
					t.Error("not acked")
				}
			}
		})
	}
	rung := 0
	for range 200 {
		rung += s.Ring("default", 2)
	}
	wg.Wait()
	rung += s.Ring("default", n)
	heard := 0
	awaitThat(t, "every ring is heard once", func() bool {
		for _, c := range cs {
			for len(c.events) > 0 {
				if (<-c.events).What == "ring default" {
					heard++
				}
			}
		}
		return heard == rung
	})
}

func TestClientStartStopStorm(t *testing.T) {
	t.Parallel()
	s := startServer(t, newRecorder(), nil)
	for range 50 {
		c := startClient(t, nil)
		c.SetTargets(map[string]string{"d-1": s.addr, "d-none": "127.0.0.1:1"})
		go c.SendHungry(context.Background(), []string{"default"}, 1)
		c.stop()
	}
	awaitThat(t, "all gone", func() bool { return len(s.Workers()) == 0 })
}

func TestClientConfigReportsEverything(t *testing.T) {
	t.Parallel()
	_, err := NewClient(ClientConfig{WorkerID: "a b", Slots: -1, AckTimeout: -1}, Callbacks{}, Deps{})
	if err == nil || strings.Count(err.Error(), "\n") != 2 {
		t.Errorf("want three problems, got: %v", err)
	}
}
