package logsink

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
)

// table holds the open logs, at most limit of them beyond those in use, and lets readers wait for logs that do not exist
// yet.
type table struct {
	root  string
	limit int

	mu      sync.Mutex
	open    map[attemptKey]*attemptLog
	clock   uint64
	waiting map[string]*waiter // by task
}

func newTable(root string, limit int) *table {
	return &table{root: root, limit: limit, open: map[attemptKey]*attemptLog{}, waiting: map[string]*waiter{}}
}

// cached returns the log if it is open; release it after use.
func (t *table) cached(key attemptKey) *attemptLog {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.takeLocked(key)
}

func (t *table) takeLocked(key attemptKey) *attemptLog {
	a := t.open[key]
	if a != nil {
		a.refs++
		t.clock++
		a.used = t.clock
	}
	return a
}

// forWriting opens the log of an attempt, in the folder of the date, and makes it when it is new.
func (t *table) forWriting(key attemptKey, date, worker string) (*attemptLog, error) {
	if a := t.cached(key); a != nil {
		return a, nil
	}
	a, err := openAttempt(key, key.dir(t.root, date), worker)
	if err != nil {
		return nil, err
	}
	return t.insert(a), nil
}

// existing opens the log of an attempt, which is most likely in the folder of the date; fs.ErrNotExist when there is
// none yet.
func (t *table) existing(key attemptKey, date string) (*attemptLog, error) {
	if a := t.cached(key); a != nil {
		return a, nil
	}
	dir, err := t.find(key, date)
	if err != nil {
		return nil, err
	}
	a, err := openAttempt(key, dir, "")
	if err != nil {
		return nil, err
	}
	return t.insert(a), nil
}

// insert adds an opened log, or takes the one that was opened meanwhile.
func (t *table) insert(a *attemptLog) *attemptLog {
	t.mu.Lock()
	defer t.mu.Unlock()
	if other := t.takeLocked(a.key); other != nil {
		_ = a.close()
		return other
	}
	t.open[a.key] = a
	a = t.takeLocked(a.key)
	if w := t.waiting[a.key.task]; w != nil {
		close(w.appeared)
		delete(t.waiting, a.key.task)
	}
	t.evictLocked()
	return a
}

func (t *table) release(a *attemptLog) {
	t.mu.Lock()
	defer t.mu.Unlock()
	a.refs--
	t.evictLocked()
}

// evictLocked closes the logs that were not used for longest, a part at a time so that the search is seldom made.
func (t *table) evictLocked() {
	if len(t.open) <= t.limit {
		return
	}
	var free []*attemptLog
	for _, a := range t.open {
		if a.refs == 0 {
			free = append(free, a)
		}
	}
	slices.SortFunc(free, func(a, b *attemptLog) int { return int(int64(a.used) - int64(b.used)) })
	for _, a := range free[:min(len(free), len(t.open)-t.limit+t.limit/8)] {
		delete(t.open, a.key)
		_ = a.close()
	}
}

// closeAll closes every log that nobody uses.
func (t *table) closeAll() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	var errs []error
	for key, a := range t.open {
		errs = append(errs, a.close())
		delete(t.open, key)
	}
	return errors.Join(errs...)
}

// waiter is what readers of a task wait on that has no log yet.
type waiter struct {
	appeared chan struct{}
	readers  int
}

// appear returns a channel that is closed when a log of the task is opened here for the first time. stop has to be
// called when it is not waited on any more.
func (t *table) appear(task string) (appeared <-chan struct{}, stop func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	w := t.waiting[task]
	if w == nil {
		w = &waiter{appeared: make(chan struct{})}
		t.waiting[task] = w
	}
	w.readers++
	return w.appeared, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if w.readers--; w.readers == 0 && t.waiting[task] == w {
			delete(t.waiting, task)
		}
	}
}

// overdue returns the logs that have waited long enough for something missing; release each.
func (t *table) overdue() []*attemptLog {
	t.mu.Lock()
	defer t.mu.Unlock()
	var late []*attemptLog
	for _, a := range t.open {
		a.mu.Lock()
		if a.overdue() {
			a.refs++
			late = append(late, a)
		}
		a.mu.Unlock()
	}
	return late
}

// find returns the folder that holds an attempt's log.
func (t *table) find(key attemptKey, date string) (string, error) {
	if date != "" {
		if dir := key.dir(t.root, date); exists(filepath.Join(dir, indexName(key.attempt))) {
			return dir, nil
		}
	}
	dates, err := t.dates()
	if err != nil {
		return "", err
	}
	for _, date := range dates {
		dir := key.dir(t.root, date)
		if exists(filepath.Join(dir, indexName(key.attempt))) {
			return dir, nil
		}
	}
	return "", fs.ErrNotExist
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// dates lists the folders of days, the newest first.
func (t *table) dates() ([]string, error) {
	entries, err := os.ReadDir(t.root)
	if err != nil {
		return nil, err
	}
	var dates []string
	for _, e := range entries {
		if e.IsDir() && validDate(e.Name()) {
			dates = append(dates, e.Name())
		}
	}
	slices.Reverse(dates)
	return dates, nil
}
