package control

import (
	"context"
	"errors"
	"math"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/durationpb"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func TestHandshake(t *testing.T) {
	t.Parallel()
	s := startServer(t, newRecorder(), func(c *ServerConfig) { c.Features = []string{"zstd"} })
	r := dialRaw(t, s.addr)
	r.hello("w-1", nil)
	r.want(&millracev1.ControlWelcome{
		DispatcherId: "d-1", HeartbeatInterval: durationpb.New(patience), Features: []string{"zstd"}, ProtocolVersion: 1,
		Mac: welcomeMAC([]byte(testToken), make([]byte, nonceSize), "d-1"),
	})
	ws := s.Workers()
	if len(ws) != 1 || ws[0].ConnectedAt.IsZero() || ws[0].RemoteAddr != r.nc.LocalAddr().String() {
		t.Fatalf("workers: %+v", ws)
	}
	ws[0].ConnectedAt, ws[0].RemoteAddr = time.Time{}, ""
	want := []WorkerInfo{{ID: "w-1", AgentVersion: "test", Queues: []string{"default"}, Slots: 4, Protocol: 1}}
	if diff := cmp.Diff(want, ws); diff != "" {
		t.Errorf("workers (-want +got):\n%s", diff)
	}
	if !s.Send("w-1", &millracev1.ControlCancel{TaskId: "t", Attempt: 2}) {
		t.Error("not sent to a connected worker")
	}
	r.want(&millracev1.ControlCancel{TaskId: "t", Attempt: 2})
	if s.Send("w-2", &millracev1.ControlResume{}) {
		t.Error("sent to a worker that is not there")
	}
	_ = r.nc.Close()
	await(t, s.rec.events, "disconnected", "w-1")
	if s.Send("w-1", &millracev1.ControlResume{}) || len(s.Workers()) != 0 {
		t.Error("the worker is still there")
	}
}

func TestHandshakeRefused(t *testing.T) {
	t.Parallel()
	rec := newRecorder()
	rec.connect = func(context.Context, WorkerInfo) error { return errors.New("redis at 10.0.0.1 does not answer") }
	s := startServer(t, rec, nil)
	for _, tt := range []struct {
		name   string
		change func(*millracev1.ControlHello)
		code   millracev1.ControlErrorCode
		reason string
		text   string
	}{
		{"wrong token", func(h *millracev1.ControlHello) { h.Mac = helloMAC([]byte("other"), make([]byte, 32), "w-1") }, millracev1.ControlErrorCode_CONTROL_ERROR_CODE_TOKEN, refusedToken, "MILLRACE_TOKEN"},
		{"no proof", func(h *millracev1.ControlHello) { h.Mac = nil }, millracev1.ControlErrorCode_CONTROL_ERROR_CODE_TOKEN, refusedToken, "MILLRACE_TOKEN"},
		{"proof of another worker", func(h *millracev1.ControlHello) { h.WorkerId = "w-2" }, millracev1.ControlErrorCode_CONTROL_ERROR_CODE_TOKEN, refusedToken, "w-2"},
		{"too new", func(h *millracev1.ControlHello) { h.ProtocolVersionMin, h.ProtocolVersionMax = 2, 3 }, millracev1.ControlErrorCode_CONTROL_ERROR_CODE_VERSION, refusedVersion, "speaks 2 to 3; upgrade"},
		{"no version", func(h *millracev1.ControlHello) { h.ProtocolVersionMin, h.ProtocolVersionMax = 0, 0 }, millracev1.ControlErrorCode_CONTROL_ERROR_CODE_VERSION, refusedVersion, "no common protocol version"},
		{"bad id", func(h *millracev1.ControlHello) { h.WorkerId = "a/b" }, millracev1.ControlErrorCode_CONTROL_ERROR_CODE_PROTOCOL, refusedProtocol, "A-Z"},
		{"short nonce", func(h *millracev1.ControlHello) { h.Nonce = []byte{1} }, millracev1.ControlErrorCode_CONTROL_ERROR_CODE_PROTOCOL, refusedProtocol, "nonce"},
		{"not now", nil, millracev1.ControlErrorCode_CONTROL_ERROR_CODE_UNAVAILABLE, refusedUnavailable, "does not answer"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before := metric(t, s.reg, "handshakes_refused_total", tt.reason)
			r := dialRaw(t, s.addr)
			r.hello("w-1", tt.change)
			if text := r.wantEnd(tt.code); !strings.Contains(text, tt.text) || strings.Contains(text, testToken) {
				t.Errorf("the agent reads %q", text)
			}
			if n := metric(t, s.reg, "handshakes_refused_total", tt.reason); n != before+1 {
				t.Errorf("refused for %s: %v, want %v", tt.reason, n, before+1)
			}
		})
	}
	t.Run("something else first", func(t *testing.T) {
		r := dialRaw(t, s.addr)
		r.recv(&millracev1.ControlChallenge{})
		r.send(&millracev1.ControlHeartbeat{})
		r.wantEnd(millracev1.ControlErrorCode_CONTROL_ERROR_CODE_PROTOCOL)
	})
	if len(s.Workers()) != 0 || len(rec.events) != 0 {
		t.Error("a refused worker was connected")
	}
}

