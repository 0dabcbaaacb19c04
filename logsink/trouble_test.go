package logsink_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/millrace/millrace/internal/api"
	"github.com/millrace/millrace/internal/logship"
	"github.com/millrace/millrace/internal/ops"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	"github.com/millrace/millrace/logsink"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// produce writes output of several attempts for as long as it takes and returns what was written.
func (c *chain) produce(ids []string, size int, pause time.Duration) map[string][]byte {
	c.t.Helper()
	want := map[string][]byte{}
	logs := map[string]*logship.Log{}
	for _, id := range ids {
		logs[id] = c.shipper.Open(c.run(id, 1))
	}
	for i := 0; len(want[ids[0]]) < size; i++ {
		for k, id := range ids {
			block := noise(uint64(i*len(ids)+k), 20<<10)
			mustWrite(c.t, logs[id].Writer(0), block)
			want[id] = append(want[id], block...)
		}
		time.Sleep(pause)
	}
	for _, id := range ids {
		logs[id].Close()
	}
	return want
}

func (c *chain) checkAll(want map[string][]byte) {
	c.t.Helper()
	for id, data := range want {
		c.check(id, 1, data)
	}
}

var fourTasks = []string{"t-a", "t-b", "t-c", "t-d", "t-e", "t-f"}

// A logsink that is killed in the middle, again and again, leaves neither a gap nor a repeat.
func TestKillLogsink(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	c.sink.stop()
	done := make(chan map[string][]byte, 1)
	go func() { done <- c.produce(fourTasks, 3<<20, 15*time.Millisecond) }() // received below
	var want map[string][]byte
	for i := 0; want == nil; i++ {
		signal, wait := c.startHelper()
		select {
		case want = <-done:
		case <-time.After(time.Duration(300+100*(i%4)) * time.Millisecond):
		}
		signal(syscall.SIGKILL)
		wait()
	}
	c.startHelper()
	c.checkAll(want)
}

// Redis that dies in the middle and comes back loses nothing and holds up no task.
func TestRedisDown(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	c.stop()
	// Little memory, so that the spool is used.
	c.startShipper(logship.Config{MemoryPerAttempt: 256 << 10, Compress: true})
	before := c.produce([]string{"early"}, 1<<20, 0)
	c.checkAll(before)
	ids := []string{"t-a", "t-b", "t-c"}
	logs, want := map[string]*logship.Log{}, map[string][]byte{}
	for _, id := range ids {
		logs[id] = c.shipper.Open(c.run(id, 1))
		mustWrite(t, logs[id].Writer(0), []byte("begin\n"))
		want[id] = []byte("begin\n")
	}
	time.Sleep(2 * time.Second) // everysec: what was accepted has to be in the file before the kill
	c.redis.Kill()
	begin := time.Now()
	for i := range 100 {
		for k, id := range ids {
			block := noise(uint64(i*3+k), 30<<10)
			mustWrite(t, logs[id].Writer(0), block)
			want[id] = append(want[id], block...)
		}
	}
	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("writing 9 MiB without redis took %v", took)
	}
	logs["t-a"].Close()
	time.Sleep(1500 * time.Millisecond)
	if files, _ := os.ReadDir(c.spool); len(files) == 0 {
		t.Error("nothing was spooled")
	}
	c.redis.Restart(t)
	logs["t-b"].Close()
	logs["t-c"].Close()
	c.checkAll(want)
	c.eventually("the spool is empty", func() bool { files, _ := os.ReadDir(c.spool); return len(files) == 0 })
}

// A lost reply makes an agent send a batch twice.
type doubting struct {
	logship.Appender
	mu sync.Mutex
	n  int
}

func (d *doubting) AppendLog(ctx context.Context, shard int, chunks [][]byte) (int, error) {
	d.mu.Lock()
	d.n++
	lose := d.n%2 == 0
	d.mu.Unlock()
	n, err := d.Appender.AppendLog(ctx, shard, chunks)
	if lose && err == nil {
		return 0, errors.New("the reply was lost")
	}
	return n, err
}

