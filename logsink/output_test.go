package logsink_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/api"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func mustWrite(t testing.TB, w io.Writer, p []byte) {
	t.Helper()
	if _, err := w.Write(p); err != nil {
		t.Fatal(err)
	}
}

// check follows a log and compares it with what was written, and the file too.
func (c *chain) check(id string, attempt uint32, want []byte) {
	c.t.Helper()
	got, view := c.follow(id, attempt)
	if d := diff(got, want); d != "" || !view.GetComplete() {
		c.t.Errorf("%s: followed %s (%v)", id, d, view)
	}
	onDisk, err := os.ReadFile(c.path(id, attempt))
	if err != nil {
		c.t.Fatal(err)
	}
	if d := diff(onDisk, want); d != "" {
		c.t.Errorf("%s: the file has %s", id, d)
	}
}

// R06: the last line of a task that exits at once is never lost, and the end is not told before it is there.
func TestR06ManyShortTasksKeepTheirLastLine(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	var wg sync.WaitGroup
	limit := make(chan struct{}, 16)
	for i := range 300 {
		id := fmt.Sprintf("short-%d", i)
		a := c.run(id, 1)
		limit <- struct{}{}
		wg.Go(func() {
			defer func() { <-limit }()
			l := c.shipper.Open(a)
			var want bytes.Buffer
			for n := range 20 {
				_, _ = fmt.Fprintf(io.MultiWriter(l.Writer(0), &want), "line %d\n", n)
			}
			_, _ = fmt.Fprintf(io.MultiWriter(l.Writer(0), &want), "END %d", i)
			l.Close()
			if got, view := c.follow(id, 1); !bytes.Equal(got, want.Bytes()) || !view.GetComplete() {
				t.Errorf("%s: %q, %v", id, got, view)
			}
		})
	}
	wg.Wait()
}

// R07, R12: output without a newline, and characters that are flushed a byte at a time, reach the follower at once and
// unchanged.
func TestR07R12FollowerSeesOutputSoon(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	l := c.shipper.Open(c.run("dots", 1))
	seen := make(chan string, 100)
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	wg.Go(func() {
		defer close(seen)
		// It is there before the log is.
		_, err := c.client.ReadLog(ctx, api.LogQuery{Task: "dots", Attempt: 1, Follow: true}, func(p api.LogPiece) error {
			seen <- string(p.Data)
			return nil
		})
		if err != nil {
			t.Errorf("follow: %v", err)
		}
	})
	text := "läuft – 50 % ✓"
	var got strings.Builder
	slowest := time.Duration(0)
	for i := range len(text) {
		begin := time.Now()
		mustWrite(t, l.Writer(0), []byte{text[i]})
		for got.Len() <= i {
			select {
			case s := <-seen:
				got.WriteString(s)
			case <-time.After(5 * time.Second):
				t.Fatalf("byte %d did not come", i)
			}
		}
		slowest = max(slowest, time.Since(begin))
	}
	l.Close()
	for s := range seen {
		got.WriteString(s)
	}
	wg.Wait()
	if got.String() != text {
		t.Errorf("followed %q, want %q", got.String(), text)
	}
	t.Logf("the slowest byte took %v", slowest)
	if slowest > time.Second {
		t.Errorf("the slowest byte took %v to reach the follower", slowest)
	}
}

// R08: thousands of updates of one line are few chunks, and byte-exact.
func TestR08CarriageReturnsAtTwoKilohertz(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	l := c.shipper.Open(c.run("progress", 1))
	var want bytes.Buffer
	w := io.MultiWriter(l.Writer(0), &want)
	steps := 20000
	if testing.Short() {
		steps = 2000
	}
	begin := time.Now()
	for i := range steps {
		_, _ = fmt.Fprintf(w, "\rstep %d/%d", i, steps)
		if i%20 == 19 { // 2 kHz on average
			time.Sleep(time.Until(begin.Add(time.Duration(i) * 500 * time.Microsecond)))
		}
	}
	took := time.Since(begin)
	_, _ = io.WriteString(w, "\ndone")
	l.Close()
	c.check("progress", 1, want.Bytes())
	chunks := c.chunks("progress", 1)
	if most := int(took/(100*time.Millisecond)) + want.Len()/(64<<10) + 5; chunks > most {
		t.Errorf("%d chunks in %v, want at most %d", chunks, took, most)
	}
}

