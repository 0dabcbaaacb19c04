package agent

import (
	"bufio"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/millrace/millrace/internal/guard"
)

// home is the part of the state directory that one agent at a time holds: <state>/<name>-<n>, the first n that is
// free, with an exclusive lock. The guard shares the lock, so that it is free only when every process tree is gone;
// therefore its holder knows that the workers named in it are dead.
type home struct {
	root string // the state directory, shared
	dir  string // ours alone
	lock *os.File
}

// maxHomes bounds the search for a free directory.
const maxHomes = 10000

func openHome(state, name string) (*home, error) {
	if err := os.MkdirAll(state, 0o755); err != nil {
		return nil, fmt.Errorf("state directory: %w: set MILLRACE_STATE_DIR to one that can be written", err)
	}
	for n := range maxHomes {
		dir := filepath.Join(state, fmt.Sprintf("%s-%d", name, n))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("state directory: %w: set MILLRACE_STATE_DIR to one that can be written", err)
		}
		f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, fmt.Errorf("state directory: %w", err)
		}
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return &home{root: state, dir: dir, lock: f}, nil
		}
		_ = f.Close()
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s: %w", dir, err)
		}
	}
	return nil, fmt.Errorf("state directory %s: all of %d places for agents named %s are taken", state, maxHomes, name)
}

// share hands the lock to the guard.
func (h *home) share(g *guard.Link) error { return g.Hold(h.lock) }

func (h *home) close() { _ = h.lock.Close() }

func (h *home) workersFile() string { return filepath.Join(h.dir, "workers") }

// predecessors are the worker ids that were remembered here and not forgotten since.
func (h *home) predecessors() []string {
	f, err := os.Open(h.workersFile())
	if err != nil {
		return nil
	}
	defer func() { _ = f.Close() }()
	var out []string
	for sc := bufio.NewScanner(f); sc.Scan(); {
		if w := strings.TrimSpace(sc.Text()); w != "" {
			out = append(out, w)
		}
	}
	return out
}

// remember writes a worker id down before anything runs under it.
func (h *home) remember(worker string) error {
	f, err := os.OpenFile(h.workersFile(), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err == nil {
		_, err = f.WriteString(worker + "\n")
		err = errors.Join(err, f.Sync(), f.Close())
	}
	if err != nil {
		return fmt.Errorf("remember the worker id: %w", err)
	}
	return nil
}

// forget drops all remembered ids, after they were declared dead or left in order.
func (h *home) forget() error {
	if err := os.Remove(h.workersFile()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("forget former worker ids: %w", err)
	}
	return nil
}

func (h *home) workDir(task string, attempt uint32) string {
	return filepath.Join(h.root, "work", task, fmt.Sprint(attempt))
}

func (h *home) checkpointDir(task string) string {
	return filepath.Join(h.root, "checkpoints", task)
}

// stale lists tasks with a working or checkpoint directory that nobody has touched for so long.
func (h *home) stale(keep time.Duration) ([]string, error) {
	var errs []error
	found := map[string]bool{}
	for _, kind := range leftoverKinds {
		entries, err := os.ReadDir(filepath.Join(h.root, kind))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
		for _, e := range entries {
			if info, err := e.Info(); err == nil && time.Since(info.ModTime()) > keep {
				found[e.Name()] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(found)), errors.Join(errs...)
}

var leftoverKinds = []string{"work", "checkpoints"}

// remove removes the directories of a task.
func (h *home) remove(task string) error {
	var errs []error
	for _, kind := range leftoverKinds {
		errs = append(errs, os.RemoveAll(filepath.Join(h.root, kind, task)))
	}
	return errors.Join(errs...)
}