func TestUnknownFieldsAndFramesAreSkipped(t *testing.T) {
	t.Parallel()
	s := startServer(t, newRecorder(), nil)
	r := dialRaw(t, s.addr)
	// A type and a field of a later version, before and after the handshake.
	r.write(append(header(magic, 1, 13, Type(77)), "abc"...))
	r.hello("w-1", func(h *millracev1.ControlHello) {
		h.ProtoReflect().SetUnknown([]byte{0xfa, 0x3f, 1, 'x'}) // field 1023
		h.ProtocolVersionMax = 9
	})
	r.recv(&millracev1.ControlWelcome{})
	r.write(header(magic, 1, 10, Type(0)))
	r.settle()
	if n := metric(t, s.reg, "frames_total", "in", "unknown"); n != 2 {
		t.Errorf("%v unknown frames, want 2", n)
	}
}

func TestBadFrames(t *testing.T) {
	t.Parallel()
	s := startServer(t, newRecorder(), nil)
	for _, tt := range []struct {
		name  string
		bytes []byte
		kind  BadFrame
	}{
		{"magic", []byte("GET / HTTP/1.1\r\n\r\n"), BadMagic},
		{"version", header(magic, 9, 10, TypePing), BadVersion},
		{"too short", header(magic, 1, 9, TypePing), BadLength},
		{"4 GiB", header(magic, 1, math.MaxUint32, TypeHeartbeat), BadLength},
		{"body", append(header(magic, 1, 14, TypeHeartbeat), 0xff, 0xff, 0xff, 0xff), BadBody},
		{"heartbeat of another", mustFrame(t, &millracev1.ControlHeartbeat{WorkerId: "w-other"}), BadBody},
		{"too many lanes", mustFrame(t, &millracev1.ControlHungry{Lanes: make([]string, maxLanes+1), FreeSlots: 1}), BadBody},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before := metric(t, s.reg, "bad_frames_total", string(tt.kind))
			r := connectRaw(t, s.addr, "w-1")
			r.write(tt.bytes)
			r.wantEnd(millracev1.ControlErrorCode_CONTROL_ERROR_CODE_BAD_FRAME)
			if n := metric(t, s.reg, "bad_frames_total", string(tt.kind)); n != before+1 {
				t.Errorf("%v bad frames, want %v", n, before+1)
			}
		})
	}
	t.Run("before hello, over its smaller limit", func(t *testing.T) {
		r := dialRaw(t, s.addr)
		r.recv(&millracev1.ControlChallenge{})
		r.write(header(magic, 1, 100_000, TypeHello))
		r.wantEnd(millracev1.ControlErrorCode_CONTROL_ERROR_CODE_BAD_FRAME)
	})
}