// TestRepeatedChunks: every second append fails although it was done, and is repeated.
func TestRepeatedChunks(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	c.stop()
	s, err := logship.New(logship.Config{SpoolDir: c.spool}, logship.Deps{Appender: &doubting{Appender: c.store}, Shards: c.store.LogShards})
	if err != nil {
		t.Fatal(err)
	}
	start(t, s.Run)
	c.shipper = s
	c.checkAll(c.produce([]string{"twice", "again"}, 2<<20, time.Millisecond))
}

// An agent that stops, or dies, leaves its spool to the next one.
func TestSpoolOfADeadAgent(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	c.stop()
	c.sink.stop()
	// Nobody drains, so that the streams fill up and the rest stays with the agent.
	c.startShipper(logship.Config{MemoryPerAttempt: 128 << 10, StopTimeout: 200 * time.Millisecond, ChunkBytes: 8 << 10})
	l := c.shipper.Open(c.run("old", 1))
	a := c.run("cut", 1)
	a.LimitBytes = 12 << 20
	cut := c.shipper.Open(a)
	var want, all bytes.Buffer
	for i := range 600 {
		mustWrite(t, io.MultiWriter(l.Writer(0), &want), noise(uint64(i), 20<<10))
		mustWrite(t, io.MultiWriter(cut.Writer(0), &all), noise(uint64(i+5000), 40<<10))
	}
	l.Close() // cut is not closed: as if the agent died
	c.stop()
	if files, _ := os.ReadDir(c.spool); len(files) < 3 {
		t.Fatalf("%d files were left in the spool", len(files))
	}
	c.sink = c.startSink("")
	c.startShipper(logship.Config{})
	c.check("old", 1, want.Bytes())
	c.eventually("the spool is empty", func() bool { files, _ := os.ReadDir(c.spool); return len(files) == 0 })
	var got []byte
	c.eventually("the tail is there", func() bool {
		got, _ = c.read(api.LogQuery{Task: "cut", Attempt: 1})
		return bytes.HasSuffix(got, all.Bytes()[all.Len()-1000:])
	})
	head, tail, ok := bytes.Cut(got, []byte("\n[millrace: "))
	if !ok || !bytes.HasPrefix(all.Bytes(), head) {
		t.Fatalf("the head of %d bytes is not what was written, marker %v", len(head), ok)
	}
	var dropped int
	if _, err := fmt.Sscanf(string(tail[:40]), "%d bytes left out here", &dropped); err != nil {
		t.Fatal(err)
	}
	_, tail, _ = bytes.Cut(tail, []byte("]\n"))
	if !bytes.HasSuffix(all.Bytes(), tail) || len(head)+dropped+len(tail) != all.Len() {
		t.Errorf("head %d + dropped %d + tail %d is not the %d written", len(head), dropped, len(tail), all.Len())
	}
}

// Two logsinks share the shards, one hands over to the other and takes them back, also when it is frozen and thawed.
func TestTwoLogsinks(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	done := make(chan map[string][]byte, 1)
	go func() { done <- c.produce(fourTasks, 4<<20, 15*time.Millisecond) }() // received below
	shared := func() bool {
		holders := map[string]bool{}
		for n := range store.DefaultLogShards {
			id, _ := c.store.LogShardOwner(t.Context(), n)
			holders[id] = true
		}
		return len(holders) == 2 && !holders[""]
	}
	signal, _ := c.startHelper()
	c.eventually("both have shards", shared)
	signal(syscall.SIGSTOP)
	c.eventually("the other took all", func() bool {
		addrs, err := c.store.LogsinkAddrs(t.Context())
		first, _ := c.store.LogShardOwner(t.Context(), 0)
		for n := range store.DefaultLogShards {
			if id, _ := c.store.LogShardOwner(t.Context(), n); id != first {
				return false
			}
		}
		return err == nil && len(addrs) == 1
	})
	signal(syscall.SIGCONT)
	c.eventually("both have shards again", shared)
	c.sink.stop()
	c.checkAll(<-done)
}

