package reaper

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	declared, lost, buried, ghosts, repaired, events prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "millrace", Subsystem: "reaper", Name: name, Help: help})
	}
	m := &metrics{
		declared: counter("workers_declared_total", "Workers declared dead."),
		lost:     counter("attempts_lost_total", "Attempts moved on because their worker was dead."),
		buried:   counter("workers_buried_total", "Dead workers that were removed."),
		ghosts:   counter("ghosts_total", "Pending entries whose body was gone."),
		repaired: counter("records_repaired_total", "Records that no index or stream knew."),
		events:   counter("expired_events_total", "Expired heartbeats that Redis told of."),
	}
	if reg != nil {
		reg.MustRegister(m.declared, m.lost, m.buried, m.ghosts, m.repaired, m.events)
	}
	return m
}
