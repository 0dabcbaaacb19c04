package protojs

import (
	"bytes"
	"encoding/json"
	"math"
	"testing"

	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	"pgregory.net/rapid"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// kinds is a message with every kind of field, those too that no message of ours uses yet.
func kinds(t testing.TB) protoreflect.MessageType {
	t.Helper()
	const source = `
name: "kinds.proto" package: "kinds" syntax: "proto3"
message_type {
  name: "Kinds"
  field { name: "z_last" number: 40 type: TYPE_STRING label: LABEL_OPTIONAL json_name: "zLast" }
  field { name: "a_bool" number: 1 type: TYPE_BOOL label: LABEL_OPTIONAL json_name: "aBool" }
  field { name: "i32" number: 2 type: TYPE_INT32 label: LABEL_OPTIONAL json_name: "i32" }
  field { name: "s32" number: 3 type: TYPE_SINT32 label: LABEL_OPTIONAL json_name: "s32" }
  field { name: "sf32" number: 4 type: TYPE_SFIXED32 label: LABEL_REPEATED json_name: "sf32" }
  field { name: "f32" number: 5 type: TYPE_FIXED32 label: LABEL_OPTIONAL json_name: "f32" }
  field { name: "i64" number: 6 type: TYPE_INT64 label: LABEL_REPEATED json_name: "i64" }
  field { name: "s64" number: 7 type: TYPE_SINT64 label: LABEL_OPTIONAL json_name: "s64" }
  field { name: "sf64" number: 8 type: TYPE_SFIXED64 label: LABEL_OPTIONAL json_name: "sf64" }
  field { name: "f64" number: 9 type: TYPE_FIXED64 label: LABEL_OPTIONAL json_name: "f64" }
  field { name: "flt" number: 10 type: TYPE_FLOAT label: LABEL_REPEATED json_name: "flt" }
  field { name: "child" number: 11 type: TYPE_MESSAGE type_name: ".kinds.Kinds" label: LABEL_OPTIONAL json_name: "child" }
  field { name: "by_bool" number: 12 type: TYPE_MESSAGE type_name: ".kinds.Kinds.ByBoolEntry" label: LABEL_REPEATED json_name: "byBool" }
  field { name: "by_int" number: 13 type: TYPE_MESSAGE type_name: ".kinds.Kinds.ByIntEntry" label: LABEL_REPEATED json_name: "byInt" }
  field { name: "word" number: 14 type: TYPE_ENUM type_name: ".kinds.LongWord" label: LABEL_OPTIONAL json_name: "word" }
  nested_type { name: "ByBoolEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_BOOL label: LABEL_OPTIONAL json_name: "key" }
    field { name: "value" number: 2 type: TYPE_ENUM type_name: ".kinds.LongWord" label: LABEL_OPTIONAL json_name: "value" } }
  nested_type { name: "ByIntEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_SINT64 label: LABEL_OPTIONAL json_name: "key" }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".kinds.Kinds" label: LABEL_OPTIONAL json_name: "value" } }
}
enum_type { name: "LongWord" value { name: "LONG_WORD_UNSPECIFIED" number: 0 } value { name: "LONG_WORD_AN_APPLE" number: 1 } value { name: "LONG_WORD_B" number: 2 } }`
	var fdp descriptorpb.FileDescriptorProto
	if err := prototext.Unmarshal([]byte(source), &fdp); err != nil {
		t.Fatal(err)
	}
	fd, err := protodesc.NewFile(&fdp, protoregistry.GlobalFiles)
	if err != nil {
		t.Fatal(err)
	}
	return dynamicpb.NewMessageType(fd.Messages().Get(0))
}

// ours lists every message of the API and the store.
func ours() []protoreflect.MessageType {
	var list []protoreflect.MessageType
	protoregistry.GlobalTypes.RangeMessages(func(mt protoreflect.MessageType) bool {
		if mt.Descriptor().FullName().Parent() == "millrace.v1" {
			list = append(list, mt)
		}
		return true
	})
	return list
}

// TestRoundTrip writes and reads random messages of every type.
func TestRoundTrip(t *testing.T) {
	t.Parallel()
	types := append(ours(), kinds(t))
	if len(types) < 30 {
		t.Fatalf("only %d message types are registered", len(types))
	}
	for _, mt := range types {
		t.Run(string(mt.Descriptor().Name()), func(t *testing.T) {
			t.Parallel()
			rapid.Check(t, func(rt *rapid.T) {
				m := mt.New()
				fill(rt, m, 3)
				checkRoundTrip(rt, m.Interface(), MarshalOptions{})
				checkRoundTrip(rt, m.Interface(), MarshalOptions{Full: true, Indent: "\t"})
			})
		})
	}
}

func checkRoundTrip(t rapid.TB, m proto.Message, o MarshalOptions) {
	text, err := o.Marshal(m)
	if err != nil {
		t.Fatalf("Marshal(%v): %v", m, err)
	}
	if !json.Valid(text) {
		t.Fatalf("not JSON: %s", text)
	}
	back := m.ProtoReflect().New().Interface()
	if err := Unmarshal(text, back); err != nil {
		t.Fatalf("Unmarshal(%s): %v", text, err)
	}
	if !proto.Equal(m, back) {
		t.Fatalf("%s\nwas  %v\nread %v", text, m, back)
	}
	again, err := o.Marshal(back)
	if err != nil || !bytes.Equal(text, again) {
		t.Fatalf("not deterministic:\n%s\n%s", text, again)
	}
}

// fill sets random fields.
func fill(t *rapid.T, m protoreflect.Message, depth int) {
	switch m.Descriptor().FullName() {
	case durationName:
		sign := rapid.SampledFrom([]int64{-1, 1}).Draw(t, "sign")
		setTime(m, sign*rapid.Int64Range(0, 315576000000-1).Draw(t, "seconds"), int32(sign)*rapid.Int32Range(0, 999999999).Draw(t, "nanos"))
		return
	case timestampName:
		setTime(m, rapid.Int64Range(-62135596800, 253402300799).Draw(t, "seconds"), rapid.Int32Range(0, 999999999).Draw(t, "nanos"))
		return
	}
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if fd.Message() != nil && depth == 0 || !rapid.Bool().Draw(t, "set") {
			continue
		}
		switch n := rapid.IntRange(0, 3).Draw(t, "n"); {
		case fd.IsList():
			for range n {
				l := m.Mutable(fd).List()
				l.Append(random(t, fd, l.NewElement, depth))
			}
		case fd.IsMap():
			for range n {
				entries := m.Mutable(fd).Map()
				key := random(t, fd.MapKey(), nil, depth).MapKey()
				entries.Set(key, random(t, fd.MapValue(), entries.NewValue, depth))
			}
		default:
			m.Set(fd, random(t, fd, func() protoreflect.Value { return m.NewField(fd) }, depth))
		}
	}
}

