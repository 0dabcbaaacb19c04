package config

import (
	"fmt"
	"io"
	"log/slog"
)

// Log says how a service logs.
type Log struct {
	Level  slog.Level `env:"LOG_LEVEL" envDefault:"info" help:"lowest level to log: debug, info, warn or error"`
	Format LogFormat  `env:"LOG_FORMAT" envDefault:"text" help:"form of a log line: text or json"`
}

// LogFormat is the form of a log line.
type LogFormat string

// The log formats.
const (
	LogText LogFormat = "text"
	LogJSON LogFormat = "json"
)

// UnmarshalText reads "text" or "json".
func (f *LogFormat) UnmarshalText(text []byte) error {
	switch got := LogFormat(text); got {
	case LogText, LogJSON:
		*f = got
		return nil
	default:
		return fmt.Errorf("must be %s or %s", LogText, LogJSON)
	}
}

// NewLogger returns a logger that writes to w as l says. Each service adds its
// name as the component.
func (l Log) NewLogger(w io.Writer) *slog.Logger {
	opts := &slog.HandlerOptions{Level: l.Level}
	var handler slog.Handler = slog.NewTextHandler(w, opts)
	if l.Format == LogJSON {
		handler = slog.NewJSONHandler(w, opts)
	}
	return slog.New(handler)
}
