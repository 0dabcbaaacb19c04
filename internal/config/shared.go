package config

import (
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"time"
)

// Redis says where Redis is and how to begin with it.
type Redis struct {
	URL       string        `env:"REDIS_URL" envDefault:"redis://127.0.0.1:6379/0" help:"Redis to use: redis://, rediss:// (TLS) or unix://"`
	Namespace string        `env:"NAMESPACE" help:"prefix of every key, so that several systems can share a Redis; empty for none"`
	WaitRedis time.Duration `env:"WAIT_REDIS" envDefault:"5m" help:"how long to wait at start for a Redis that cannot be reached; 0 fails at once"`
	Strict    bool          `env:"STRICT" envDefault:"false" help:"refuse a Redis whose settings can lose tasks, instead of warning"`
}

var namespacePattern = regexp.MustCompile(`^[a-z0-9_-]{1,64}$`)

// Validate reports every setting that cannot work.
func (r Redis) Validate() error {
	var errs []error
	if err := checkRedisURL(r.URL); err != nil {
		errs = append(errs, fmt.Errorf("%sREDIS_URL=%s: %w", Prefix, RedactURL(r.URL), err))
	}
	if r.Namespace != "" && !namespacePattern.MatchString(r.Namespace) {
		errs = append(errs, fmt.Errorf("%sNAMESPACE=%q: use 1 to 64 of a-z, 0-9, _ and -", Prefix, r.Namespace))
	}
	errs = append(errs, checkDuration(Prefix+"WAIT_REDIS", r.WaitRedis, true))
	return errors.Join(errs...)
}

func checkRedisURL(raw string) error {
	u, err := url.Parse(raw)
	if err != nil {
		// The error of url.Parse quotes the URL, password and all.
		return errors.New("not a URL; write redis://host:6379/0")
	}
	switch u.Scheme {
	case "redis", "rediss":
		if u.Hostname() == "" {
			return errors.New("the host is missing; write " + u.Scheme + "://host:6379/0")
		}
	case "unix":
		if u.Path == "" {
			return errors.New("the path is missing; write unix:///run/redis.sock?db=0")
		}
	default:
		return errors.New("the scheme must be redis, rediss or unix; write redis://host:6379/0")
	}
	return nil
}

// Timing holds the times that decide when a worker counts as dead. They must
// be the same for all services of a namespace.
type Timing struct {
	HeartbeatInterval time.Duration `env:"HEARTBEAT_INTERVAL" envDefault:"10s" help:"how often an agent renews its heartbeat and its tasks"`
	HeartbeatTTL      time.Duration `env:"HEARTBEAT_TTL" envDefault:"30s" help:"a worker silent for this long may be declared dead; at least three intervals"`
	LeaseTTL          time.Duration `env:"LEASE_TTL" envDefault:"120s" help:"a task not renewed for this long is taken from a living worker; at least two heartbeat lifetimes"`
	ScanInterval      time.Duration `env:"SCAN_INTERVAL" envDefault:"5s" help:"how often a reaper looks for dead workers"`
	HoldLimit         time.Duration `env:"HOLD_LIMIT" envDefault:"2m" help:"how long an agent keeps its tasks running while Redis is down for all; 0 for not at all"`
}

// Validate reports times that cannot work, alone or together.
func (t Timing) Validate() error {
	errs := []error{
		checkDuration(Prefix+"HEARTBEAT_INTERVAL", t.HeartbeatInterval, false),
		checkDuration(Prefix+"HEARTBEAT_TTL", t.HeartbeatTTL, false),
		checkDuration(Prefix+"LEASE_TTL", t.LeaseTTL, false),
		checkDuration(Prefix+"SCAN_INTERVAL", t.ScanInterval, false),
		checkDuration(Prefix+"HOLD_LIMIT", t.HoldLimit, true),
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	// Two heartbeats may get lost before a worker looks dead.
	if t.HeartbeatTTL/3 < t.HeartbeatInterval {
		errs = append(errs, fmt.Errorf("%[1]sHEARTBEAT_TTL=%[2]v: must be at least three times %[1]sHEARTBEAT_INTERVAL=%[3]v",
			Prefix, t.HeartbeatTTL, t.HeartbeatInterval))
	}
	// A lease that ended with the heartbeat would take tasks from the living.
	if t.LeaseTTL/2 < t.HeartbeatTTL {
		errs = append(errs, fmt.Errorf("%[1]sLEASE_TTL=%[2]v: must be at least twice %[1]sHEARTBEAT_TTL=%[3]v",
			Prefix, t.LeaseTTL, t.HeartbeatTTL))
	}
	return errors.Join(errs...)
}

// Ops says where a service shows its health and metrics.
type Ops struct {
	Addr string `env:"OPS_ADDR" help:"address for /healthz, /readyz, /metrics, /statusz and /debug/pprof, such as 127.0.0.1:9100; empty for off"`
}

// Auth holds the token that clients, agents and services show each other.
type Auth struct {
	Token Secret `env:"TOKEN" secret:"true" help:"shared token; without one only loopback addresses are listened on"`
}
