// Package spec is the gate of the public door: it decodes a task from a stream entry, checks it, knows its defaults,
// gives it an id, and decides whether two tasks are the same. The dispatcher calls it for entries of the tasks stream
// and for API calls, the command line calls it to refuse a bad task early, and agents read the defaults from it.
//
// It does no I/O, keeps no state and never changes a task. Whether a queue exists or an id is taken is not asked
// here; that is known only to the store.
package spec

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/oklog/ulid/v2"
)

// DefaultLimit is the largest encoded task unless configured otherwise.
const DefaultLimit = 256 << 10

// Limits that an operator can set.
type Limits struct {
	// TaskBytes is the largest task, both as it is written in the entry and encoded as Protobuf; DefaultLimit when 0.
	TaskBytes int
}

func (l Limits) taskBytes() int {
	if l.TaskBytes <= 0 {
		return DefaultLimit
	}
	return l.TaskBytes
}

// Codes for dead letters, as Code returns them.
const (
	// CodeBadTask is a task that breaks a rule.
	CodeBadTask = "bad_task"
	// CodeBadEntry is an entry that does not hold one task.
	CodeBadEntry = "bad_entry"
	// CodeTooLarge is a task over the limit.
	CodeTooLarge = "too_large"
)

// Errors that Code, and callers with errors.Is, tell apart. Their texts never stand alone.
var (
	// ErrBadEntry marks an entry that does not have exactly one of the fields task and json.
	ErrBadEntry = errors.New("bad entry")
	// ErrTooLarge marks a task over Limits.TaskBytes.
	ErrTooLarge = errors.New("too large")
)

// marked gives an error a text without that of its mark.
type marked struct {
	text string
	mark error
}

func (m marked) Error() string { return m.text }
func (m marked) Unwrap() error { return m.mark }

// Code is the short word for an error of DecodeEntry or Validate.
func Code(err error) string {
	switch {
	case errors.Is(err, ErrBadEntry):
		return CodeBadEntry
	case errors.Is(err, ErrTooLarge):
		return CodeTooLarge
	default:
		return CodeBadTask
	}
}

const (
	maxIDBytes   = 128
	maxNameBytes = 64
)

// ValidID tells whether s can be the id of a task, a group or a worker's name: 1 to 128 of A-Z a-z 0-9 . _ -, not
// starting with a dot.
func ValidID(s string) bool {
	if s == "" || len(s) > maxIDBytes || s[0] == '.' {
		return false
	}
	for i := range len(s) {
		c := s[i]
		if !isLower(c) && !isDigit(c) && (c < 'A' || c > 'Z') && c != '.' && c != '_' && c != '-' {
			return false
		}
	}
	return true
}

// ValidQueue tells whether s can name a queue: 1 to 64 of a-z 0-9 _ -.
func ValidQueue(s string) bool { return validName(s) }

// ValidNamespace tells whether s can name a namespace; the rule is that of queues. The empty namespace is none.
func ValidNamespace(s string) bool { return validName(s) }

func validName(s string) bool {
	if s == "" || len(s) > maxNameBytes {
		return false
	}
	for i := range len(s) {
		if c := s[i]; !isLower(c) && !isDigit(c) && c != '_' && c != '-' {
			return false
		}
	}
	return true
}

func isLower(c byte) bool { return c >= 'a' && c <= 'z' }
func isDigit(c byte) bool { return c >= '0' && c <= '9' }

// DeriveID makes the id of a task that came without one from the entry that brought it, so that the same entry, read
// again by whichever dispatcher, never becomes two tasks. It is a ULID with the milliseconds of the entry id and, in
// place of randomness, the first 80 bits of SHA-256 over the length of the stream's key (8 bytes, big-endian), the
// key and the entry id. streamKey is the full name in Redis. The result must never change for a given pair.
func DeriveID(streamKey, entryID string) string {
	h := sha256.New()
	_ = binary.Write(h, binary.BigEndian, uint64(len(streamKey))) // a hash never fails
	h.Write([]byte(streamKey))
	h.Write([]byte(entryID))
	return newULID(entryMillis(entryID), h.Sum(nil))
}

// entryMillis reads the time in an entry id. Producers may choose ids themselves, so it can be anything up to 64
// bits; a ULID keeps the low 48.
func entryMillis(entryID string) uint64 {
	text, _, _ := strings.Cut(entryID, "-")
	ms, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0
	}
	return ms
}

// NewID makes a random id for a task that is submitted without one.
func NewID(now time.Time) string {
	var random [10]byte
	_, _ = rand.Read(random[:]) // never fails: crypto/rand ends the program instead
	return newULID(uint64(max(0, now.UnixMilli())), random[:])
}

func newULID(ms uint64, entropy []byte) string {
	var u ulid.ULID
	var be [8]byte
	binary.BigEndian.PutUint64(be[:], ms)
	copy(u[:6], be[2:])
	copy(u[6:], entropy[:10])
	return u.String()
}

// shorten quotes a value for a message, cut to a readable length.
func shorten(s string) string {
	const most = 40
	if len(s) <= most {
		return strconv.Quote(s)
	}
	cut := most
	for cut > most-utf8.UTFMax && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return fmt.Sprintf("%q… (%d bytes)", s[:cut], len(s))
}
