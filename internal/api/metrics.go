package api

import (
	"context"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"
)

// metrics of the API; it is also the interceptor that feeds them.
type metrics struct {
	calls   *prometheus.CounterVec
	seconds *prometheus.HistogramVec
	started *prometheus.CounterVec
	refused prometheus.Counter
	panics  prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		calls: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "millrace_api_calls_total", Help: "API calls that ended, by method and result.",
		}, []string{"method", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "millrace_api_call_seconds", Help: "Time of API calls that do not wait by their nature.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5},
		}, []string{"method"}),
		started: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "millrace_api_started_calls_total", Help: "API calls that began, by method.",
		}, []string{"method"}),
		refused: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "millrace_api_refused_requests_total", Help: "Requests without a valid token or for a foreign host name.",
		}),
		panics: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "millrace_api_panics_total", Help: "API calls that panicked.",
		}),
	}
	if reg != nil {
		reg.MustRegister(m.calls, m.seconds, m.started, m.refused, m.panics)
	}
	return m
}

// WrapUnary counts and times calls.
func (m *metrics) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		method := methodName(req.Spec())
		m.started.WithLabelValues(method).Inc()
		bodyArrived(ctx)
		begin := time.Now()
		resp, err := next(ctx, req)
		if method != "WaitTask" {
			m.seconds.WithLabelValues(method).Observe(time.Since(begin).Seconds())
		}
		m.calls.WithLabelValues(method, codeWord(err)).Inc()
		return resp, err
	}
}

// WrapStreamingClient is not used on a server.
func (m *metrics) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler counts streams.
func (m *metrics) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		method := methodName(conn.Spec())
		m.started.WithLabelValues(method).Inc()
		err := next(ctx, conn)
		m.calls.WithLabelValues(method, codeWord(err)).Inc()
		return err
	}
}

func methodName(s connect.Spec) string {
	return s.Procedure[strings.LastIndexByte(s.Procedure, '/')+1:]
}

func codeWord(err error) string {
	if err == nil {
		return "ok"
	}
	return connect.CodeOf(err).String()
}
