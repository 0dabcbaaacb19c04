package reaper

import "github.com/millrace/millrace/internal/config"

// Config of a reaper, read from MILLRACE_*.
type Config struct {
	config.Redis
	config.Timing
	config.Auth
	config.Ops
	config.Log
}

// Validate has nothing to add to what its parts check.
func (c Config) Validate() error { return nil }