func random(t *rapid.T, fd protoreflect.FieldDescriptor, empty func() protoreflect.Value, depth int) protoreflect.Value {
	switch fd.Kind() {
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(rapid.Bool().Draw(t, "bool"))
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(rapid.String().Draw(t, "string"))
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes(rapid.SliceOf(rapid.Byte()).Draw(t, "bytes"))
	case protoreflect.EnumKind:
		values := fd.Enum().Values()
		return protoreflect.ValueOfEnum(values.Get(rapid.IntRange(0, values.Len()-1).Draw(t, "enum")).Number())
	case protoreflect.MessageKind, protoreflect.GroupKind:
		v := empty()
		fill(t, v.Message(), depth-1)
		return v
	case protoreflect.FloatKind:
		return protoreflect.ValueOfFloat32(rapid.Float32Range(-math.MaxFloat32, math.MaxFloat32).Draw(t, "float"))
	case protoreflect.DoubleKind:
		return protoreflect.ValueOfFloat64(rapid.Float64Range(-math.MaxFloat64, math.MaxFloat64).Draw(t, "double"))
	case protoreflect.Uint32Kind, protoreflect.Fixed32Kind:
		return protoreflect.ValueOfUint32(rapid.Uint32().Draw(t, "uint32"))
	case protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
		return protoreflect.ValueOfUint64(rapid.Uint64().Draw(t, "uint64"))
	case protoreflect.Int64Kind, protoreflect.Sint64Kind, protoreflect.Sfixed64Kind:
		return protoreflect.ValueOfInt64(rapid.Int64().Draw(t, "int64"))
	default:
		return protoreflect.ValueOfInt32(rapid.Int32().Draw(t, "int32"))
	}
}

