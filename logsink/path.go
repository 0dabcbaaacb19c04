package logsink

import (
	"fmt"
	"path/filepath"
	"strconv"
	"time"
)

// Names of files come from messages, so they are checked here once more, whoever checked them before: an id, for which
// spec.ValidID stands, is one path element that is not hidden, and a date is a date.

func validDate(date string) bool {
	_, err := time.Parse(time.DateOnly, date)
	return err == nil && len(date) == len(time.DateOnly)
}

// attemptKey names the log of an attempt.
type attemptKey struct {
	task    string
	attempt uint32
}

func (k attemptKey) String() string { return fmt.Sprintf("%s attempt %d", k.task, k.attempt) }

func (k attemptKey) dir(root, date string) string { return filepath.Join(root, date, k.task) }

func dataName(attempt uint32) string  { return strconv.FormatUint(uint64(attempt), 10) + ".log" }
func indexName(attempt uint32) string { return strconv.FormatUint(uint64(attempt), 10) + ".idx" }
