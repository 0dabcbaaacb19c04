package logsink_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/millrace/millrace/internal/api"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/logread"
	"github.com/millrace/millrace/internal/logship"
	"github.com/millrace/millrace/internal/redistest"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	"github.com/millrace/millrace/logsink"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

const (
	worker = "agent-1-abc"
	date   = "2026-03-01"
	token  = "a-secret-of-the-test"
)

// chain is everything between a task's pipe and a reader: agent side, Redis, logsink, client.
type chain struct {
	t       testing.TB
	redis   *redistest.Server
	store   *store.Store
	dir     string
	spool   string
	sink    *running
	shipper *logship.Shipper
	stop    func() // the shipper
	client  *logread.Client
}

func newStore(t testing.TB, url, namespace string) *store.Store {
	t.Helper()
	st, err := store.New(store.Options{URL: url, Namespace: namespace, Name: "test"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	return st
}

// newChain starts all parts on a Redis of the test's own.
func newChain(t testing.TB) *chain {
	t.Helper()
	c := &chain{t: t, redis: redistest.Start(t, redistest.WithAOF()), dir: t.TempDir(), spool: t.TempDir()}
	c.store = newStore(t, c.redis.URL(), "")
	c.sink = c.startSink("")
	c.startShipper(logship.Config{Compress: true})
	c.client = logread.New(logread.Config{Token: token}, c.store)
	t.Cleanup(c.client.Close)
	return c
}

// running is a service under way.
type running struct {
	*logsink.Service
	stop func()
}

func logger(t testing.TB) *slog.Logger {
	t.Helper()
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
}

func sinkConfig(dir string) logsink.Config {
	return logsink.Config{Dir: dir, Addr: "127.0.0.1:0", OpenLogs: 64, LeaseTTL: time.Second, Token: config.Secret(token)}
}

func (c *chain) startSink(dir string) *running {
	c.t.Helper()
	if dir == "" {
		dir = c.dir
	}
	svc, err := logsink.New(sinkConfig(dir), logsink.Deps{Store: newStore(c.t, c.redis.URL(), ""), Logger: logger(c.t)})
	if err != nil {
		c.t.Fatal(err)
	}
	stop := start(c.t, svc.Run)
	return &running{svc, stop}
}

// start runs f and returns what stops it and waits; that is also done at the end of the test.
func start(t testing.TB, f func(context.Context) error) func() {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	stopped := false
	stop := func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
	t.Cleanup(stop)
	return stop
}

func (c *chain) startShipper(cfg logship.Config) {
	c.t.Helper()
	cfg.SpoolDir = c.spool
	s, err := logship.New(cfg, logship.Deps{
		Appender: c.store, Shards: c.store.LogShards, Logger: logger(c.t),
	})
	if err != nil {
		c.t.Fatal(err)
	}
	c.shipper = s
	c.stop = start(c.t, s.Run)
}

// running puts a record of a running task into Redis, as far as logs look at it.
func (c *chain) run(id string, attempt uint32) logship.Attempt {
	c.t.Helper()
	rec := c.store.Keys().Task(id)
	c.redis.Do(c.t, "HSET", rec, "s", string(rune(task.Running)), "a", strconv.Itoa(int(attempt)), "w", worker)
	return logship.Attempt{Task: id, Attempt: attempt, Worker: worker, Date: date}
}

// finish writes how an attempt ended.
func (c *chain) finish(id string, end *millracev1.AttemptEnd) {
	c.t.Helper()
	end.Worker = worker
	b, err := proto.Marshal(end)
	if err != nil {
		c.t.Fatal(err)
	}
	c.redis.Do(c.t, "HSET", c.store.Keys().Task(id), "s", string(rune(task.Succeeded)), "h"+strconv.Itoa(int(end.GetAttempt())), string(b))
}

func (c *chain) path(id string, attempt uint32) string {
	return filepath.Join(c.dir, date, id, fmt.Sprintf("%d.log", attempt))
}

// read reads the log of an attempt, with follow to its end.
func (c *chain) read(q api.LogQuery) (data []byte, status api.LogStatus) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 60*time.Second)
	defer cancel()
	status, err := c.client.ReadLog(ctx, q, func(p api.LogPiece) error {
		data = append(data, p.Data...)
		return nil
	})
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		c.t.Fatalf("read %s: %v after %d bytes", q.Task, err, len(data))
	}
	return data, status
}

// follow reads the log of an attempt to its end.
func (c *chain) follow(id string, attempt uint32) ([]byte, *millracev1.LogView) {
	c.t.Helper()
	data, status := c.read(api.LogQuery{Task: task.ID(id), Attempt: attempt, Follow: true})
	if !status.Ended {
		c.t.Errorf("the log of %s did not end: %v", id, status.View)
	}
	return data, status.View
}

// eventually waits for what nothing announces to a test.
func (c *chain) eventually(what string, ok func() bool) {
	c.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			c.t.Fatalf("not within 20 s: %s", what)
		}
	}
}

func noise(seed uint64, n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)}).Read(b)
	return b
}

func diff(got, want []byte) string {
	if bytes.Equal(got, want) {
		return ""
	}
	i := 0
	for i < min(len(got), len(want)) && got[i] == want[i] {
		i++
	}
	return fmt.Sprintf("%d bytes, want %d; they differ from byte %d on", len(got), len(want), i)
}

func TestChainIsByteExact(t *testing.T) {
	t.Parallel()
	c := newChain(t)
	size := 100 << 20
	if testing.Short() {
		size = 8 << 20
	}
	l := c.shipper.Open(c.run("big", 1))
	sum := sha256.New()
	w := io.MultiWriter(l.Writer(0), sum)
	begin := time.Now()
	block := append(noise(1, 32<<10), []byte(strings.Repeat("step 1234 reward 0.25 loss 0.003\n", 1000))...)
	for n := 0; n < size; n += len(block) {
		if _, err := w.Write(block); err != nil {
			t.Fatal(err)
		}
	}
	l.Close()
	got := sha256.New()
	var n int
	status, err := c.client.ReadLog(t.Context(), api.LogQuery{Task: "big", Attempt: 1, Follow: true}, func(p api.LogPiece) error {
		n += len(p.Data)
		_, err := got.Write(p.Data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	took := time.Since(begin)
	t.Logf("%d bytes in %v: %.0f MB/s", n, took, float64(n)/1e6/took.Seconds())
	if !bytes.Equal(got.Sum(nil), sum.Sum(nil)) || !status.View.GetComplete() {
		t.Errorf("followed %d bytes, checksums equal %v, %v", n, bytes.Equal(got.Sum(nil), sum.Sum(nil)), status.View)
	}
	onDisk, err := os.ReadFile(c.path("big", 1))
	if err != nil {
		t.Fatal(err)
	}
	if s := sha256.Sum256(onDisk); !bytes.Equal(s[:], sum.Sum(nil)) {
		t.Error("the file differs from what was written")
	}
	c.eventually("the stream is empty and the record knows", func() bool {
		rec, err := c.store.LogView(t.Context(), "big", 1)
		return err == nil && rec.GetComplete() && rec.GetBytes() == uint64(len(onDisk)) &&
			c.redis.Do(t, "XLEN", "logs:"+strconv.Itoa(store.LogShard("big", store.DefaultLogShards))) == "0"
	})
}
