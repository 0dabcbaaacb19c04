package deptest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestEveryDependencyIsExplained: a dependency is a promise for years, so it has a line that says why it was given.
func TestEveryDependencyIsExplained(t *testing.T) {
	t.Parallel()
	root := filepath.Join("..", "..")
	raw, err := os.ReadFile(filepath.Join(root, "docs", "dependencies.md"))
	if err != nil {
		t.Fatal(err)
	}
	explained := map[string]bool{}
	for line := range strings.Lines(string(raw)) {
		if cells := strings.Split(line, "|"); len(cells) > 2 {
			if name := strings.TrimSpace(cells[1]); strings.HasPrefix(name, "`") {
				explained[strings.Trim(name, "`")] = true
			}
		}
	}
	wanted := append(directModules(t, filepath.Join(root, "go.mod")), toolModules(t, filepath.Join(root, "internal", "tools", "go.mod"))...)
	if len(wanted) < 10 {
		t.Fatalf("only %d direct dependencies found: %v", len(wanted), wanted)
	}
	for _, m := range wanted {
		if !explained[m] {
			t.Errorf("docs/dependencies.md has no line for %s: say what for, why this one, its licence and what leaving it takes", m)
		}
		delete(explained, m)
	}
	for m := range explained {
		t.Errorf("docs/dependencies.md explains %s, which is not a direct dependency (any more)", m)
	}
}

// directModules are those that a go.mod requires and does not call indirect.
func directModules(t *testing.T, file string) []string {
	t.Helper()
	var out []string
	for _, line := range modLines(t, file) {
		if fields := strings.Fields(line); len(fields) == 2 && strings.HasPrefix(fields[1], "v") {
			out = append(out, fields[0])
		}
	}
	return out
}

// toolModules are the modules of the packages in the tool block of a go.mod.
func toolModules(t *testing.T, file string) []string {
	t.Helper()
	var modules, out []string
	tools := map[string]bool{}
	for _, line := range modLines(t, file) {
		fields := strings.Fields(line)
		switch {
		case len(fields) == 1 && strings.Contains(fields[0], "/"):
			tools[fields[0]] = true
		case len(fields) >= 2 && strings.HasPrefix(fields[1], "v"):
			modules = append(modules, fields[0])
		}
	}
	for _, m := range modules {
		for tool := range tools {
			if within(tool, m) {
				out = append(out, m)
				delete(tools, tool)
			}
		}
	}
	for tool := range tools {
		t.Errorf("%s: no module provides the tool %s", file, tool)
	}
	return out
}

// modLines are the lines inside the blocks of a go.mod.
func modLines(t *testing.T, file string) []string {
	t.Helper()
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for line := range strings.Lines(string(raw)) {
		if strings.HasPrefix(line, "\t") {
			out = append(out, line)
		}
	}
	return out
}
