package protojs

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// MarshalOptions say how to write.
type MarshalOptions struct {
	// Indent by which each level is set in; one line when empty. Only spaces and tabs.
	Indent string
	// Full also writes what is not set: zero numbers, false, "", [] and {}, and null for an enum, a message or an
	// optional field that is absent, so that a program finds every key. A Task is always written as its author gave
	// it, because there "absent" asks for the default.
	Full bool
}

// taskName is the message that Full does not fill up.
const taskName protoreflect.FullName = "millrace.v1.Task"

// Marshal encodes m on one line, without what is not set.
func Marshal(m proto.Message) ([]byte, error) { return MarshalOptions{}.Append(nil, m) }

// Marshal encodes m.
func (o MarshalOptions) Marshal(m proto.Message) ([]byte, error) { return o.Append(nil, m) }

// Append encodes m behind dst.
func (o MarshalOptions) Append(dst []byte, m proto.Message) ([]byte, error) {
	if m == nil {
		return nil, errors.New("encode JSON: no message")
	}
	r := m.ProtoReflect()
	e := encoder{out: dst, full: o.Full}
	if o.Indent != "" {
		e.out = nil
	}
	if err := e.message(r); err != nil {
		return nil, fmt.Errorf("encode %s as JSON: %w", r.Descriptor().Name(), err)
	}
	if o.Indent == "" {
		return e.out, nil
	}
	buf := bytes.NewBuffer(dst)
	if err := json.Indent(buf, e.out, "", o.Indent); err != nil {
		return nil, fmt.Errorf("indent JSON: %w", err)
	}
	return buf.Bytes(), nil
}

// encoder appends one message.
type encoder struct {
	out  []byte
	full bool
}

func (e *encoder) message(m protoreflect.Message) error {
	switch m.Descriptor().FullName() {
	case durationName:
		return e.duration(m)
	case timestampName:
		return e.timestamp(m)
	case taskName:
		defer func(full bool) { e.full = full }(e.full)
		e.full = false
	}
	e.out = append(e.out, '{')
	first := true
	for _, fd := range fieldsByNumber(m.Descriptor()) {
		if !m.Has(fd) && (!e.full || inRealOneof(fd)) || unspecified(fd, m) && !e.full {
			continue
		}
		if !first {
			e.out = append(e.out, ',')
		}
		first = false
		e.out = append(e.out, '"')
		e.out = append(e.out, fd.JSONName()...)
		e.out = append(e.out, '"', ':')
		if err := e.field(m, fd); err != nil {
			return fmt.Errorf("%s: %w", fd.JSONName(), err)
		}
	}
	e.out = append(e.out, '}')
	return nil
}

// fieldsByNumber lists the fields in the order of their numbers, which is not always that of the source.
func fieldsByNumber(md protoreflect.MessageDescriptor) []protoreflect.FieldDescriptor {
	fds := md.Fields()
	list := make([]protoreflect.FieldDescriptor, fds.Len())
	sorted := true
	for i := range list {
		list[i] = fds.Get(i)
		sorted = sorted && (i == 0 || list[i-1].Number() < list[i].Number())
	}
	if !sorted {
		slices.SortFunc(list, func(a, b protoreflect.FieldDescriptor) int { return int(a.Number()) - int(b.Number()) })
	}
	return list
}

func inRealOneof(fd protoreflect.FieldDescriptor) bool {
	od := fd.ContainingOneof()
	return od != nil && !od.IsSynthetic()
}

// unspecified is true for a single enum that says nothing, even when it says so explicitly.
func unspecified(fd protoreflect.FieldDescriptor, m protoreflect.Message) bool {
	return fd.Enum() != nil && !fd.IsList() && !fd.IsMap() && m.Get(fd).Enum() == 0
}

func (e *encoder) field(m protoreflect.Message, fd protoreflect.FieldDescriptor) error {
	switch {
	case fd.IsList():
		return e.list(m.Get(fd).List(), fd)
	case fd.IsMap():
		return e.mapping(m.Get(fd).Map(), fd)
	case fd.HasPresence() && !m.Has(fd), unspecified(fd, m):
		e.out = append(e.out, "null"...)
		return nil
	}
	return e.single(m.Get(fd), fd)
}

func (e *encoder) list(l protoreflect.List, fd protoreflect.FieldDescriptor) error {
	e.out = append(e.out, '[')
	for i := range l.Len() {
		if i > 0 {
			e.out = append(e.out, ',')
		}
		if err := e.single(l.Get(i), fd); err != nil {
			return fmt.Errorf("element %d: %w", i, err)
		}
	}
	e.out = append(e.out, ']')
	return nil
}

