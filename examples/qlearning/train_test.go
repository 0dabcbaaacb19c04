// Package qlearning_test holds the training example to what its README promises: programs of users are told to
// behave like it.
package qlearning_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// python returns a python3 command that runs the training with its checkpoint in dir.
func python(t *testing.T, dir string, args ...string) *exec.Cmd {
	t.Helper()
	path, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("python3 is not installed: the training example cannot be tried")
	}
	cmd := exec.CommandContext(t.Context(), path, append([]string{"train.py"}, args...)...)
	cmd.Env = append(os.Environ(), "MILLRACE_CHECKPOINT_DIR="+dir)
	return cmd
}

// checkpoint reads what a training left behind, without the times that differ from run to run.
func checkpoint(t *testing.T, dir string) map[string]any {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, "checkpoint.json"))
	if err != nil {
		t.Fatal(err)
	}
	var state map[string]any
	if err := json.Unmarshal(raw, &state); err != nil {
		t.Fatalf("checkpoint is not whole: %v", err)
	}
	delete(state, "spent")
	return state
}

func TestLearns(t *testing.T) {
	t.Parallel()
	out, err := python(t, t.TempDir(), "--episodes", "60000", "--size", "10").CombinedOutput()
	if err != nil {
		t.Fatalf("training: %v\n%s", err, out)
	}
	if !strings.Contains(string(out), "learned.") {
		t.Errorf("no word of success in:\n%s", out)
	}
}

func TestSaysWhenItDidNotLearn(t *testing.T) {
	t.Parallel()
	out, err := python(t, t.TempDir(), "--episodes", "10").CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != 1 {
		t.Fatalf("10 episodes: %v, want exit code 1\n%s", err, out)
	}
}

func TestResumesToTheSameResult(t *testing.T) {
	t.Parallel()
	args := []string{"--episodes", "60000", "--size", "10", "--report", "100"}
	whole, cut := t.TempDir(), t.TempDir()
	if out, err := python(t, whole, args...).CombinedOutput(); err != nil {
		t.Fatalf("uninterrupted training: %v\n%s", err, out)
	}
	interrupt(t, python(t, cut, args...))
	out, err := python(t, cut, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("resumed training: %v\n%s", err, out)
	}
	if !strings.Contains(string(out), "resumed from") {
		t.Errorf("second start does not say that it resumed:\n%s", out)
	}
	if diff := cmp.Diff(checkpoint(t, whole), checkpoint(t, cut)); diff != "" {
		t.Errorf("interrupted training ended differently (-uninterrupted +interrupted):\n%s", diff)
	}
}

// interrupt starts a training, sends it SIGTERM after its third report, and expects a saved state and exit code 143.
func interrupt(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(stdout)
	for reports := 0; reports < 3 && lines.Scan(); {
		if strings.HasPrefix(lines.Text(), "episode") {
			reports++
		}
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, stdout); err != nil {
		t.Fatal(err)
	}
	err = cmd.Wait()
	if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != 143 {
		t.Fatalf("after SIGTERM: %v, want exit code 143", err)
	}
}
