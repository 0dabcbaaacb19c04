// Package redistest gives a test a Redis of its own: a private redis-server
// child process in a temporary directory (see [Start], [Shared]) that can be
// killed, frozen and restarted, and a TCP [Proxy] that can cut a link, slow it
// down or swallow what is sent over it.
//
// Only tests import this package. It speaks the few commands that it needs
// over a plain socket, so that it neither hides nor shares a fault of the
// Redis client under test.
package redistest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"
)

// An Option changes how [Start] runs the server.
type Option func(*options)

type options struct {
	aof    bool
	config [][2]string
}

// WithAOF turns on the append-only file (appendfsync everysec), so that data
// outlives [Server.Kill] followed by [Server.Restart].
func WithAOF() Option { return func(o *options) { o.aof = true } }

// WithConfig sets a redis.conf directive at every start of the server, for
// example WithConfig("notify-keyspace-events", "Ex").
func WithConfig(key, value string) Option {
	return func(o *options) { o.config = append(o.config, [2]string{key, value}) }
}

// Start runs a redis-server (or valkey-server) that belongs to t alone and is
// stopped, with its directory removed, when t ends. It returns when the server
// answers PING, usually after a tenth of a second.
//
// Without a server binary on PATH the test is skipped, or failed when the
// environment variable CI is set. MILLRACE_TEST_REDIS_SERVER names another
// binary to use.
func Start(t testing.TB, opts ...Option) *Server {
	t.Helper()
	bin := binary(t)
	srv, err := newServer(bin, opts)
	if err != nil {
		t.Fatalf("redistest: %v", err)
	}
	t.Cleanup(func() {
		if err := srv.close(); err != nil {
			t.Errorf("redistest: stop server: %v", err)
		}
	})
	return srv
}

// shared is the server of the test binary, started by the first call of Shared
// and stopped by Main.
var shared struct {
	mu      sync.Mutex
	managed bool // Main is running and will stop the server
	srv     *Server
	err     error
}

// Shared returns the one server of this test binary and starts it at the first
// call. Tests that use it keep apart by [Prefix], never FLUSHALL, and never
// kill, freeze or restart it. The package's TestMain must call [Main].
func Shared(t testing.TB) *Server {
	t.Helper()
	bin := binary(t)
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if !shared.managed {
		t.Fatal("redistest: Shared needs a TestMain that calls redistest.Main(m)")
	}
	if shared.srv == nil && shared.err == nil {
		shared.srv, shared.err = newServer(bin, nil)
	}
	if shared.err != nil {
		t.Fatalf("redistest: %v", shared.err)
	}
	return shared.srv
}

// Main is the TestMain of a package that calls [Shared]: it runs the tests,
// stops the shared server, fails the package when goroutines are left over
// (goleak, with the given options), and exits.
func Main(m *testing.M, opts ...goleak.Option) {
	os.Exit(runMain(m, opts))
}

func runMain(m *testing.M, opts []goleak.Option) int {
	shared.mu.Lock()
	shared.managed = true
	shared.mu.Unlock()

	code := m.Run()

	shared.mu.Lock()
	srv := shared.srv
	shared.managed, shared.srv = false, nil
	shared.mu.Unlock()
	if srv != nil {
		if err := srv.close(); err != nil {
			fmt.Fprintln(os.Stderr, "redistest: stop the shared server:", err)
			code = max(code, 1)
		}
	}
	if code == 0 {
		if err := goleak.Find(opts...); err != nil {
			fmt.Fprintln(os.Stderr, "redistest: goroutines are left over:", err)
			code = 1
		}
	}
	return code
}

var (
	prefixCount   atomic.Int64
	notInAPrefix  = regexp.MustCompile(`[^a-z0-9_]+`)
	maxPrefixName = 40
)

// Prefix returns a namespace that no other call in this process gets, made
// from t's name so that keys can be told apart by eye. It matches
// [a-z0-9_-]{1,64}.
func Prefix(t testing.TB) string {
	t.Helper()
	name := notInAPrefix.ReplaceAllString(strings.ToLower(t.Name()), "-")
	name = strings.Trim(name[:min(len(name), maxPrefixName)], "-")
	return fmt.Sprintf("%s-%d", name, prefixCount.Add(1))
}

// binary finds the server program, or skips or fails t.
func binary(t testing.TB) string {
	t.Helper()
	bin, err := findBinary()
	if err == nil {
		return bin
	}
	if os.Getenv("CI") != "" {
		t.Fatalf("redistest: %v", err)
	}
	t.Skipf("redistest: %v", err)
	return ""
}

func findBinary() (string, error) {
	if named := os.Getenv("MILLRACE_TEST_REDIS_SERVER"); named != "" {
		bin, err := exec.LookPath(named)
		if err != nil {
			return "", fmt.Errorf("MILLRACE_TEST_REDIS_SERVER: %w", err)
		}
		return bin, nil
	}
	for _, name := range []string{"redis-server", "valkey-server"} {
		if bin, err := exec.LookPath(name); err == nil {
			return bin, nil
		}
	}
	return "", errors.New("neither redis-server nor valkey-server is on PATH; " +
		"install one with 'apt-get install redis-server' (Debian, Ubuntu) or 'brew install redis' (macOS)")
}
