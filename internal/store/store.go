// Package store is the only one that talks to Redis: every key, script and stream call is here.
//
// Moves of tasks are chosen from the table in internal/task and run as guarded scripts: the script checks that the
// record still is what the choice was made on, then does all effects or none. Methods are safe for concurrent use.
// They never retry a write by themselves: a lost reply leaves the caller to ask again, and every move is harmless
// when it comes again.
package store

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// Options say how to reach Redis.
type Options struct {
	URL       string // redis:// or rediss:// or unix://
	Namespace string // put before every key; may be empty
	Name      string // shown in CLIENT LIST
	// Readers is how many blocking reads run at the same time at most; 2 when 0.
	Readers int
	// Embedded: the server is the in-memory one of `millrace dev`, which has no INFO and no CONFIG.
	Embedded bool
	// Alone: this process is the only one that uses a server which it has just started, so that nobody else's renewal
	// has to be waited for before claims.
	Alone bool
	// TLS overrides what the URL says.
	TLS *tls.Config
}

// Store is one shard of keys on one Redis.
type Store struct {
	keys Keys
	opts Options
	log  *slog.Logger

	cmd   *redis.Client // commands and scripts
	block *redis.Client // blocking reads, so that they never take a connection from commands
	sub   *redis.Client // pub/sub

	offset atomic.Int64 // server clock minus ours, ns
	server atomic.Pointer[Server]

	mu     sync.Mutex
	queues map[string]bool // known queues, cached
}

// Server is what we know of the Redis we are connected to.
type Server struct {
	RunID   string
	Version string
	Started time.Time // on our clock
}

// bufferBytes of each connection. A batch of 128 tasks is 35-70 KB; with buffers that hold it the client needs a
// third less CPU for a task. Commands have few connections, so this costs little memory.
const bufferBytes = 256 << 10

// New prepares the clients; it does not connect.
func New(opts Options, log *slog.Logger) (*Store, error) {
	ro, err := redis.ParseURL(opts.URL)
	if err != nil {
		return nil, fmt.Errorf("redis URL: %w (want redis://[user:password@]host:port/db)", redactURLError(err))
	}
	if opts.TLS != nil {
		ro.TLSConfig = opts.TLS
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	if opts.Readers <= 0 {
		opts.Readers = 2
	}
	s := &Store{keys: NewKeys(opts.Namespace), opts: opts, log: log, queues: map[string]bool{}}
	client := func(kind string, pool, buffer int) *redis.Client {
		o := *ro
		o.ClientName = strings.Trim(opts.Name+"-"+kind, "-")
		o.MaxRetries = -1 // a retry of ours carries its own guard; one of go-redis would run a command twice
		o.PoolSize = pool
		o.PipelinePoolSize = -1
		o.ReadBufferSize, o.WriteBufferSize = buffer, buffer
		o.DisableIdentity = true
		o.DialTimeout = 2 * time.Second
		o.ReadTimeout = 3 * time.Second
		o.WriteTimeout = 3 * time.Second
		o.PoolTimeout = 4 * time.Second
		o.ContextTimeoutEnabled = true
		o.DialerRetries = 1
		o.MaintNotificationsConfig = maintOff()
		o.OnConnect = s.onConnect
		return redis.NewClient(&o)
	}
	s.cmd = client("cmd", 4, commandBuffer(opts))
	s.block = client("read", opts.Readers, 64<<10)
	s.sub = client("sub", 2, 32<<10)
	return s, nil
}

// commandBuffer: the big buffers are for services that work in batches; CLI commands and tests with many stores use less.
func commandBuffer(o Options) int {
	if o.Embedded {
		return 64 << 10
	}
	return bufferBytes
}

// Close ends all connections.
func (s *Store) Close() error {
	return errors.Join(s.cmd.Close(), s.block.Close(), s.sub.Close())
}

// Keys of this shard.
func (s *Store) Keys() Keys { return s.keys }

// Client is for tests and tools that must look at raw keys.
func (s *Store) Client() *redis.Client { return s.cmd }

// Now is the server's clock as far as we know it. Leases and due times are read on it.
func (s *Store) Now() time.Time {
	return time.Now().Add(time.Duration(s.offset.Load())).Round(0)
}

func (s *Store) noteTime(serverMS int64) {
	if serverMS > 0 {
		s.offset.Store(int64(time.UnixMilli(serverMS).Sub(time.Now().Round(0))))
	}
}

// Server returns what is known of the server, nil before the first connection.
func (s *Store) Server() *Server { return s.server.Load() }

// settle is how long after its start a Redis is given until anybody claims: the living renew first.
const settle = 3 * time.Second

// Settled reports whether Redis has been up long enough for claims.
func (s *Store) Settled() bool {
	sv := s.server.Load()
	return s.opts.Alone || sv == nil || sv.Started.IsZero() || time.Since(sv.Started) >= settle
}

func (s *Store) onConnect(ctx context.Context, cn *redis.Conn) error {
	if s.opts.Embedded {
		return nil
	}
	info, err := cn.Info(ctx, "server").Result()
	if err != nil {
		// An ACL may forbid INFO; the clock then comes from the scripts and claims do not wait after a restart.
		if isReplyError(err) && !IsUnavailable(err) {
			return nil
		}
		return err
	}
	f := infoFields(info)
	up, _ := strconv.ParseInt(f["uptime_in_seconds"], 10, 64)
	sv := &Server{RunID: f["run_id"], Version: f["redis_version"], Started: time.Now().Add(-time.Duration(up) * time.Second)}
	if us, err := strconv.ParseInt(f["server_time_usec"], 10, 64); err == nil {
		s.noteTime(us / 1000)
	}
	if old := s.server.Load(); old != nil && old.RunID == sv.RunID {
		sv.Started = old.Started
	}
	s.server.Store(sv)
	return nil
}

func infoFields(info string) map[string]string {
	m := map[string]string{}
	for line := range strings.Lines(info) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			m[k] = v
		}
	}
	return m
}

