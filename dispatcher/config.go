package dispatcher

import (
	"errors"
	"fmt"
	"time"

	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/hold"
)

// Config of a dispatcher, read from MILLRACE_*.
type Config struct {
	config.Redis
	config.Timing
	config.Auth
	config.Ops
	config.Log

	// HTTPAddr serves the API.
	HTTPAddr string `env:"HTTP_ADDR" envDefault:"127.0.0.1:8080" help:"address of the API; :0 picks a free port"`
	// ControlAddr takes the agents' control connections.
	ControlAddr string `env:"CONTROL_ADDR" envDefault:"127.0.0.1:9000" help:"address for the agents' control connections; :0 picks a free port"`
	// AdvertiseAddr is what agents dial; derived from ControlAddr and the host name when empty.
	AdvertiseAddr string `env:"ADVERTISE_ADDR" help:"host:port at which agents reach the control address; derived when empty"`
	// TaskLimit is the largest task in bytes.
	TaskLimit int `env:"TASK_LIMIT" envDefault:"262144" help:"largest task in bytes"`
	// MemoryLimit is the share of Redis' maxmemory from which on no task is admitted.
	MemoryLimit float64 `env:"MEMORY_LIMIT" envDefault:"0.8" help:"share of Redis' maxmemory from which on no task is admitted"`
	// ResultsAge is how long results stay in their stream after every group has read them.
	ResultsAge time.Duration `env:"RESULTS_AGE" envDefault:"60s" help:"how long results stay in their stream once every group has read them"`
}

// Validate reports every setting that cannot work.
func (c Config) Validate() error {
	var errs []error
	errs = append(errs,
		config.CheckListen(config.Prefix+"HTTP_ADDR", c.HTTPAddr, c.Token),
		config.CheckListen(config.Prefix+"CONTROL_ADDR", c.ControlAddr, c.Token))
	if c.TaskLimit < 1024 || c.TaskLimit > 64<<20 {
		errs = append(errs, fmt.Errorf("%sTASK_LIMIT=%d: use 1024 to 67108864 bytes", config.Prefix, c.TaskLimit))
	}
	if c.MemoryLimit <= 0 || c.MemoryLimit > 1 {
		errs = append(errs, fmt.Errorf("%sMEMORY_LIMIT=%v: use a share above 0 and up to 1", config.Prefix, c.MemoryLimit))
	}
	if c.ResultsAge < time.Second {
		errs = append(errs, fmt.Errorf("%sRESULTS_AGE=%v: use 1s or more", config.Prefix, c.ResultsAge))
	}
	return errors.Join(errs...)
}

// rules of holding, as far as a dispatcher needs them.
func (c Config) rules() hold.Rules {
	return hold.Rules{TTL: c.HeartbeatTTL, Interval: c.HeartbeatInterval, Limit: c.HoldLimit, Vouch: hold.Vouch}
}
