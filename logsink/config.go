package logsink

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/ops"
	"github.com/millrace/millrace/internal/store"
)

// Config of a Service.
type Config struct {
	// Dir is where logs are kept: <dir>/<date>/<task id>/<attempt>.log. Logsinks of a namespace share it.
	Dir string `env:"LOG_DIR" envDefault:"logs" help:"directory of the logs; several logsinks of a namespace must share it"`
	// Addr is where logs can be read from over HTTP.
	Addr string `env:"LOGSINK_ADDR" envDefault:"127.0.0.1:8090" help:"address on which dispatchers read logs"`
	// Advertise is the address that dispatchers are told; the one listened on when empty.
	Advertise string `env:"LOGSINK_ADVERTISE_ADDR" help:"host:port under which dispatchers reach the log reader; what it listens on when empty"`
	// Retention deletes logs this long after their last byte; 0 keeps them.
	Retention time.Duration `env:"LOG_RETENTION" envDefault:"720h" help:"how long a log is kept after its last byte; 0 for ever"`
	// MaxBytes deletes the oldest ended logs while all of them are larger; 0 for no limit.
	MaxBytes int64 `env:"LOG_MAX_BYTES" envDefault:"0" help:"total size of all logs above which the oldest are deleted; 0 for no limit"`
	// OpenLogs is how many logs are kept open beyond those in use.
	OpenLogs int `env:"LOG_OPEN_FILES" envDefault:"256" help:"how many logs are kept open, two files each"`
	// LeaseTTL is how long a shard waits for a logsink that died.
	LeaseTTL time.Duration `env:"LOGSINK_LEASE_TTL" envDefault:"10s" help:"after this time without renewal another logsink takes a log shard over"`
	// Token is asked of readers; without one anybody who reaches Addr can read.
	Token config.Secret `env:"-"`
}

// Validate returns everything that is wrong with c.
func (c Config) Validate() error {
	var errs []error
	if c.Dir == "" {
		errs = append(errs, errors.New("MILLRACE_LOG_DIR is empty: set it to the directory for logs"))
	}
	if c.Retention < 0 {
		errs = append(errs, fmt.Errorf("MILLRACE_LOG_RETENTION=%v: must not be negative", c.Retention))
	}
	if c.MaxBytes < 0 {
		errs = append(errs, fmt.Errorf("MILLRACE_LOG_MAX_BYTES=%d: must not be negative", c.MaxBytes))
	}
	if c.OpenLogs < 1 {
		errs = append(errs, fmt.Errorf("MILLRACE_LOG_OPEN_FILES=%d: must be at least 1", c.OpenLogs))
	}
	if c.LeaseTTL < 300*time.Millisecond {
		errs = append(errs, fmt.Errorf("MILLRACE_LOGSINK_LEASE_TTL=%v: must be at least 300ms", c.LeaseTTL))
	}
	return errors.Join(errs...)
}

// Deps are what a Service works with.
type Deps struct {
	Store *store.Store
	// Logger may be nil.
	Logger *slog.Logger
	// Registerer may be nil.
	Registerer prometheus.Registerer
	// Status may be nil.
	Status *ops.Status
}

type metrics struct {
	chunks   prometheus.Counter
	bytes    prometheus.Counter
	rejected *prometheus.CounterVec
	missing  prometheus.Counter
	failures prometheus.Counter
	deleted  prometheus.Counter
	syncs    prometheus.Histogram
	readers  prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		chunks:   prometheus.NewCounter(prometheus.CounterOpts{Name: "millrace_logsink_chunks_total", Help: "Log chunks written and acknowledged."}),
		bytes:    prometheus.NewCounter(prometheus.CounterOpts{Name: "millrace_logsink_bytes_total", Help: "Bytes of output written, before packing."}),
		rejected: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "millrace_logsink_rejected_total", Help: "Chunks that were not written, by reason."}, []string{"reason"}),
		missing:  prometheus.NewCounter(prometheus.CounterOpts{Name: "millrace_logsink_missing_bytes_total", Help: "Bytes of output that never came."}),
		failures: prometheus.NewCounter(prometheus.CounterOpts{Name: "millrace_logsink_write_failures_total", Help: "Batches that could not be written or synced."}),
		deleted:  prometheus.NewCounter(prometheus.CounterOpts{Name: "millrace_logsink_deleted_total", Help: "Logs deleted for their age or the total size."}),
		syncs:    prometheus.NewHistogram(prometheus.HistogramOpts{Name: "millrace_logsink_sync_seconds", Help: "Time to make a batch safe on disk.", Buckets: prometheus.ExponentialBuckets(0.0005, 4, 8)}),
		readers:  prometheus.NewGauge(prometheus.GaugeOpts{Name: "millrace_logsink_readers", Help: "Reads under way."}),
	}
	for _, reason := range []string{"undecodable", "bad_name", "not_owner", "no_record"} {
		m.rejected.WithLabelValues(reason)
	}
	if reg != nil {
		reg.MustRegister(m.chunks, m.bytes, m.rejected, m.missing, m.failures, m.deleted, m.syncs, m.readers)
	}
	return m
}