func (e *encoder) mapping(m protoreflect.Map, fd protoreflect.FieldDescriptor) error {
	keys := make([]protoreflect.MapKey, 0, m.Len())
	m.Range(func(k protoreflect.MapKey, _ protoreflect.Value) bool {
		keys = append(keys, k)
		return true
	})
	slices.SortFunc(keys, func(a, b protoreflect.MapKey) int { return strings.Compare(a.String(), b.String()) })
	e.out = append(e.out, '{')
	for i, k := range keys {
		if i > 0 {
			e.out = append(e.out, ',')
		}
		if err := e.str(k.String()); err != nil {
			return fmt.Errorf("key: %w", err)
		}
		e.out = append(e.out, ':')
		if err := e.single(m.Get(k), fd.MapValue()); err != nil {
			return fmt.Errorf("key %q: %w", k.String(), err)
		}
	}
	e.out = append(e.out, '}')
	return nil
}

func (e *encoder) single(v protoreflect.Value, fd protoreflect.FieldDescriptor) error {
	switch fd.Kind() {
	case protoreflect.BoolKind:
		e.out = strconv.AppendBool(e.out, v.Bool())
	case protoreflect.StringKind:
		return e.str(v.String())
	case protoreflect.BytesKind:
		e.out = append(e.out, '"')
		e.out = base64.StdEncoding.AppendEncode(e.out, v.Bytes())
		e.out = append(e.out, '"')
	case protoreflect.EnumKind:
		e.enum(v.Enum(), fd.Enum())
	case protoreflect.MessageKind, protoreflect.GroupKind:
		return e.message(v.Message())
	case protoreflect.FloatKind:
		return e.float(v.Float(), 32)
	case protoreflect.DoubleKind:
		return e.float(v.Float(), 64)
	case protoreflect.Uint32Kind, protoreflect.Uint64Kind, protoreflect.Fixed32Kind, protoreflect.Fixed64Kind:
		e.out = strconv.AppendUint(e.out, v.Uint(), 10)
	default:
		e.out = strconv.AppendInt(e.out, v.Int(), 10)
	}
	return nil
}

// enum writes the word. A value that this version does not know, from a newer one, is written as its number: a reader
// that shows it is better off than one that fails.
func (e *encoder) enum(n protoreflect.EnumNumber, ed protoreflect.EnumDescriptor) {
	v := ed.Values().ByNumber(n)
	if v == nil {
		e.out = strconv.AppendInt(e.out, int64(n), 10)
		return
	}
	e.out = strconv.AppendQuote(e.out, enumWord(ed, v))
}

func (e *encoder) float(f float64, bits int) error {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return fmt.Errorf("%v has no form in JSON", f)
	}
	format := byte('f')
	if abs := math.Abs(f); abs != 0 && (abs < 1e-6 || abs >= 1e21) {
		format = 'e'
	}
	e.out = strconv.AppendFloat(e.out, f, format, -1, bits)
	return nil
}

func (e *encoder) duration(m protoreflect.Message) error {
	d := &durationpb.Duration{Seconds: intField(m, 1), Nanos: int32(intField(m, 2))} //nolint:gosec // an int32 field
	if err := d.CheckValid(); err != nil {
		return fmt.Errorf("duration of %d s and %d ns is out of range or has two signs", d.GetSeconds(), d.GetNanos())
	}
	e.out = append(e.out, '"')
	e.out = append(e.out, formatDuration(d)...)
	e.out = append(e.out, '"')
	return nil
}

func (e *encoder) timestamp(m protoreflect.Message) error {
	t := &timestamppb.Timestamp{Seconds: intField(m, 1), Nanos: int32(intField(m, 2))} //nolint:gosec // an int32 field
	if err := t.CheckValid(); err != nil {
		return fmt.Errorf("time of %d s and %d ns since 1970 is out of range", t.GetSeconds(), t.GetNanos())
	}
	e.out = append(e.out, '"')
	e.out = t.AsTime().AppendFormat(e.out, time.RFC3339Nano)
	e.out = append(e.out, '"')
	return nil
}

func intField(m protoreflect.Message, n protoreflect.FieldNumber) int64 {
	return m.Get(m.Descriptor().Fields().ByNumber(n)).Int()
}

const hexDigits = "0123456789abcdef"

// str writes a string with as few escapes as JSON allows, plus those that keep it harmless on a terminal and inside
// a script of an HTML page: control characters, DEL, C1, <, >, & and the two line separators of JavaScript.
func (e *encoder) str(s string) error {
	if !utf8.ValidString(s) {
		return fmt.Errorf("%q is not valid UTF-8", shorten(s))
	}
	e.out = append(e.out, '"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			e.out = append(e.out, '\\', byte(r))
		case r == '\n':
			e.out = append(e.out, '\\', 'n')
		case r == '\r':
			e.out = append(e.out, '\\', 'r')
		case r == '\t':
			e.out = append(e.out, '\\', 't')
		case r < 0x20, r >= 0x7f && r < 0xa0, r == '<', r == '>', r == '&', r == 0x2028, r == 0x2029:
			e.out = append(e.out, '\\', 'u', hexDigits[r>>12&15], hexDigits[r>>8&15], hexDigits[r>>4&15], hexDigits[r&15])
		default:
			e.out = utf8.AppendRune(e.out, r)
		}
	}
	e.out = append(e.out, '"')
	return nil
}
