package logship

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	chunks   prometheus.Counter
	bytes    prometheus.Counter
	spooled  prometheus.Counter
	dropped  prometheus.Counter
	failures prometheus.Counter
	full     prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
		if reg != nil {
			reg.MustRegister(c)
		}
		return c
	}
	return &metrics{
		chunks:   counter("millrace_agent_log_chunks_total", "Log chunks that Redis accepted."),
		bytes:    counter("millrace_agent_log_bytes_total", "Bytes of log chunks that Redis accepted, as sent."),
		spooled:  counter("millrace_agent_log_spooled_bytes_total", "Bytes written to the local log spool."),
		dropped:  counter("millrace_agent_log_dropped_bytes_total", "Bytes of output left out because of a limit."),
		failures: counter("millrace_agent_log_append_failures_total", "Appends to a log stream that ended with an error."),
		full:     counter("millrace_agent_log_shard_full_total", "Appends that a full log stream did not take completely."),
	}
}
