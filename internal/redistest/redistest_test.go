package redistest

import (
	"regexp"
	"strings"
	"testing"
	"time"
)

func TestMain(m *testing.M) { Main(m) }

func TestStartGivesAWorkingServer(t *testing.T) {
	t.Parallel()
	srv := Start(t, WithConfig("stream-node-max-bytes", "1024"))
	if got := srv.Do(t, "ECHO", "hello\r\nworld"); got != "hello\r\nworld" {
		t.Errorf("ECHO = %q", got)
	}
	if got := srv.Do(t, "STRLEN", "none"); got != "0" {
		t.Errorf("STRLEN of a missing key = %q, want 0", got)
	}
	srv.Config(t, "maxmemory-policy", "allkeys-lru")
	if info := srv.Do(t, "INFO", "memory"); !strings.Contains(info, "maxmemory_policy:allkeys-lru") {
		t.Errorf("Config did not reach the server: %s", info)
	}
	if !strings.HasPrefix(srv.URL(), "redis://127.0.0.1:") || !strings.HasSuffix(srv.URL(), "/0") {
		t.Errorf("URL = %q", srv.URL())
	}
	if want := "unix://" + srv.Socket() + "?db=0"; srv.SocketURL() != want {
		t.Errorf("SocketURL = %q, want %q", srv.SocketURL(), want)
	}
}

func TestAOFKeepsDataOverAKill(t *testing.T) {
	t.Parallel()
	srv := Start(t, WithAOF())
	addr := srv.Addr()
	srv.Do(t, "SET", "k", "v")
	srv.Kill()
	srv.Kill() // a second time does nothing
	if _, err := command(srv.Socket(), time.Second, "PING"); err == nil {
		t.Fatal("a killed server answers")
	}
	srv.Restart(t)
	if got := srv.Do(t, "GET", "k"); got != "v" {
		t.Errorf("after kill and restart GET = %q, want v", got)
	}
	if srv.Addr() != addr {
		t.Errorf("restart moved the server from %s to %s", addr, srv.Addr())
	}
}

func TestWithoutAOFARestartEmpties(t *testing.T) {
	t.Parallel()
	srv := Start(t)
	srv.Do(t, "SET", "k", "v")
	srv.Freeze()
	srv.Restart(t) // also of a frozen server
	if got := srv.Do(t, "GET", "k"); got != "" {
		t.Errorf("after restart GET = %q, want nothing", got)
	}
}

func TestFreezeAndThaw(t *testing.T) {
	t.Parallel()
	srv := Start(t)
	srv.Freeze()
	if _, err := command(srv.Socket(), 200*time.Millisecond, "PING"); err == nil {
		t.Error("a frozen server answers")
	}
	srv.Thaw()
	if got := srv.Do(t, "PING"); got != "PONG" {
		t.Errorf("after Thaw PING = %q", got)
	}
}

func TestSharedIsOneServer(t *testing.T) {
	t.Parallel()
	a, b := Shared(t), Shared(t)
	if a != b {
		t.Error("Shared started two servers")
	}
	a.Do(t, "SET", a.Prefix(t)+":k", "v")
}

func TestPrefixIsUniqueAndLegal(t *testing.T) {
	t.Parallel()
	legal := regexp.MustCompile(`^[a-z0-9_-]{1,64}$`)
	seen := map[string]bool{}
	for _, name := range []string{"ä/Ö", "plain", "plain", strings.Repeat("Long-Name_", 30)} {
		t.Run(name, func(t *testing.T) {
			p := Prefix(t)
			if !legal.MatchString(p) {
				t.Errorf("Prefix = %q, does not match %v", p, legal)
			}
			if seen[p] {
				t.Errorf("Prefix = %q, given before", p)
			}
			seen[p] = true
		})
	}
}

// A directive that the server refuses must end in an error that shows its log,
// not in a time-out.
func TestStartFailsWithTheServersReason(t *testing.T) {
	t.Parallel()
	bin := binary(t)
	_, err := newServer(bin, []Option{WithConfig("no-such-directive", "1")})
	if err == nil {
		t.Fatal("a bad directive was accepted")
	}
	if !strings.Contains(err.Error(), "ended while starting") {
		t.Errorf("error = %v", err)
	}
}

func TestMissingBinarySaysHowToInstall(t *testing.T) {
	t.Setenv("MILLRACE_TEST_REDIS_SERVER", "")
	t.Setenv("PATH", t.TempDir())
	_, err := findBinary()
	if err == nil || !strings.Contains(err.Error(), "apt-get install redis-server") {
		t.Errorf("findBinary error = %v, want one that says how to install", err)
	}
	t.Setenv("MILLRACE_TEST_REDIS_SERVER", "/no/such/redis")
	if _, err = findBinary(); err == nil || !strings.Contains(err.Error(), "MILLRACE_TEST_REDIS_SERVER") {
		t.Errorf("findBinary error = %v, want one that names the variable", err)
	}
}
