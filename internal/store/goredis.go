package store

import (
	"context"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// maintOff switches off a handshake that only managed servers know.
func maintOff() *maintnotifications.Config {
	return &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
}

// silent drops what go-redis logs by itself: during an outage that is a flood of lines about dialling, and every error
// comes to the caller as well, who logs it at a limited rate.
type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

func init() { redis.SetLogger(silent{}) }