// chunks is the number of chunks in the index of a log.
func (c *chain) chunks(id string, attempt uint32) int {
	c.t.Helper()
	info, err := os.Stat(strings.TrimSuffix(c.path(id, attempt), ".log") + ".idx")
	if err != nil {
		c.t.Fatal(err)
	}
	return int(info.Size()-512) / 24
}

// R09: many short lines cost the task next to nothing.
func TestR09ManyLines(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	l := c.shipper.Open(c.run("seq", 1))
	var want bytes.Buffer
	w := io.MultiWriter(l.Writer(0), &want)
	begin := time.Now()
	for i := 1; i <= 50000; i++ {
		_, _ = io.WriteString(w, strconv.Itoa(i)+"\n")
	}
	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("writing took %v", took)
	}
	l.Close()
	c.check("seq", 1, want.Bytes())
}

// R11: what is no text passes unchanged.
func TestR11BytesThatAreNoText(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	l := c.shipper.Open(c.run("bytes", 1))
	want := append([]byte("\x00\x80\xff\xe2\x82\x1b[31mred\x1b[0m\r\n"), noise(3, 200<<10)...)
	want = append(want, "\xe2"...)
	mustWrite(t, l.Writer(0), want[:5])
	mustWrite(t, l.Writer(0), want[5:])
	l.Close()
	c.check("bytes", 1, want)
}

// A single line of many MiB needs neither a newline nor memory for all of it.
func TestOneLongLine(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	l := c.shipper.Open(c.run("line", 1))
	want := bytes.Repeat([]byte("x"), 12<<20)
	mustWrite(t, l.Writer(0), want)
	l.Close()
	c.check("line", 1, want)
}

