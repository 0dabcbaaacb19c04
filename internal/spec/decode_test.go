package spec

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/millrace/millrace/internal/protojs"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func encode(t testing.TB, m proto.Message) []byte {
	t.Helper()
	data, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestDecodeEntry(t *testing.T) {
	t.Parallel()
	const text = `{"command":{"argv":["echo","hi"]},"timeout":"2m"}`
	want := parse(t, text)
	for name, values := range map[string]map[string]any{
		"JSON":          {"json": text},
		"JSON bytes":    {"json": []byte(text)},
		"message":       {"task": string(encode(t, want))},
		"message bytes": {"task": encode(t, want)},
	} {
		got, err := DecodeEntry(values, Limits{})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	got, err := DecodePairs([]string{"json", text}, Limits{})
	if err != nil || !proto.Equal(got, want) {
		t.Errorf("DecodePairs: %v, %v", got, err)
	}
}

func TestDecodeEntryProblems(t *testing.T) {
	t.Parallel()
	const text = `{"command":{"argv":["echo","hi"]}}`
	garbage := "\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xff\xff"
	const notEncoded = "field task is not an encoded millrace.v1.Task: encode it with the generated code of proto/millrace/v1/task.proto, or use the field json"
	for name, tc := range map[string]struct {
		values     map[string]any
		code, want string
	}{
		"no fields":         {nil, CodeBadEntry, `has no fields: XADD tasks '*' json '{"command":{"argv":["echo","hi"]}}'`},
		"another field":     {map[string]any{"cmd": "x", "a\n": "y"}, CodeBadEntry, `has neither field task nor json but "a\n", "cmd": XADD tasks '*' json '{"command":{"argv":["echo","hi"]}}'`},
		"both":              {map[string]any{"task": "x", "json": text}, CodeBadEntry, `has both fields, task and json: give the task once, in one of them`},
		"one more":          {map[string]any{"json": text, "user": "ann"}, CodeBadEntry, `has more fields than the task: remove "user"; what the task should carry along goes into its labels or env`},
		"many more":         {map[string]any{"json": text, "a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1, "g": 1}, CodeBadEntry, `has more fields than the task: remove "a", "b", "c", "d", "e" and 2 more; what the task should carry along goes into its labels or env`},
		"odd type":          {map[string]any{"json": 5}, CodeBadEntry, `field json holds a int: want a string or bytes`},
		"too large":         {map[string]any{"json": strings.Repeat(" ", DefaultLimit+1)}, CodeTooLarge, `task has 262145 bytes, at most 262144 are allowed: put large input into a file or an object store and pass its address`},
		"empty JSON":        {map[string]any{"json": ""}, CodeBadTask, `field json: empty: want a JSON object`},
		"wrong type":        {map[string]any{"json": `{"command":{"argv":"echo hi"}}`}, CodeBadTask, `field json: command.argv: want a list of strings, found the string "echo hi": write ["echo", "hi"]`},
		"unknown field":     {map[string]any{"json": `{"comand":{}}`}, CodeBadTask, `field json: unknown field "comand": did you mean "command"?`},
		"breaks a rule":     {map[string]any{"json": `{"command":{"argv":[]}}`}, CodeBadTask, `command.argv: empty: give the program and its arguments, such as ["echo", "hi"]`},
		"binary in json":    {map[string]any{"json": garbage}, CodeBadTask, `field json: not valid UTF-8 at byte 1: bytes that are not text go into base64 fields`},
		"message in json":   {map[string]any{"json": encode(t, &millracev1.Task{Work: &millracev1.Task_Call{Call: &millracev1.Call{Handler: "h", Payload: []byte{0xff}}}})}, CodeBadTask, `field json holds a binary message: put it into the field task`},
		"JSON in task":      {map[string]any{"task": text}, CodeBadTask, `field task holds text that looks like JSON: put it into the field json`},
		"binary in task":    {map[string]any{"task": garbage}, CodeBadTask, notEncoded},
		"text in task":      {map[string]any{"task": "hello"}, CodeBadTask, notEncoded},
		"bad UTF-8 in task": {map[string]any{"task": "\x0a\x01\xff"}, CodeBadTask, notEncoded},
		"empty task":        {map[string]any{"task": ""}, CodeBadTask, `command: missing, there is nothing to run: give "command": {"argv": ["echo", "hi"]} or "call": {"handler": "…"}`},
		"newer task":        {map[string]any{"task": append(encode(t, parse(t, text)), 0xd0, 0x0f, 1)}, CodeBadTask, `task: field number 250 is not known to this version: leave it out, or update the dispatchers first`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := DecodeEntry(tc.values, Limits{})
			if err == nil {
				t.Fatalf("valid, want %s", tc.want)
			}
			if diff := cmp.Diff(tc.want, err.Error()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if got := Code(err); got != tc.code {
				t.Errorf("Code = %s, want %s", got, tc.code)
			}
		})
	}
}

func TestDecodePairsProblems(t *testing.T) {
	t.Parallel()
	for want, pairs := range map[string][]string{
		`entry has 1 names and values: want pairs`:                           {"json"},
		`field "json" is given twice: add one task per entry`:                {"json", "{}", "json", "{}"},
		`has both fields, task and json: give the task once, in one of them`: {"json", "{}", "task", ""},
	} {
		if _, err := DecodePairs(pairs, Limits{}); err == nil || err.Error() != want || Code(err) != CodeBadEntry {
			t.Errorf("DecodePairs(%q) = %v, want %s", pairs, err, want)
		}
	}
}

// TestMessagesOfTask holds what populatedMessages relies on.
func TestMessagesOfTask(t *testing.T) {
	t.Parallel()
	md := new(millracev1.Task).ProtoReflect().Descriptor()
	for i := range md.Fields().Len() {
		if fd := md.Fields().Get(i); fd.IsList() && fd.Message() != nil || fd.IsMap() && fd.MapValue().Message() != nil {
			t.Errorf("%s holds several messages: unknownFields must walk them", fd.Name())
		}
	}
}

// FuzzDecodeEntry holds that no entry panics, that the answer is an error with a text of sane length or a valid task,
// and that a valid task is the same again through both fields.
func FuzzDecodeEntry(f *testing.F) {
	for _, text := range []string{
		`{"command":{"argv":["echo","hi"]}}`, `{"call":{"handler":"h","payload":"AA=="}}`, `{}`, `{"command":{"argv":["x"],"env":{"A":"b"}},"retry":{"backoff":{"factor":1.5}}}`,
		`{"command":{"argv":["x"]},"timeout":"2m","notBefore":"2030-01-01T00:00:00Z","labels":{"a":"b"},"resources":{"slots":2},"log":{"split":true}}`,
	} {
		task := new(millracev1.Task)
		if err := protojs.Unmarshal([]byte(text), task); err != nil {
			f.Fatal(err)
		}
		f.Add("json", []byte(text), "", []byte(nil))
		f.Add("task", encode(f, task), "", []byte(nil))
	}
	f.Add("task", []byte("x"), "json", []byte("{}"))
	f.Fuzz(func(t *testing.T, name string, value []byte, other string, more []byte) {
		values := map[string]any{name: value}
		if other != "" {
			values[other] = string(more)
		}
		task, err := DecodeEntry(values, Limits{TaskBytes: 4096})
		if err != nil {
			if n := len(err.Error()); n > 1<<16 || n == 0 {
				t.Fatalf("the error has %d bytes", n)
			}
			return
		}
		checkAccepted(t, task)
	})
}

func checkAccepted(t *testing.T, task *millracev1.Task) {
	t.Helper()
	if err := Validate(task, Limits{}); err != nil {
		t.Fatalf("accepted and not valid: %v", err)
	}
	text, err := protojs.Marshal(task)
	if err != nil {
		t.Fatalf("accepted and has no JSON: %v", err)
	}
	for field, data := range map[string][]byte{FieldJSON: text, FieldTask: encode(t, task)} {
		again, err := DecodeEntry(map[string]any{field: data}, Limits{})
		if err != nil || !Equal(task, again) {
			t.Fatalf("%s %q: %v, %v", field, data, again, err)
		}
	}
	canonical, err := Canonical(task)
	if err != nil {
		t.Fatal(err)
	}
	sparse := new(millracev1.Task)
	if err := proto.Unmarshal(canonical, sparse); err != nil {
		t.Fatal(err)
	}
	if twice, err := Canonical(sparse); err != nil || !bytes.Equal(canonical, twice) {
		t.Fatalf("Canonical of its own result differs: %x, %x, %v", canonical, twice, err)
	}
	// NaN cannot be here, so plain comparison works.
	if a, b := fmt.Sprint(policyOf(task)), fmt.Sprint(policyOf(sparse)); a != b {
		t.Fatalf("Canonical changes the meaning:\n%s\n%s", a, b)
	}
}
