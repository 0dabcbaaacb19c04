package ops

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/internal/config"
)

// running is a server that runs until the test ends.
type running struct {
	status *Status
	base   string
	token  config.Secret
	client *http.Client
}

func setup(t *testing.T, token config.Secret) *running {
	t.Helper()
	reg := prometheus.NewRegistry()
	counter := prometheus.NewCounter(prometheus.CounterOpts{Name: "millrace_test_things_total", Help: "things"})
	reg.MustRegister(counter)
	status := NewStatus()
	srv, err := New(Config{Addr: "127.0.0.1:0", Token: token, Service: "test", Version: "v1"},
		Deps{Logger: slog.New(slog.NewTextHandler(t.Output(), nil)), Metrics: reg, Status: status})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- srv.Run(ctx) }()
	transport := &http.Transport{}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run = %v, want nil after a clean stop", err)
		}
	})
	addr, err := srv.Addr(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return &running{status: status, base: "http://" + addr, token: token, client: &http.Client{Transport: transport}}
}

// get returns the answer to a request, made with the token unless it is changed.
func (r *running) get(t *testing.T, path string, change ...func(*http.Request)) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, r.base+path, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	if r.token != "" {
		req.Header.Set("Authorization", "Bearer "+r.token.Reveal())
	}
	for _, f := range change {
		f(req)
	}
	resp, err := r.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func TestEndpoints(t *testing.T) {
	t.Parallel()
	r := setup(t, "")
	for path, want := range map[string]string{
		"/":                              "/statusz",
		"/healthz":                       "ok\n",
		"/readyz":                        "ready\n",
		"/metrics":                       "millrace_test_things_total 0",
		"/statusz":                       `"service": "test"`,
		"/debug/pprof/":                  "goroutine",
		"/debug/pprof/goroutine?debug=1": "goroutine profile",
	} {
		code, body := r.get(t, path)
		if code != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("GET %s = %d, %q, want it to contain %q", path, code, body, want)
		}
	}
	if code, _ := r.get(t, "/nothing"); code != http.StatusNotFound {
		t.Errorf("GET /nothing = %d, want 404", code)
	}
}

func TestReadyzGivesTheReasons(t *testing.T) {
	t.Parallel()
	r := setup(t, "")
	r.status.SetNotReady("redis", "not reachable for 3s")
	r.status.SetNotReady("draining", "asked to by SIGTERM")
	code, body := r.get(t, "/readyz")
	if want := "draining: asked to by SIGTERM\nredis: not reachable for 3s\n"; code != http.StatusServiceUnavailable || body != want {
		t.Errorf("readyz = %d %q, want 503 %q", code, body, want)
	}
	r.status.SetReady("redis")
	r.status.SetReady("draining")
	if code, body := r.get(t, "/readyz"); code != http.StatusOK {
		t.Errorf("readyz = %d %q, want 200", code, body)
	}
}

func TestStatuszShowsLoopsAndSections(t *testing.T) {
	t.Parallel()
	r := setup(t, "")
	loop := r.status.Loop("agent.renew")
	loop.Doing("waiting")
	loop.Success("3 tasks")
	loop.Failure(errors.New("connection reset"))
	r.status.Section("tasks", func() any { return []string{"a"} })
	r.status.SetNotReady("draining", "x")

	_, body := r.get(t, "/statusz")
	var got page
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	if len(got.Loops) != 1 {
		t.Fatalf("loops = %+v, want one", got.Loops)
	}
	l := got.Loops[0]
	if l.Since.IsZero() || l.LastSuccess.IsZero() || l.LastErrorAt.IsZero() {
		t.Errorf("a time is missing: %+v", l)
	}
	l.Since, l.LastSuccess, l.LastErrorAt = time.Time{}, time.Time{}, time.Time{}
	want := LoopState{Name: "agent.renew", Doing: "waiting", Rounds: 1, Note: "3 tasks", LastError: "connection reset"}
	if diff := cmp.Diff(want, l); diff != "" {
		t.Errorf("loop (-want +got):\n%s", diff)
	}
	if got.Ready || got.PID == 0 || got.Version != "v1" || got.Sections["tasks"] == nil {
		t.Errorf("page = %+v", got)
	}
}

func TestTokenGuardsAllButTheProbes(t *testing.T) {
	t.Parallel()
	r := setup(t, "hunter2")
	none := func(req *http.Request) { req.Header.Del("Authorization") }
	wrong := func(req *http.Request) { req.Header.Set("Authorization", "Bearer hunter3") }
	for _, path := range []string{"/metrics", "/statusz", "/debug/pprof/", "/debug/pprof/cmdline"} {
		if code, _ := r.get(t, path); code != http.StatusOK {
			t.Errorf("GET %s with the token = %d, want 200", path, code)
		}
		if code, _ := r.get(t, path, none); code != http.StatusUnauthorized {
			t.Errorf("GET %s without token = %d, want 401", path, code)
		}
		if code, _ := r.get(t, path, wrong); code != http.StatusUnauthorized {
			t.Errorf("GET %s with a wrong token = %d, want 401", path, code)
		}
	}
	for _, path := range []string{"/healthz", "/readyz"} {
		if code, _ := r.get(t, path, none); code != http.StatusOK {
			t.Errorf("GET %s without token = %d, want 200", path, code)
		}
	}
}

func TestWithoutTokenForeignHostNamesAreRefused(t *testing.T) {
	t.Parallel()
	r := setup(t, "")
	for host, want := range map[string]int{
		"localhost:9100": http.StatusOK, "127.0.0.1": http.StatusOK, "[::1]:9100": http.StatusOK, "[::1]": http.StatusOK,
		"evil.example": http.StatusForbidden, "evil.example:9100": http.StatusForbidden,
	} {
		if code, _ := r.get(t, "/statusz", func(req *http.Request) { req.Host = host }); code != want {
			t.Errorf("Host %s = %d, want %d", host, code, want)
		}
	}
}

func TestOpenAddressNeedsAToken(t *testing.T) {
	t.Parallel()
	if _, err := New(Config{Addr: ":9100"}, Deps{}); err == nil || !strings.Contains(err.Error(), "MILLRACE_OPS_ADDR") {
		t.Errorf("New = %v, want an error that names the variable", err)
	}
	if _, err := New(Config{Addr: ":9100", Token: "t"}, Deps{}); err != nil {
		t.Errorf("New with a token = %v", err)
	}
}

func TestOffOnlyWaits(t *testing.T) {
	t.Parallel()
	srv, err := New(Config{}, Deps{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- srv.Run(ctx) }()
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
	if _, err := srv.Addr(ctx); err == nil {
		t.Error("a server that is off has an address")
	}
}

func TestPortInUse(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	srv, err := New(Config{Addr: l.Addr().String()}, Deps{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	err = srv.Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "MILLRACE_OPS_ADDR="+l.Addr().String()) {
		t.Errorf("Run = %v, want an error that names the variable and the address", err)
	}
}
