package agent

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	claimed  prometheus.Counter
	ended    *prometheus.CounterVec
	renewals *prometheus.CounterVec
	refused  prometheus.Counter
	released prometheus.Counter
	fenced   prometheus.Counter
	slots    prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "millrace", Subsystem: "agent", Name: name, Help: help})
	}
	vec := func(name, help, label string, values ...string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "millrace", Subsystem: "agent", Name: name, Help: help}, []string{label})
		for _, x := range values {
			v.WithLabelValues(x)
		}
		return v
	}
	m := &metrics{
		claimed:  counter("attempts_started_total", "Attempts that were claimed."),
		ended:    vec("attempts_ended_total", "Attempts that ended, by reason.", "reason", "none", "exit", "signal", "timeout", "cancelled", "refused"),
		renewals: vec("renewals_total", "Renewals by outcome.", "outcome", "redis", "dispatcher", "failed"),
		refused:  counter("outcomes_refused_total", "Outcomes that Redis refused, because the attempt was no longer ours."),
		released: counter("attempts_released_total", "Attempts given back."),
		fenced:   counter("fenced_total", "Times this agent was declared dead and went on under a new id."),
		slots:    prometheus.NewGauge(prometheus.GaugeOpts{Namespace: "millrace", Subsystem: "agent", Name: "slots", Help: "Tasks that run at once."}),
	}
	if reg != nil {
		reg.MustRegister(m.claimed, m.ended, m.renewals, m.refused, m.released, m.fenced, m.slots)
	}
	return m
}
