package dispatcher

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	admitted  prometheus.Counter
	joined    prometheus.Counter
	rejected  *prometheus.CounterVec
	promoted  prometheus.Counter
	expired   prometheus.Counter
	cancelled prometheus.Counter
	renewed   *prometheus.CounterVec
	rings     prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "millrace", Subsystem: "dispatcher", Name: name, Help: help})
	}
	vec := func(name, help, label string, values ...string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "millrace", Subsystem: "dispatcher", Name: name, Help: help}, []string{label})
		for _, x := range values {
			v.WithLabelValues(x)
		}
		return v
	}
	m := &metrics{
		admitted:  counter("tasks_admitted_total", "Tasks that got a record."),
		joined:    counter("tasks_joined_total", "Submissions of a task that was there already."),
		rejected:  vec("tasks_rejected_total", "Entries moved to the dead letters, by code.", "code"),
		promoted:  counter("tasks_promoted_total", "Delayed tasks that became due."),
		expired:   counter("tasks_expired_total", "Tasks that were not started in time."),
		cancelled: counter("cancels_total", "Cancels that changed a task."),
		renewed:   vec("renewals_total", "Renewals on behalf of agents, by outcome.", "outcome", "renewed", "unreachable", "fenced"),
		rings:     counter("rings_total", "Agents told to fetch."),
	}
	if reg != nil {
		reg.MustRegister(m.admitted, m.joined, m.rejected, m.promoted, m.expired, m.cancelled, m.renewed, m.rings)
	}
	return m
}