// A full disk stops acknowledging, is reported, and mends itself.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=2m"); err != nil {
		t.Skipf("mounting a small file system needs root: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	c := newChain(t)
	c.sink.stop()
	c.dir = filepath.Join(dir, "logs")
	status := ops.NewStatus()
	svc, err := logsink.New(sinkConfig(c.dir), logsink.Deps{Store: newStore(t, c.redis.URL(), ""), Status: status})
	if err != nil {
		t.Fatal(err)
	}
	stop := start(t, svc.Run)
	filler := filepath.Join(dir, "filler")
	if err := os.WriteFile(filler, make([]byte, 1200<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	want := c.produce([]string{"full", "too"}, 500<<10, 0)
	c.eventually("it says so", func() bool { return strings.Contains(strings.Join(status.NotReady(), " "), "no space left") })
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	c.checkAll(want)
	c.eventually("it is ready again", func() bool { return len(status.NotReady()) == 0 })
	stop()
}

// inject adds an encoded chunk to its stream as it is.
func (c *chain) inject(shard int, chunk *millracev1.LogChunk) {
	c.t.Helper()
	b, err := proto.Marshal(chunk)
	if err != nil {
		c.t.Fatal(err)
	}
	if _, err := c.store.AppendLog(c.t.Context(), shard, [][]byte{b}); err != nil {
		c.t.Fatal(err)
	}
}

// Chunks that name what they must not, or come from workers that never owned the attempt, create no files and stop
// nobody.
func TestHostileChunks(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	c.run("owned", 2)
	good := func() *millracev1.LogChunk {
		return &millracev1.LogChunk{Task: "owned", Attempt: 2, Worker: worker, Date: date, Data: []byte("x"), Size: 1}
	}
	bad := map[string]func(*millracev1.LogChunk){
		"parent":        func(m *millracev1.LogChunk) { m.Task = "../../escape" },
		"absolute":      func(m *millracev1.LogChunk) { m.Task = "/tmp/escape" },
		"dots":          func(m *millracev1.LogChunk) { m.Task = ".." },
		"empty":         func(m *millracev1.LogChunk) { m.Task = "" },
		"long":          func(m *millracev1.LogChunk) { m.Task = strings.Repeat("x", 129) },
		"nul":           func(m *millracev1.LogChunk) { m.Task = "a\x00b" },
		"date":          func(m *millracev1.LogChunk) { m.Date = "../2026-01" },
		"no date":       func(m *millracev1.LogChunk) { m.Date = "" },
		"attempt 0":     func(m *millracev1.LogChunk) { m.Attempt = 0 },
		"other worker":  func(m *millracev1.LogChunk) { m.Worker = "thief" },
		"other attempt": func(m *millracev1.LogChunk) { m.Attempt = 1 },
		"no record":     func(m *millracev1.LogChunk) { m.Task = "nobody" },
		"far away":      func(m *millracev1.LogChunk) { m.Offset = 1 << 50 },
		"sequence":      func(m *millracev1.LogChunk) { m.Sequence = 7 },
		"stream":        func(m *millracev1.LogChunk) { m.Stream = 300 },
		"size":          func(m *millracev1.LogChunk) { m.Size = 2 },
		"packing":       func(m *millracev1.LogChunk) { m.Compression = 9 },
		"not packed":    func(m *millracev1.LogChunk) { m.Compression = millracev1.LogChunk_COMPRESSION_ZSTD },
		"no data":       func(m *millracev1.LogChunk) { m.Data, m.Size = nil, 0 },
	}
	for _, spoil := range bad {
		m := good()
		spoil(m)
		c.inject(0, m)
	}
	c.redis.Do(t, "XADD", "logs:0", "*", "l", "\xff\xff garbage")
	c.redis.Do(t, "XADD", "logs:0", "*", "other", "field")
	c.inject(0, good()) // any shard will do
	c.inject(0, &millracev1.LogChunk{
		Task: "owned", Attempt: 2, Worker: worker, Date: date, Sequence: 1, Offset: 1,
		End: &millracev1.LogEnd{TotalBytes: 1, Chunks: 1},
	})
	c.check("owned", 2, []byte("x"))
	c.eventually("the bad ones are dead", func() bool { return c.redis.Do(t, "XLEN", "dead") == strconv.Itoa(len(bad)+2) })
	letters, err := c.store.Dead(t.Context(), 100)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range letters {
		if l.Letter.GetCode() != "bad_chunk" || l.Letter.GetReason() == "" || len(l.Letter.GetFields()) == 0 {
			t.Errorf("letter %v", l.Letter)
		}
	}
	var files []string
	_ = filepath.WalkDir(c.dir, func(path string, e os.DirEntry, _ error) error {
		if !e.IsDir() {
			files = append(files, strings.TrimPrefix(path, c.dir))
		}
		return nil
	})
	if len(files) != 2 {
		t.Errorf("files: %v", files)
	}
	for _, id := range []string{"..", "../x", "a/b"} {
		if _, err := c.client.ReadLog(t.Context(), api.LogQuery{Task: task.ID(id), Attempt: 1}, nil); err == nil {
			t.Errorf("reading %q was no error", id)
		}
	}
}

// Late bytes of an older attempt still arrive; its worker is in the record of how it ended.
func TestLateOutputOfAnOlderAttempt(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	l := c.shipper.Open(c.run("late", 1))
	c.finish("late", &millracev1.AttemptEnd{Attempt: 1})
	c.redis.Do(t, "HSET", "task:late", "s", "q", "a", "2", "w", "")
	mustWrite(t, l.Writer(0), []byte("still here\n"))
	l.Close()
	c.check("late", 1, []byte("still here\n"))
	c.eventually("the record knows", func() bool {
		v, err := c.store.LogView(t.Context(), "late", 1)
		return err == nil && v.GetComplete()
	})
}

// What was lost on the way is a visible hole, and readers pass it.
func TestHole(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	c.run("hole", 1)
	lost := noise(1, 500)
	piece := func(seq uint64, offset int, data []byte) *millracev1.LogChunk {
		return &millracev1.LogChunk{Task: "hole", Attempt: 1, Worker: worker, Date: date, Sequence: seq, Offset: uint64(offset), Data: data, Size: uint64(len(data))}
	}
	c.inject(1, piece(0, 0, []byte("before\n")))
	c.inject(1, piece(2, 7+len(lost), []byte("after\n")))
	c.inject(1, &millracev1.LogChunk{
		Task: "hole", Attempt: 1, Worker: worker, Date: date, Sequence: 4, Offset: 523,
		End: &millracev1.LogEnd{TotalBytes: 523, Chunks: 4},
	})
	got, view := c.follow("hole", 1)
	if want := "before\n\n[millrace: 500 bytes are missing here]\nafter\n??????????"; string(got) != want {
		t.Errorf("followed %q, want %q", got, want)
	}
	if view.GetComplete() || view.GetMissingBytes() != 510 || view.GetBytes() != 13 {
		t.Errorf("the log is %v", view)
	}
	// They come after all.
	c.inject(1, piece(1, 7, lost))
	c.inject(1, piece(3, 513, []byte("0123456789")))
	c.eventually("it is complete", func() bool { v, _ := c.store.LogView(t.Context(), "hole", 1); return v.GetComplete() })
	c.check("hole", 1, []byte("before\n"+string(lost)+"after\n0123456789"))
}

// Following goes on when the logsink it reads from stops.
func TestReaderOutlivesItsLogsink(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	l := c.shipper.Open(c.run("moving", 1))
	begun, ended := make(chan struct{}), make(chan error, 1)
	got := sha256.New()
	go func() { // received below
		first := true
		_, err := c.client.ReadLog(t.Context(), api.LogQuery{Task: "moving", Attempt: 1, Follow: true}, func(p api.LogPiece) error {
			if first {
				close(begun)
				first = false
			}
			_, err := got.Write(p.Data)
			return err
		})
		ended <- err
	}()
	want := sha256.New()
	w := io.MultiWriter(l.Writer(0), want)
	mustWrite(t, w, noise(1, 100<<10))
	<-begun
	second := c.startSink("")
	c.sink.stop()
	mustWrite(t, w, noise(2, 100<<10))
	third := c.startSink("")
	second.stop()
	mustWrite(t, w, noise(3, 100<<10))
	l.Close()
	select {
	case err := <-ended:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the log did not end")
	}
	if !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
		t.Error("what was followed is not what was written")
	}
	third.stop()
}
