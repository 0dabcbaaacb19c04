package spec

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/millrace/millrace/internal/protojs"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// Messages rest in Redis over an update, so every released version leaves encoded messages in testdata/golden, and
// every later one must read them as what they were. -update writes the folder of the present version; those of
// released ones are never written again.
var update = flag.Bool("update", false, "write testdata/golden of the present version")

const present = "testdata/golden/v0.1"

// resting are the messages that rest in Redis.
func resting() []proto.Message {
	return []proto.Message{
		&millracev1.Task{}, &millracev1.Dispatch{}, &millracev1.AttemptEnd{}, &millracev1.Result{},
		&millracev1.DeadLetter{}, &millracev1.LogChunk{},
	}
}

// goldenTasks are valid tasks, which must stay valid.
var goldenTasks = map[string]string{
	"task-smallest": `{"command":{"argv":["echo","hi"]}}`,
	"task-call":     `{"id":"call.1","call":{"handler":"resize","payload":"AP8="},"group":"call","arrayIndex":1}`,
	"task-defaults": `{"queue":"default","priority":"normal","command":{"argv":["x"]},"grace":"10s","retry":{"maxAttempts":1,"maxLost":3,"backoff":{"initial":"1s","factor":2,"max":"5m","jitter":0.2},"retryOn":["exit","signal","oom","timeout"]},"resources":{"slots":1},"log":{},"onIsolation":"kill","retention":"24h"}`,
	"task-everything": `{"id":"train-17","name":"train","queue":"gpu","priority":"high","labels":{"user":"ann","run":"17"},` +
		`"command":{"argv":["python3","train.py"],"shell":true,"env":{"SEED":"17"},"dir":"/srv","stdinBytes":"AAE="},"timeout":"2h","grace":"30s",` +
		`"notBefore":"2026-01-01T00:00:00Z","expiresAt":"2027-01-01T00:00:00.5Z","retry":{"maxAttempts":5,"maxLost":0,"backoff":{"initial":"2s","factor":1.5,"max":"1m","jitter":0},"retryOn":["exit","refused"],"noRetryOn":["timeout"]},` +
		`"resources":{"slots":2},"log":{"split":true,"limitBytes":1048576},"onIsolation":"keep","group":"train","arrayIndex":0,"retention":"48h","traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}`,
}

func TestGolden(t *testing.T) {
	t.Parallel()
	if *update {
		writeGolden(t)
	}
	files, err := filepath.Glob("testdata/golden/*/*.binpb")
	if err != nil || len(files) < len(resting())+len(goldenTasks) {
		t.Fatalf("found only %d golden files (%v): run go test ./internal/spec -update", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimPrefix(file, "testdata/golden/"), func(t *testing.T) {
			t.Parallel()
			base := strings.TrimSuffix(file, ".binpb")
			data, text := read(t, file), read(t, base+".json")
			got, want := newMessage(t, filepath.Base(base)), newMessage(t, filepath.Base(base))
			if err := proto.Unmarshal(data, got); err != nil {
				t.Fatal(err)
			}
			if err := protojs.Unmarshal(text, want); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
				t.Errorf("the message is not read as what it was (-was +read):\n%s", diff)
			}
			if strings.HasPrefix(filepath.Base(base), "task-") {
				checkGoldenTask(t, base, data, text)
			}
		})
	}
}

// checkGoldenTask passes the task through the door and compares the bytes by which it is known.
func checkGoldenTask(t *testing.T, base string, data, text []byte) {
	t.Helper()
	for field, value := range map[string][]byte{FieldTask: data, FieldJSON: text} {
		task, err := DecodeEntry(map[string]any{field: value}, Limits{})
		if err != nil {
			t.Fatalf("%s: no longer valid: %v", field, err)
		}
		canonical, err := Canonical(task)
		if err != nil {
			t.Fatal(err)
		}
		if want := read(t, base+".canonical"); !bytes.Equal(want, canonical) {
			t.Errorf("%s: Canonical is now %x, was %x: a task sent again over an update would be refused as id_taken", field, canonical, want)
		}
	}
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func newMessage(t *testing.T, name string) proto.Message {
	t.Helper()
	if strings.HasPrefix(name, "task-") {
		return &millracev1.Task{}
	}
	for _, m := range resting() {
		if string(m.ProtoReflect().Descriptor().Name()) == name {
			return m
		}
	}
	t.Fatalf("no message is called %s", name)
	return nil
}

func writeGolden(t *testing.T) {
	t.Helper()
	if err := os.MkdirAll(present, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, m := range resting() {
		fillAll(m.ProtoReflect(), 1)
		writeMessage(t, string(m.ProtoReflect().Descriptor().Name()), m)
	}
	for name, text := range goldenTasks {
		task := parse(t, text)
		writeMessage(t, name, task)
		canonical, err := Canonical(task)
		if err != nil {
			t.Fatal(err)
		}
		write(t, name+".canonical", canonical)
	}
}

func writeMessage(t *testing.T, name string, m proto.Message) {
	t.Helper()
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	text, err := protojs.MarshalOptions{Indent: "  "}.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	write(t, name+".binpb", data)
	write(t, name+".json", append(text, '\n'))
}

func write(t *testing.T, name string, data []byte) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(present, name), data, 0o644); err != nil { //nolint:gosec // test data in the repository
		t.Fatal(err)
	}
}

// fillAll gives every field a value made from its number, so that a swapped field or type shows.
func fillAll(m protoreflect.Message, n int64) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		n := n*10 + int64(fd.Number())
		switch {
		case fd.IsList():
			l := m.Mutable(fd).List()
			l.Append(madeOf(fd, l.NewElement, n))
		case fd.IsMap():
			entries := m.Mutable(fd).Map()
			entries.Set(madeOf(fd.MapKey(), nil, n).MapKey(), madeOf(fd.MapValue(), entries.NewValue, n+1))
		default:
			m.Set(fd, madeOf(fd, func() protoreflect.Value { return m.NewField(fd) }, n))
		}
	}
}

func madeOf(fd protoreflect.FieldDescriptor, empty func() protoreflect.Value, n int64) protoreflect.Value {
	switch fd.Kind() {
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(true)
	case protoreflect.StringKind:
		return protoreflect.ValueOfString("text" + string(rune('a'+n%26)))
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte{0, byte(n), 0xff})
	case protoreflect.EnumKind:
		values := fd.Enum().Values()
		return protoreflect.ValueOfEnum(values.Get(1 + int(n)%(values.Len()-1)).Number())
	case protoreflect.MessageKind, protoreflect.GroupKind:
		v := empty()
		fillAll(v.Message(), n)
		return v
	case protoreflect.DoubleKind:
		return protoreflect.ValueOfFloat64(float64(n) + 0.5)
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(uint32(n))
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(uint64(n))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(n)
	default: // nanos of one sign with their seconds
		return protoreflect.ValueOfInt32(int32(n))
	}
}