func TestKinds(t *testing.T) {
	t.Parallel()
	m := kinds(t).New().Interface()
	if err := Unmarshal([]byte(`{"zLast":"z","word":"an_apple","byInt":{"-5":{},"7":{}},"byBool":{"true":"b"},"flt":[1.5]}`), m); err != nil {
		t.Fatal(err)
	}
	got, err := Marshal(m)
	want := `{"flt":[1.5],"byBool":{"true":"b"},"byInt":{"-5":{},"7":{}},"word":"an_apple","zLast":"z"}`
	if err != nil || string(got) != want {
		t.Errorf("got %s, %v\nwant %s", got, err, want)
	}
	for in, want := range map[string]string{
		`{"byBool":{"yes":"b"}}`:        `byBool["yes"]: want the key true or false, found "yes"`,
		`{"byInt":{"x":{}}}`:            `byInt["x"]: want a whole number as the key, found "x"`,
		`{"byInt":{"1":5}}`:             `byInt["1"]: want an object, found the number 5`,
		`{"flt":[1e39]}`:                `flt[0]: 1e39 is out of range for a number with 32 bits`,
		`{"byInt":[]}`:                  `byInt: want an object of objects, found a list: write {"NAME": "value"}`,
		`{"byInt":{"0":{},"-0":{}}}`:    `byInt["-0"]: given twice: remove one`,
		`{"byInt":{"01":{}}}`:           `byInt["01"]: want a whole number as the key, found "01"`,
		`{"byInt":{"1.5":{}}}`:          `byInt["1.5"]: want a whole number, found 1.5: write it without a fraction or an exponent`,
		`{"child":{"child":{"i33":1}}}`: `unknown field "i33" at child.child.i33: did you mean "i32"?`,
	} {
		if err := Unmarshal([]byte(in), kinds(t).New().Interface()); err == nil || err.Error() != want {
			t.Errorf("Unmarshal(%s) = %v, want %s", in, err, want)
		}
	}
}

// FuzzUnmarshal holds that no input panics and that what is accepted is written and read back as the same.
func FuzzUnmarshal(f *testing.F) {
	for _, in := range []string{
		`{}`, `{"command":{"argv":["echo","hi"],"env":{"A":"b"}}}`, `{"notBefore":"2030-01-01T00:00:00Z","timeout":"2m","arrayIndex":0}`,
		`{"retry":{"retryOn":["exit"],"backoff":{"factor":1.5,"jitter":0}}}`, `{"call":{"handler":"h","payload":"-_8"}}`,
		`{"labels":{"a":"\ud83d\ude00"}}`, `{"id":"a","id":"b"}`, `[[[[`, `{"timeout":"-315576000000s"}`, "\xef\xbb\xbf{}", `{"log":null,"after":[null]}`,
		`{"signed":{"task":"AA=="}}`, `{"resources":{"memoryBytes":18446744073709551615,"cpus":-0}}`,
	} {
		f.Add([]byte(in))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		for _, m := range []proto.Message{&millracev1.Task{}, &millracev1.TaskView{}, &millracev1.DeadView{}} {
			if Unmarshal(in, m) != nil {
				continue
			}
			text, err := Marshal(m)
			if err != nil {
				t.Fatalf("Marshal of what was read from %q: %v", in, err)
			}
			back := m.ProtoReflect().New().Interface()
			if err := Unmarshal(text, back); err != nil || !proto.Equal(m, back) {
				t.Fatalf("%q: read %v, written as %s, read back %v: %v", in, m, text, back, err)
			}
		}
	})
}