// Ping asks whether Redis answers.
func (s *Store) Ping(ctx context.Context) error { return s.cmd.Ping(ctx).Err() }

// Wait blocks until Redis answers, at most for patience; 0 tries once. It says on the log that it waits.
func (s *Store) Wait(ctx context.Context, patience time.Duration) error {
	deadline := time.Now().Add(patience)
	pause := 100 * time.Millisecond
	for said := false; ; {
		err := s.Ping(ctx)
		if err == nil {
			return nil
		}
		if isReplyError(err) && !IsUnavailable(err) {
			return fmt.Errorf("redis at %s refuses us: %w", s.Addr(), err)
		}
		if time.Now().Add(pause).After(deadline) {
			return fmt.Errorf("redis at %s does not answer: %w: start it, or set MILLRACE_REDIS_URL", s.Addr(), err)
		}
		if !said {
			said = true
			s.log.Warn("waiting for redis", "addr", s.Addr(), "for", patience, "err", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
		pause = min(pause*2, 2*time.Second)
	}
}

// Addr is host:port of Redis, without secrets.
func (s *Store) Addr() string { return s.cmd.Options().Addr }

// Check looks at the server's version and settings. Problems that may lose tasks are returned as warnings, or as
// an error when strict.
func (s *Store) Check(ctx context.Context, strict bool) (warnings []string, err error) {
	if s.opts.Embedded {
		return nil, nil
	}
	info, err := s.cmd.Info(ctx).Result()
	if err != nil {
		return []string{"INFO is not allowed: version and eviction policy were not checked"}, nil
	}
	f := infoFields(info)
	if v := f["redis_version"]; v != "" && !atLeast(v, 7, 0) {
		return nil, fmt.Errorf("redis %s is too old: millrace needs 7.0 or newer", v)
	}
	if p := f["maxmemory_policy"]; p != "" && p != "noeviction" {
		warnings = append(warnings, fmt.Sprintf("maxmemory-policy is %s: Redis may throw away tasks under memory pressure; set it to noeviction", p))
	}
	if f["aof_enabled"] == "0" && f["rdb_last_bgsave_status"] != "" {
		if save, err := s.cmd.ConfigGet(ctx, "save").Result(); err == nil && save["save"] == "" {
			s.log.Info("redis keeps nothing on disk: tasks are lost when it stops")
		}
	}
	if strict && len(warnings) > 0 {
		return warnings, fmt.Errorf("strict: %s", strings.Join(warnings, "; "))
	}
	// Keeps records packed; worth 300 bytes a task. Without the right it is only larger.
	_ = s.cmd.ConfigSet(ctx, "hash-max-listpack-value", "1024").Err()
	return warnings, nil
}

func atLeast(v string, major, minor int) bool {
	p := strings.SplitN(v, ".", 3)
	a, err := strconv.Atoi(p[0])
	if err != nil {
		return true
	}
	b := 0
	if len(p) > 1 {
		b, _ = strconv.Atoi(p[1])
	}
	return a > major || a == major && b >= minor
}

// IsUnavailable reports whether the error says that Redis cannot be used now: not reached, starting, failing over,
// a stream that was deleted under a reader. The caller tries again with a pause.
func IsUnavailable(err error) bool {
	if err == nil || errors.Is(err, redis.Nil) {
		return false
	}
	if !isReplyError(err) {
		return true
	}
	for _, p := range []string{"LOADING", "READONLY", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "UNBLOCKED", "BUSY ", "MOVED", "ASK", "NOREPLICAS", "MISCONF", "ERR max number of clients"} {
		if strings.HasPrefix(err.Error(), p) {
			return true
		}
	}
	return false
}

// IsOutOfMemory reports whether Redis refused a write for want of memory.
func IsOutOfMemory(err error) bool {
	return err != nil && strings.Contains(err.Error(), "OOM command not allowed")
}

func isReplyError(err error) bool {
	var re redis.Error
	var ne net.Error
	if errors.As(err, &ne) || errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
		return false
	}
	return errors.As(err, &re)
}

func redactURLError(err error) error {
	// url.Error repeats the URL with its password.
	var s string
	if s = err.Error(); strings.Contains(s, "@") {
		return errors.New("not a valid URL")
	}
	return err
}
