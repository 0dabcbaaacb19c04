package spec

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/oklog/ulid/v2"

	"github.com/millrace/millrace/internal/protojs"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// parse reads a task without checking it.
func parse(t testing.TB, text string) *millracev1.Task {
	t.Helper()
	task := new(millracev1.Task)
	if err := protojs.Unmarshal([]byte(text), task); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return task
}

func TestValidNames(t *testing.T) {
	t.Parallel()
	for s, want := range map[string]struct{ id, queue bool }{
		"a": {true, true}, "A": {true, false}, "a.b": {true, false}, ".a": {false, false}, "..": {false, false},
		"": {false, false}, "-": {true, true}, "_9": {true, true}, "a b": {false, false}, "a/b": {false, false},
		"ä": {false, false}, "a\n": {false, false}, "a:b": {false, false}, "{a}": {false, false}, "a\x00": {false, false},
		strings.Repeat("a", 64): {true, true}, strings.Repeat("a", 65): {true, false},
		strings.Repeat("a", 128): {true, false}, strings.Repeat("a", 129): {false, false},
	} {
		if got := ValidID(s); got != want.id {
			t.Errorf("ValidID(%q) = %t", s, got)
		}
		if got := ValidQueue(s); got != want.queue || ValidNamespace(s) != got {
			t.Errorf("ValidQueue(%q) = %t", s, got)
		}
	}
}

// TestDeriveID reads vectors that must hold for ever: an entry that an older dispatcher admitted and could not
// acknowledge is derived again by a newer one.
func TestDeriveID(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("testdata/derive_id.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct{ Stream, Entry, ID string }
	if err := json.Unmarshal(data, &vectors); err != nil {
		t.Fatal(err)
	}
	seen := make(map[string]string)
	for _, v := range vectors {
		got := DeriveID(v.Stream, v.Entry)
		if got != v.ID {
			t.Errorf("DeriveID(%q, %q) = %s, want %s", v.Stream, v.Entry, got, v.ID)
		}
		if !ValidID(got) {
			t.Errorf("%s is not a valid id", got)
		}
		if other, again := seen[got]; again {
			t.Errorf("%q, %q has the id of %s", v.Stream, v.Entry, other)
		}
		seen[got] = fmt.Sprintf("%q, %q", v.Stream, v.Entry)
		if u, err := ulid.ParseStrict(got); err != nil || strings.HasPrefix(v.Entry, "1767225600000") && u.Time() != 1767225600000 {
			t.Errorf("%s: time %d, %v", got, u.Time(), err)
		}
	}
	if len(vectors) < 6 {
		t.Errorf("only %d vectors", len(vectors))
	}
}

func TestNewID(t *testing.T) {
	t.Parallel()
	now := time.UnixMilli(1767225600123)
	a, b := NewID(now), NewID(now)
	if a == b || !ValidID(a) {
		t.Errorf("got %s and %s", a, b)
	}
	if u, err := ulid.ParseStrict(a); err != nil || u.Time() != 1767225600123 {
		t.Errorf("%s: time %d, %v", a, u.Time(), err)
	}
	if !ValidID(NewID(time.Time{})) || !ValidID(NewID(time.Unix(1<<55, 0))) {
		t.Error("clock out of range: invalid id")
	}
}

func TestCode(t *testing.T) {
	t.Parallel()
	for want, err := range map[string]error{
		CodeTooLarge: fmt.Errorf("x: %w", tooLarge(2, 1)),
		CodeBadEntry: marked{"x", ErrBadEntry},
		CodeBadTask:  errors.New("x"),
	} {
		if got := Code(err); got != want {
			t.Errorf("Code(%v) = %s, want %s", err, got, want)
		}
	}
}
