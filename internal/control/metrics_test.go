package control

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

func TestMetricsAreSharedAndStartAtZero(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	first, second := newMetrics(reg, sideClient), newMetrics(reg, sideClient)
	newMetrics(reg, sideServer)
	newMetrics(nil, sideServer).opened.Inc()
	first.opened.Inc()
	second.opened.Inc()
	second.frameIn(Type(99))
	second.frameIn(TypeRing)
	for _, tt := range []struct {
		want   float64
		name   string
		labels []string
	}{
		{2, "connections_opened_total", []string{sideClient}},
		{0, "connections_opened_total", []string{sideServer}},
		{1, "frames_total", []string{sideClient, "in", "unknown"}},
		{1, "frames_total", []string{sideClient, "in", "ring"}},
	} {
		if got := metric(t, reg, tt.name, tt.labels...); got != tt.want {
			t.Errorf("%s%v = %v, want %v", tt.name, tt.labels, got, tt.want)
		}
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if len(families) != 8 {
		t.Errorf("%d families from the start, want 8", len(families))
	}
}
