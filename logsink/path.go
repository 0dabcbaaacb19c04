package logsink

import (
	"fmt"
	"path/filepath"
	"strconv"
	"time"
)

// Names of files come from messages, so they are checked here once more, whoever checked them before: an id is one path
// element that is not hidden, and a date is a date.

func validID(id string) bool {
	if id == "" || len(id) > 128 || id[0] == '.' {
		return false
	}
	for i := range len(id) {
		c := id[i]
		ok := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-'
		if !ok {
			return false
		}
	}
	return true
}

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
