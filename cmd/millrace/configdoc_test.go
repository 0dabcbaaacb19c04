package main

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/agent"
	"github.com/millrace/millrace/dispatcher"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/reaper"
)

//go:generate go test -run TestConfigurationIsDocumented . -update-docs

var updateDocs = flag.Bool("update-docs", false, "write the tables of docs/configuration.md from the config structs")

const (
	variablesBegin = "<!-- variables: begin; written by go generate ./cmd/millrace -->\n"
	variablesEnd   = "<!-- variables: end -->\n"
)

// TestConfigurationIsDocumented holds the tables of docs/configuration.md to the structs that the services read.
func TestConfigurationIsDocumented(t *testing.T) {
	t.Parallel()
	file := filepath.Join("..", "..", "docs", "configuration.md")
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, found := strings.Cut(string(raw), variablesBegin)
	got, tail, ended := strings.Cut(rest, variablesEnd)
	if !found || !ended {
		t.Fatalf("%s has lost its marks %q and %q", file, variablesBegin, variablesEnd)
	}
	want := variableTables(t)
	if *updateDocs {
		if err := os.WriteFile(file, []byte(head+variablesBegin+want+variablesEnd+tail), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s is not what the services read (-services +file); run go generate ./cmd/millrace:\n%s", file, diff)
	}
}

func variableTables(t *testing.T) string {
	t.Helper()
	var b bytes.Buffer
	for _, s := range []struct {
		title string
		cfg   any
	}{
		{"dispatcher", dispatcher.Config{}}, {"agent", agent.Config{}}, {"reaper", reaper.Config{}}, {"logsink", logsinkConfig{}},
	} {
		b.WriteByte('\n')
		if err := config.Markdown(&b, s.title, s.cfg); err != nil {
			t.Fatal(err)
		}
	}
	b.WriteByte('\n')
	return b.String()
}