func TestSlowLoris(t *testing.T) {
	t.Parallel()
	s := startServer(t, newRecorder(), func(c *ServerConfig) {
		c.HandshakeTimeout, c.FrameTimeout = time.Second, time.Second
	})
	trickle := func(r *raw) {
		for _, b := range mustFrame(t, &millracev1.ControlDrain{Reason: strings.Repeat("x", 1000)}) {
			if _, err := r.nc.Write([]byte{b}); err != nil {
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
		t.Error("a byte at a time was tolerated")
	}
	t.Run("handshake", func(t *testing.T) {
		t.Parallel()
		trickle(dialRaw(t, s.addr))
		awaitThat(t, "counted", func() bool { return metric(t, s.reg, "handshakes_refused_total", refusedTimeout) == 1 })
	})
	t.Run("frame", func(t *testing.T) {
		t.Parallel()
		trickle(connectRaw(t, s.addr, "w-1"))
		awaitThat(t, "counted", func() bool { return metric(t, s.reg, "read_timeouts_total") == 1 })
	})
	t.Run("many whole frames, always with a part of the next", func(t *testing.T) {
		t.Parallel()
		r := connectRaw(t, s.addr, "w-2")
		ping := mustFrame(t, &millracev1.ControlPing{Sequence: 1})
		r.write(ping[:3])
		for range 80 { // twice the limit of one frame
			time.Sleep(25 * time.Millisecond)
			r.write(append(ping[3:len(ping):len(ping)], ping[:3]...))
			r.want(&millracev1.ControlPong{Sequence: 1})
		}
	})
}

func TestSilence(t *testing.T) {
	t.Parallel()
	s := startServer(t, newRecorder(), func(c *ServerConfig) { c.HeartbeatInterval = 50 * time.Millisecond })
	r := connectRaw(t, s.addr, "w-1")
	start := time.Now()
	r.wantClosed()
	if d := time.Since(start); d < 100*time.Millisecond || d > 5*time.Second {
		t.Errorf("closed after %v of silence, want 150ms", d)
	}
	await(t, s.rec.events, "disconnected", "w-1")
}

func TestCrowdedLobby(t *testing.T) {
	t.Parallel()
	s := startServer(t, newRecorder(), func(c *ServerConfig) { c.MaxUnauthenticated = 10; c.HandshakeTimeout = patience })
	oldest := dialRaw(t, s.addr)
	oldest.recv(&millracev1.ControlChallenge{})
	for range 50 {
		dialRaw(t, s.addr).recv(&millracev1.ControlChallenge{})
	}
	oldest.wantClosed()
	connectRaw(t, s.addr, "w-1") // an honest one gets in all the same
	awaitThat(t, "counted", func() bool { return metric(t, s.reg, "handshakes_refused_total", refusedCrowded) >= 41 })
}

func TestNewestConnectionWins(t *testing.T) {
	t.Parallel()
	s := startServer(t, newRecorder(), nil)
	first := connectRaw(t, s.addr, "w-1")
	first.hungry(1, "default")
	second := connectRaw(t, s.addr, "w-1")
	first.wantClosed()
	if got := s.HungryFor(); len(got) != 0 {
		t.Errorf("the old connection is still in line: %v", got)
	}
	if !s.Send("w-1", &millracev1.ControlResume{}) {
		t.Error("not sent")
	}
	second.want(&millracev1.ControlResume{})
	var whats []string
	for len(s.rec.events) > 0 {
		whats = append(whats, (<-s.rec.events).What)
	}
	if diff := cmp.Diff([]string{"connected", "hungry", "disconnected", "connected"}, whats); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	if n := metric(t, s.reg, "connections_replaced_total"); n != 1 {
		t.Errorf("%v replaced", n)
	}
}

// Many connections of one worker at once: Connected and Disconnected alternate, and one stays.
func TestNewestConnectionWinsStorm(t *testing.T) {
	t.Parallel()
	rec := newRecorder()
	rec.connect = func(ctx context.Context, _ WorkerInfo) error {
		time.Sleep(time.Millisecond) // as if it were I/O
		return ctx.Err()
	}
	s := startServer(t, rec, nil)
	var wg sync.WaitGroup
	for range 40 {
		r := dialRaw(t, s.addr)
		wg.Go(func() { r.hello("w-1", nil) })
	}
	wg.Wait()
	up, connects := 0, 0
	check := func() {
		for len(rec.events) > 0 {
			switch e := <-rec.events; e.What {
			case "connected":
				up++
				connects++
			case "disconnected":
				up--
			}
			if up < 0 || up > 1 {
				t.Fatalf("%d connections of one worker", up)
			}
		}
	}
	awaitThat(t, "one is left", func() bool {
		check()
		return len(s.Workers()) == 1 && connects > 0 && metric(t, s.reg, "connections_replaced_total") == 39
	})
	s.stop()
	check()
	if up != 0 {
		t.Errorf("%d left after the end", up)
	}
}

// A peer that reads nothing loses its connection; until then and after it nobody else notices.
func TestPeerThatDoesNotRead(t *testing.T) {
	t.Parallel()
	s := startServer(t, newRecorder(), func(c *ServerConfig) { c.QueueBytes = 64 << 10 })
	deaf := connectRaw(t, s.addr, "w-deaf")
	if tcp, ok := deaf.nc.(*net.TCPConn); ok {
		_ = tcp.SetReadBuffer(4 << 10)
	}
	good := connectRaw(t, s.addr, "w-good")
	filler := &millracev1.ControlDrain{Reason: strings.Repeat("x", 32<<10)}
	for dropped := false; !dropped; {
		start := time.Now()
		dropped = !s.Send("w-deaf", filler)
		if d := time.Since(start); d > 2*time.Second {
			t.Fatalf("Send blocked for %v", d)
		}
		s.Send("w-good", &millracev1.ControlResume{})
		good.want(&millracev1.ControlResume{})
	}
	await(t, s.rec.events, "disconnected", "w-deaf")
	good.settle()
	if n := metric(t, s.reg, "queue_full_drops_total"); n != 1 {
		t.Errorf("%v drops counted, want 1", n)
	}
}

func TestConnectedSlowly(t *testing.T) {
	t.Parallel()
	rec := newRecorder()
	release := make(chan struct{})
	rec.connect = func(ctx context.Context, w WorkerInfo) error {
		if w.ID != "w-slow" {
			return nil
		}
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	s := startServer(t, rec, nil)
	slow := dialRaw(t, s.addr)
	slow.hello("w-slow", nil)
	connectRaw(t, s.addr, "w-quick")
	if s.Send("w-slow", &millracev1.ControlResume{}) {
		t.Error("sent before WELCOME")
	}
	close(release)
	slow.recv(&millracev1.ControlWelcome{})
}

func TestConnectedTooSlowly(t *testing.T) {
	t.Parallel()
	rec := newRecorder()
	rec.connect = func(ctx context.Context, _ WorkerInfo) error { <-ctx.Done(); return ctx.Err() }
	s := startServer(t, rec, func(c *ServerConfig) { c.ConnectTimeout = 50 * time.Millisecond })
	r := dialRaw(t, s.addr)
	r.hello("w-1", nil)
	r.wantEnd(millracev1.ControlErrorCode_CONTROL_ERROR_CODE_UNAVAILABLE)
}

func TestHeartbeat(t *testing.T) {
	t.Parallel()
	rec := newRecorder()
	rec.answer = func(hb *millracev1.ControlHeartbeat) *millracev1.ControlHeartbeatAck {
		return &millracev1.ControlHeartbeatAck{Renewed: hb.GetWantsRenewal(), Sequence: 999}
	}
	s := startServer(t, rec, nil)
	r := connectRaw(t, s.addr, "w-1")
	r.send(&millracev1.ControlHeartbeat{WorkerId: "w-1", Sequence: 5, WantsRenewal: true})
	r.want(&millracev1.ControlHeartbeatAck{Sequence: 5, Renewed: true})
}

func TestStopSaysGoodbye(t *testing.T) {
	t.Parallel()
	s := startServer(t, newRecorder(), nil)
	r, stranger := connectRaw(t, s.addr, "w-1"), dialRaw(t, s.addr)
	stranger.recv(&millracev1.ControlChallenge{})
	s.stop()
	r.wantEnd(millracev1.ControlErrorCode_CONTROL_ERROR_CODE_SHUTTING_DOWN)
	stranger.wantEnd(millracev1.ControlErrorCode_CONTROL_ERROR_CODE_SHUTTING_DOWN)
	await(t, s.rec.events, "disconnected", "w-1")
}

func TestStartStopStorm(t *testing.T) {
	t.Parallel()
	for range 20 {
		s := startServer(t, newRecorder(), nil)
		d := net.Dialer{Timeout: patience}
		for i := range 5 {
			nc, err := d.DialContext(t.Context(), "tcp", s.addr)
			if err != nil {
				t.Fatal(err)
			}
			if i%2 == 0 {
				_ = nc.Close()
			} else {
				t.Cleanup(func() { _ = nc.Close() })
			}
		}
		s.stop()
	}
}

func TestNoTokenOnlyOnLoopback(t *testing.T) {
	t.Parallel()
	s, err := NewServer(ServerConfig{DispatcherID: "d"}, newRecorder(), Deps{})
	if err != nil {
		t.Fatal(err)
	}
	lc := net.ListenConfig{}
	ln, err := lc.Listen(t.Context(), "tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Serve(t.Context(), ln); err == nil || !strings.Contains(err.Error(), "MILLRACE_TOKEN") {
		t.Errorf("Serve: %v", err)
	}
}

func TestServerConfigReportsEverything(t *testing.T) {
	t.Parallel()
	_, err := NewServer(ServerConfig{DispatcherID: ".x", ConnectTimeout: -1, QueueBytes: -1}, newRecorder(), Deps{})
	if err == nil || strings.Count(err.Error(), "\n") != 2 {
		t.Errorf("want three problems, got: %v", err)
	}
}

// A thousand idle agents cost little: no polling, and a few kilobytes each for both ends together.
func TestThousandIdleConnections(t *testing.T) { //nolint:paralleltest // it measures the process
	// Not parallel: it measures the memory of the process.
	s := startServer(t, newRecorder(), nil)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	const n = 1000
	for i := range n {
		connectRaw(t, s.addr, workerName(i))
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if got := len(s.Workers()); got != n {
		t.Errorf("%d workers", got)
	}
	per := (int64(after.HeapInuse+after.StackInuse) - int64(before.HeapInuse+before.StackInuse)) / n
	t.Logf("%d bytes for one idle connection, both ends", per)
	if per > 40<<10 {
		t.Errorf("an idle connection costs %d bytes", per)
	}
}
