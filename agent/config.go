package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/hold"
	"github.com/millrace/millrace/internal/spec"
)

// Config of an agent, read from MILLRACE_*.
type Config struct {
	config.Redis
	config.Timing
	config.Auth
	config.Ops
	config.Log

	// Name is the first part of the worker id.
	Name string `env:"AGENT_NAME" help:"first part of the worker id; the host name when empty"`
	// Queues are served, all with the same right.
	Queues []string `env:"QUEUES" envDefault:"default" help:"queues to serve, separated by commas"`
	// Slots is how many tasks run at once; 0 means one per CPU.
	Slots int `env:"SLOTS" envDefault:"0" help:"how many tasks run at once; 0 for one per CPU"`
	// StateDir holds work and checkpoint directories and log spools. Agents may share it.
	StateDir string `env:"STATE_DIR" help:"directory for working directories, checkpoints and unsent logs; chosen by user when empty"`
	// DrainTimeout is how long running tasks may go on after SIGTERM before they are given back.
	DrainTimeout time.Duration `env:"DRAIN_TIMEOUT" envDefault:"1m" help:"how long running tasks may go on after SIGTERM before they are handed to another agent"`
	// KeepWork is how long the working directory of a failed attempt is kept.
	KeepWork time.Duration `env:"KEEP_WORK" envDefault:"24h" help:"how long the working directory of a failed attempt is kept"`
	// LogLimit is kept of an attempt's output when the task does not say.
	LogLimit int64 `env:"LOG_LIMIT" envDefault:"268435456" help:"bytes kept of an attempt's output, head and tail, unless the task says otherwise"`
	// SpoolLimit bounds unsent logs on disk.
	SpoolLimit int64 `env:"SPOOL_LIMIT" envDefault:"4294967296" help:"bytes of unsent logs on disk, while Redis cannot take them"`
}

// ConfigFromEnv reads MILLRACE_* over the defaults, and reports every problem at once.
func ConfigFromEnv() (Config, error) {
	var c Config
	err := config.Load(&c)
	return c, err
}

// Validate reports every setting that cannot work.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf(config.Prefix+format, args...))
	}
	if len(c.Queues) == 0 {
		bad("QUEUES is empty: name at least one, such as default")
	}
	for _, q := range c.Queues {
		if !spec.ValidQueue(q) {
			bad("QUEUES=%q: a queue is 1 to 64 of a-z, 0-9, _ and -", q)
		}
	}
	if c.Slots < 0 || c.Slots > maxSlots {
		bad("SLOTS=%d: use 1 to %d, or 0 for one per CPU", c.Slots, maxSlots)
	}
	if c.Name != "" && (!spec.ValidID(c.Name) || len(c.Name) > maxName) {
		bad("AGENT_NAME=%q: use 1 to %d of A-Z a-z 0-9 . _ -, not starting with a dot", c.Name, maxName)
	}
	if c.DrainTimeout < 0 {
		bad("DRAIN_TIMEOUT=%v: use 0 or more", c.DrainTimeout)
	}
	if c.KeepWork < 0 {
		bad("KEEP_WORK=%v: use 0 or more", c.KeepWork)
	}
	if c.LogLimit < 4096 {
		bad("LOG_LIMIT=%d: use at least 4096 bytes", c.LogLimit)
	}
	if c.SpoolLimit < 1<<20 {
		bad("SPOOL_LIMIT=%d: use at least 1048576 bytes", c.SpoolLimit)
	}
	return errors.Join(errs...)
}

const (
	maxSlots = 10000
	maxName  = 100 // leaves room for the random part of the worker id
)

// filled returns the configuration with what was left to us.
func (c Config) filled() Config {
	if c.Slots == 0 {
		c.Slots = runtime.NumCPU()
	}
	if c.Name == "" {
		c.Name = "agent"
		if h, err := os.Hostname(); err == nil && spec.ValidID(h) && len(h) <= maxName {
			c.Name = h
		}
	}
	if c.StateDir == "" {
		c.StateDir = DefaultStateDir()
	}
	return c
}

// DefaultStateDir is where an agent of this user keeps its state.
func DefaultStateDir() string {
	if os.Geteuid() == 0 {
		return "/var/lib/millrace"
	}
	if d := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(d) {
		return filepath.Join(d, "millrace")
	}
	if h, err := os.UserHomeDir(); err == nil && filepath.IsAbs(h) {
		return filepath.Join(h, ".local", "state", "millrace")
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("millrace-%d", os.Geteuid()))
}

// margin is how long before a worker could be declared dead its tasks are dead by our own hand.
func (c Config) margin() time.Duration {
	return min(5*time.Second, c.HeartbeatTTL/6)
}

func (c Config) rules() hold.Rules {
	return hold.Rules{TTL: c.HeartbeatTTL, Interval: c.HeartbeatInterval, Margin: c.margin(), Limit: c.HoldLimit, Vouch: hold.Vouch}
}
