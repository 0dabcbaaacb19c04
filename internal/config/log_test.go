package config

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"strings"
	"testing"
)

func TestNewLogger(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	log := Log{Level: slog.LevelWarn, Format: LogJSON}.NewLogger(&out)
	log.Info("left out")
	log.Warn("kept")
	var line map[string]any
	if err := json.Unmarshal(out.Bytes(), &line); err != nil {
		t.Fatalf("%v: %s", err, out.String())
	}
	if line["msg"] != "kept" {
		t.Errorf("line = %v", line)
	}
	out.Reset()
	Log{}.NewLogger(&out).Info("hello")
	if !strings.Contains(out.String(), "msg=hello") {
		t.Errorf("text line = %s", out.String())
	}
}