// R15: of endless output the first and the last part are kept, with a marker, and nothing grows.
func TestR15LimitKeepsHeadAndTail(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	const limit = 4 << 20
	a := c.run("yes", 1)
	a.LimitBytes = limit
	l := c.shipper.Open(a)
	total := 300 << 20
	if testing.Short() {
		total = 60 << 20
	}
	block := bytes.Repeat([]byte("y\n"), 32<<10)
	mustWrite(t, l.Writer(0), []byte("first\n"))
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for n := 0; n < total; n += len(block) {
		mustWrite(t, l.Writer(0), block)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	mustWrite(t, l.Writer(0), []byte("last\n"))
	l.Close()
	got, view := c.follow("yes", 1)
	if !bytes.HasPrefix(got, []byte("first\ny\n")) || !bytes.HasSuffix(got, []byte("y\nlast\n")) {
		t.Errorf("the log begins %q and ends %q", got[:20], got[len(got)-20:])
	}
	kept := uint64(len(got))
	marker := fmt.Sprintf("\n[millrace: %d bytes left out here]\n", view.GetDroppedBytes())
	if !bytes.Contains(got, []byte(marker)) {
		t.Errorf("there is no marker %q", marker)
	}
	written := uint64(11) + uint64((total+len(block)-1)/len(block)*len(block))
	if kept > limit || kept < limit*3/4 || kept-uint64(len(marker))+view.GetDroppedBytes() != written {
		t.Errorf("kept %d of %d bytes, limit %d, %v", kept, written, limit, view)
	}
	if !view.GetComplete() || view.GetBytes() != kept {
		t.Errorf("the log is %v, want %d complete bytes", view, kept)
	}
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 64<<20 {
		t.Errorf("the heap grew by %d MiB", grown>>20)
	}
	if left, err := os.ReadDir(c.spool); err != nil || len(left) > 0 {
		t.Errorf("the spool still has %d files, %v", len(left), err)
	}
}

// Streams that are kept apart come in the order they were written, and can be read alone.
func TestSplitStreams(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	a := c.run("split", 1)
	a.Split = true
	l := c.shipper.Open(a)
	for i := range 50 {
		_, _ = fmt.Fprintf(l.Writer(1), "out %d\n", i)
		if i%3 == 0 {
			_, _ = fmt.Fprintf(l.Writer(2), "err %d\n", i)
		}
	}
	l.Close()
	all, _ := c.follow("split", 1)
	if !bytes.HasPrefix(all, []byte("out 0\nerr 0\nout 1\nout 2\nout 3\nerr 3\n")) {
		t.Errorf("the log begins %q", all[:40])
	}
	errs, _ := c.read(api.LogQuery{Task: "split", Attempt: 1, Stream: 2, Follow: true})
	if want := "err 0\nerr 3\nerr 6\n"; !strings.HasPrefix(string(errs), want) || strings.Count(string(errs), "\n") != 17 {
		t.Errorf("stderr is %q", errs)
	}
	two := uint64(2)
	tail, _ := c.read(api.LogQuery{Task: "split", Attempt: 1, Stream: 2, Tail: &two})
	if string(tail) != "err 45\nerr 48\n" {
		t.Errorf("the tail of stderr is %q", tail)
	}
}

func TestTailAndOffset(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	l := c.shipper.Open(c.run("tail", 1))
	var want bytes.Buffer
	for i := range 3000 {
		_, _ = fmt.Fprintf(io.MultiWriter(l.Writer(0), &want), "line %d of a log that has several chunks ................\n", i)
	}
	_, _ = io.WriteString(io.MultiWriter(l.Writer(0), &want), "unfinished")
	l.Close()
	c.check("tail", 1, want.Bytes())
	lines := strings.SplitAfter(want.String(), "\n")
	for _, n := range []uint64{0, 1, 2, 1500, 3001, 5000} {
		got, _ := c.read(api.LogQuery{Task: "tail", Attempt: 1, Tail: &n})
		if want := strings.Join(lines[len(lines)-min(int(n), len(lines)):], ""); string(got) != want {
			t.Errorf("tail %d has %s", n, diff(got, []byte(want)))
		}
	}
	for _, offset := range []int{0, 1, 65536, 100001, want.Len(), want.Len() + 5} {
		got, _ := c.read(api.LogQuery{Task: "tail", Attempt: 1, Offset: uint64(offset)})
		if d := diff(got, want.Bytes()[min(offset, want.Len()):]); d != "" {
			t.Errorf("from %d: %s", offset, d)
		}
	}
}

// An attempt without output costs nothing in Redis, and following it ends when the record says so.
func TestSilentAttempt(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	a := c.run("silent", 1)
	a.ElideEmpty = true
	l := c.shipper.Open(a)
	_ = l.Writer(0)
	if !l.Close() {
		t.Error("the end was not left out")
	}
	c.finish("silent", &millracev1.AttemptEnd{Attempt: 1, NoOutput: true})
	begin := time.Now()
	if got, view := c.follow("silent", 1); len(got) > 0 || !view.GetComplete() {
		t.Errorf("followed %q, %v", got, view)
	}
	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("it took %v to see that there is nothing", took)
	}
	if _, status := c.read(api.LogQuery{Task: "silent", Attempt: 1}); !status.Ended {
		t.Errorf("a plain read says %v", status)
	}
	for n := range 4 {
		if keys := c.redis.Do(t, "XLEN", "logs:"+strconv.Itoa(n)); keys != "0" {
			t.Errorf("log shard %d has %s entries", n, keys)
		}
	}
}

// A reader that leaves, or one of a task that has not begun, gets no error and holds up nobody.
func TestReadBeforeTheStart(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	c.run("later", 1)
	if got, status := c.read(api.LogQuery{Task: "later", Attempt: 1}); len(got) > 0 || status.Ended {
		t.Errorf("read %q, %v", got, status)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	status, err := c.client.ReadLog(ctx, api.LogQuery{Task: task.ID("later"), Attempt: 1, Follow: true}, func(api.LogPiece) error { return nil })
	if err != nil || status.Ended {
		t.Errorf("follow = %v, %v", status, err)
	}
}

// A filter, for example one that masks secrets, may hold back output until the end.
func TestFilter(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	a := c.run("masked", 1)
	a.Filter = func(_ uint32, w io.Writer) io.WriteCloser { return &upper{w: w} }
	l := c.shipper.Open(a)
	mustWrite(t, l.Writer(0), []byte("abc"))
	mustWrite(t, l.Writer(0), []byte("def"))
	l.Close()
	c.check("masked", 1, []byte("ABCDEF"))
}

// upper writes capitals and holds back the last byte.
type upper struct {
	w    io.Writer
	held []byte
}

func (u *upper) Write(p []byte) (int, error) {
	b := append(u.held, bytes.ToUpper(p)...)
	u.held = append([]byte(nil), b[len(b)-1:]...)
	_, err := u.w.Write(b[:len(b)-1])
	return len(p), err
}

func (u *upper) Close() error {
	_, err := u.w.Write(u.held)
	return err
}
