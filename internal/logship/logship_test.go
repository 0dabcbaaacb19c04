package logship

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stream is a log stream in memory, for what does not depend on Redis; the whole chain is tested with logsink.
type stream struct {
	mu     sync.Mutex
	chunks []*millracev1.LogChunk
	calls  int
	down   bool
}

func (s *stream) AppendLog(_ context.Context, _ int, chunks [][]byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls++
	if s.down {
		return 0, errors.New("down")
	}
	for _, b := range chunks {
		c := &millracev1.LogChunk{}
		if err := proto.Unmarshal(b, c); err != nil {
			return 0, err
		}
		s.chunks = append(s.chunks, c)
	}
	return len(chunks), nil
}

func setup(t *testing.T, cfg Config) (*Shipper, *stream, func()) {
	t.Helper()
	st := &stream{}
	if cfg.SpoolDir == "" {
		cfg.SpoolDir = t.TempDir()
	}
	s, err := New(cfg, Deps{Appender: st, Shards: func(context.Context) (int, error) { return 1, nil }})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	var once sync.Once
	stop := func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("Run: %v", err)
			}
		})
	}
	t.Cleanup(stop)
	return s, st, stop
}

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	if err := (Config{}).Validate(); err == nil {
		t.Error("a config without a spool directory was taken")
	}
	if err := (Config{SpoolDir: "x", ChunkBytes: 1}).Validate(); err == nil {
		t.Error("a chunk of one byte was taken")
	}
	if err := (Config{SpoolDir: "x"}).Validate(); err != nil {
		t.Errorf("the defaults are refused: %v", err)
	}
}

// Many short attempts share few appends, and those without output need none.
func TestAttemptsShareAppends(t *testing.T) {
	t.Parallel()
	s, st, stop := setup(t, Config{})
	for range 500 {
		l := s.Open(Attempt{Task: "quiet", Attempt: 1, Worker: "w", Date: "2026-01-02", ElideEmpty: true})
		if !l.Close() {
			t.Fatal("the end of an attempt without output was not left out")
		}
		l = s.Open(Attempt{Task: "short", Attempt: 1, Worker: "w", Date: "2026-01-02", ElideEmpty: true})
		_, _ = l.Writer(0).Write([]byte("hello\n"))
		if l.Close() {
			t.Fatal("the end of an attempt with output was left out")
		}
	}
	stop()
	if len(st.chunks) != 1000 {
		t.Errorf("%d chunks, want a piece and an end for each of 500", len(st.chunks))
	}
	if st.calls > 250 {
		t.Errorf("%d appends for 500 attempts", st.calls)
	}
}

// What memory and spool cannot hold is left out visibly, the task is not held up, and what comes later is kept again.
func TestFullSpoolLeavesAMarker(t *testing.T) {
	t.Parallel()
	s, st, stop := setup(t, Config{MemoryPerAttempt: 64 << 10, MemoryTotal: 64 << 10, ChunkBytes: 16 << 10, SpoolLimit: 256 << 10})
	st.mu.Lock()
	st.down = true
	st.mu.Unlock()
	l := s.Open(Attempt{Task: "t", Attempt: 1, Worker: "w", Date: "2026-01-02"})
	const written = 1 << 20
	_, _ = l.Writer(0).Write(make([]byte, written))
	l.flush()
	st.mu.Lock()
	st.down = false
	st.mu.Unlock()
	for deadline := time.Now().Add(10 * time.Second); !l.idle(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the spool was not sent")
		}
	}
	_, _ = l.Writer(0).Write([]byte("after"))
	l.Close()
	stop()
	var kept, dropped, next uint64
	var markers int
	var end *millracev1.LogEnd
	for _, c := range st.chunks {
		if c.GetOffset() != next {
			t.Errorf("chunk %d is at %d, want %d", c.GetSequence(), c.GetOffset(), next)
		}
		next += c.GetSize()
		if c.GetDropped() > 0 {
			markers++
			dropped += c.GetDropped()
		} else {
			kept += c.GetSize()
		}
		if c.GetEnd() != nil {
			end = c.GetEnd()
		}
	}
	if markers != 1 || kept+dropped != written+5 || end.GetDroppedBytes() != dropped || end.GetTotalBytes() != next {
		t.Errorf("%d markers, kept %d, dropped %d of %d, %v", markers, kept, dropped, written+5, end)
	}
	if last := st.chunks[len(st.chunks)-2]; string(last.GetData()) != "after" {
		t.Errorf("the last output is %q", last.GetData())
	}
}
