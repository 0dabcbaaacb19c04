package spec

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/millrace/millrace/internal/protojs"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// Fields of an entry in the tasks stream.
const (
	// FieldTask holds an encoded Task message.
	FieldTask = "task"
	// FieldJSON holds the same message as JSON.
	FieldJSON = "json"
)

const example = `XADD tasks '*' json '{"command":{"argv":["echo","hi"]}}'`

// DecodeEntry takes the task out of a stream entry and validates it. The entry must have exactly one field, task or
// json; values are strings or byte slices. It never panics: the result is a valid task or an error for people, which
// lists every problem. Code tells which kind of dead letter the error makes. An empty id stays empty (see DeriveID).
func DecodeEntry(values map[string]any, lim Limits) (*millracev1.Task, error) {
	data, isJSON, err := entryData(values)
	if err != nil {
		return nil, err
	}
	if most := lim.taskBytes(); len(data) > most {
		return nil, tooLarge(len(data), most)
	}
	decode := decodeProto
	if isJSON {
		decode = decodeJSON
	}
	t, err := decode(data)
	if err != nil {
		return nil, err
	}
	if err := Validate(t, lim); err != nil {
		return nil, err
	}
	return t, nil
}

// DecodePairs is DecodeEntry for an entry as scripts return it, names and values in turn. Unlike the map it shows
// when a field is there twice.
func DecodePairs(pairs []string, lim Limits) (*millracev1.Task, error) {
	if len(pairs)%2 != 0 {
		return nil, marked{fmt.Sprintf("entry has %d names and values: want pairs", len(pairs)), ErrBadEntry}
	}
	values := make(map[string]any, len(pairs)/2)
	for i := 0; i < len(pairs); i += 2 {
		if _, again := values[pairs[i]]; again {
			return nil, marked{fmt.Sprintf("field %s is given twice: add one task per entry", shorten(pairs[i])), ErrBadEntry}
		}
		values[pairs[i]] = pairs[i+1]
	}
	return DecodeEntry(values, lim)
}

// entryData picks the one field that is allowed.
func entryData(values map[string]any) (data []byte, isJSON bool, err error) {
	var extra []string
	for name := range values {
		if name != FieldTask && name != FieldJSON {
			extra = append(extra, shorten(name))
		}
	}
	slices.Sort(extra)
	task, hasTask := values[FieldTask]
	text, hasJSON := values[FieldJSON]
	switch {
	case hasTask && hasJSON:
		return nil, false, marked{"has both fields, task and json: give the task once, in one of them", ErrBadEntry}
	case !hasTask && !hasJSON && len(extra) == 0:
		return nil, false, marked{"has no fields: " + example, ErrBadEntry}
	case !hasTask && !hasJSON:
		return nil, false, marked{fmt.Sprintf("has neither field task nor json but %s: %s", list(extra), example), ErrBadEntry}
	case len(extra) > 0:
		return nil, false, marked{fmt.Sprintf("has more fields than the task: remove %s; "+
			"what the task should carry along goes into its labels or env", list(extra)), ErrBadEntry}
	}
	v, name := task, FieldTask
	if hasJSON {
		v, name = text, FieldJSON
	}
	switch v := v.(type) {
	case string:
		return []byte(v), hasJSON, nil
	case []byte:
		return v, hasJSON, nil
	default:
		return nil, false, marked{fmt.Sprintf("field %s holds a %T: want a string or bytes", name, v), ErrBadEntry}
	}
}

// list shows at most five of the names.
func list(names []string) string {
	const most = 5
	if len(names) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}

func tooLarge(size, most int) error {
	return marked{fmt.Sprintf("task has %d bytes, at most %d are allowed: put large input into a file or an object store "+
		"and pass its address", size, most), ErrTooLarge}
}

func decodeJSON(data []byte) (*millracev1.Task, error) {
	t := new(millracev1.Task)
	err := protojs.Unmarshal(data, t)
	if err == nil {
		return t, nil
	}
	if !utf8.Valid(data) && proto.Unmarshal(data, t) == nil {
		return nil, errors.New("field json holds a binary message: put it into the field task")
	}
	return nil, fmt.Errorf("field json: %w", err)
}

// decodeProto leaves unknown fields to Validate, except when they only show that the bytes are something else.
func decodeProto(data []byte) (*millracev1.Task, error) {
	t := new(millracev1.Task)
	// The text of the library's error is left out: it says nothing to people and varies between builds.
	err := proto.Unmarshal(data, t)
	if err == nil && len(t.ProtoReflect().GetUnknown()) == 0 {
		return t, nil
	}
	if trimmed := bytes.TrimSpace(data); len(trimmed) > 0 && trimmed[0] == '{' && utf8.Valid(data) {
		return nil, errors.New("field task holds text that looks like JSON: put it into the field json")
	}
	if err != nil {
		return nil, errors.New("field task is not an encoded millrace.v1.Task: " +
			"encode it with the generated code of proto/millrace/v1/task.proto, or use the field json")
	}
	return t, nil
}

// unknownFields walks a message and reports, for each place, the first field number that is not known: it asks for
// something that would silently not happen.
func (v *validator) unknownFields(m protoreflect.Message, path string) {
	if raw := m.GetUnknown(); len(raw) > 0 {
		number, _, _ := protowire.ConsumeTag(raw)
		v.add(or(path, "task"), "field number %d is not known to this version: "+
			"leave it out, or update the dispatchers first", number)
	}
	for _, fd := range populatedMessages(m) {
		v.unknownFields(m.Get(fd).Message(), join(path, fd.JSONName()))
	}
}

// populatedMessages lists the fields that hold one message. Task has no lists or maps of messages; a test would
// notice the first one.
func populatedMessages(m protoreflect.Message) []protoreflect.FieldDescriptor {
	var found []protoreflect.FieldDescriptor
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		if fd := fields.Get(i); fd.Message() != nil && !fd.IsList() && !fd.IsMap() && m.Has(fd) {
			found = append(found, fd)
		}
	}
	return found
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}
