package store

import "github.com/redis/go-redis/v9/maintnotifications"

// maintOff switches off a handshake that only managed servers know.
func maintOff() *maintnotifications.Config {
	return &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
}
