package ops

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

func (s *Server) routes(metrics prometheus.Gatherer) http.Handler {
	open := http.NewServeMux() // no token: probes have none, and learn little
	open.HandleFunc("GET /healthz", s.healthz)
	open.HandleFunc("GET /readyz", s.readyz)

	closed := http.NewServeMux()
	if metrics != nil {
		closed.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{}))
	}
	closed.HandleFunc("GET /statusz", s.statusz)
	closed.HandleFunc("/debug/pprof/", pprof.Index)
	closed.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	closed.HandleFunc("/debug/pprof/profile", pprof.Profile)
	closed.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	closed.HandleFunc("/debug/pprof/trace", pprof.Trace)
	closed.HandleFunc("GET /{$}", index)

	open.Handle("/", s.authorize(closed))
	return open
}

// authorize asks for the token when there is one. Without, the server listens
// on loopback only, and what must be kept out is a web page in a local browser
// whose host name was made to resolve to 127.0.0.1.
func (s *Server) authorize(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s.cfg.Token == "" {
			if !isLocalHost(r.Host) {
				http.Error(w, "without a token this server answers only to 127.0.0.1, [::1] and localhost", http.StatusForbidden)
				return
			}
			next.ServeHTTP(w, r)
			return
		}
		given, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		if !ok || !s.cfg.Token.Equal(given) {
			w.Header().Set("WWW-Authenticate", `Bearer realm="millrace"`)
			http.Error(w, "send the token: Authorization: Bearer <MILLRACE_TOKEN>", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func isLocalHost(hostport string) bool {
	host := hostport
	if h, _, err := net.SplitHostPort(hostport); err == nil {
		host = h
	}
	if host == "localhost" {
		return true
	}
	_, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return err == nil
}

func index(w http.ResponseWriter, _ *http.Request) {
	fmt.Fprint(w, "/healthz\n/readyz\n/metrics\n/statusz\n/debug/pprof/\n")
}

// healthz says that the process runs and can answer.
func (s *Server) healthz(w http.ResponseWriter, _ *http.Request) {
	fmt.Fprintln(w, "ok")
}

// readyz says whether work can be taken, and if not, why: a reason a line.
func (s *Server) readyz(w http.ResponseWriter, _ *http.Request) {
	reasons := s.status.NotReady()
	if len(reasons) == 0 {
		fmt.Fprintln(w, "ready")
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(http.StatusServiceUnavailable)
	for _, reason := range reasons {
		fmt.Fprintln(w, reason)
	}
}

// page is the JSON of /statusz.
type page struct {
	Service    string         `json:"service"`
	Version    string         `json:"version"`
	PID        int            `json:"pid"`
	Now        time.Time      `json:"now"`
	Started    time.Time      `json:"started"`
	Goroutines int            `json:"goroutines"`
	Ready      bool           `json:"ready"`
	NotReady   []string       `json:"notReady,omitempty"`
	Loops      []LoopState    `json:"loops"`
	Sections   map[string]any `json:"sections,omitempty"`
}

// statusz shows what every loop is doing now.
func (s *Server) statusz(w http.ResponseWriter, _ *http.Request) {
	reasons := s.status.NotReady()
	body, err := json.MarshalIndent(page{
		Service:    s.cfg.Service,
		Version:    s.cfg.Version,
		PID:        os.Getpid(),
		Now:        time.Now(),
		Started:    s.status.Started(),
		Goroutines: runtime.NumGoroutine(),
		Ready:      len(reasons) == 0,
		NotReady:   reasons,
		Loops:      s.status.Loops(),
		Sections:   s.status.sectionValues(),
	}, "", "  ")
	if err != nil {
		http.Error(w, "statusz: "+err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(append(body, '\n')) // an error is the reader's: it has left
}
