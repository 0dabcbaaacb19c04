package protojs

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// scalar decodes one value that is not a message. It notes what is wrong and passes over it.
func (d *decoder) scalar(fd protoreflect.FieldDescriptor, tok json.Token) (protoreflect.Value, bool) {
	switch fd.Kind() {
	case protoreflect.BoolKind:
		if b, ok := tok.(bool); ok {
			return protoreflect.ValueOfBool(b), true
		}
	case protoreflect.StringKind:
		if s, ok := tok.(string); ok {
			return protoreflect.ValueOfString(s), true
		}
	case protoreflect.BytesKind:
		if s, ok := tok.(string); ok {
			return d.bytes(s)
		}
	case protoreflect.EnumKind:
		if s, ok := tok.(string); ok {
			return d.enum(fd.Enum(), s)
		}
	default:
		if n, ok := tok.(json.Number); ok {
			return d.number(fd.Kind(), n.String())
		}
	}
	d.mismatchOne(fd, tok)
	return protoreflect.Value{}, false
}

func (d *decoder) bytes(s string) (protoreflect.Value, bool) {
	b, ok := decodeBase64(s)
	if !ok {
		d.problem("want bytes in base64, found %q", shorten(s))
	}
	return protoreflect.ValueOfBytes(b), ok
}

func (d *decoder) enum(ed protoreflect.EnumDescriptor, s string) (protoreflect.Value, bool) {
	var words []string
	for i := range ed.Values().Len() {
		v := ed.Values().Get(i)
		word := enumWord(ed, v)
		if word == s {
			return protoreflect.ValueOfEnum(v.Number()), true
		}
		if v.Number() != 0 {
			words = append(words, word)
		}
	}
	d.problem("unknown word %q: want one of %s", shorten(s), strings.Join(words, ", "))
	return protoreflect.Value{}, false
}

func (d *decoder) number(kind protoreflect.Kind, n string) (protoreflect.Value, bool) {
	var v protoreflect.Value
	switch kind {
	case protoreflect.DoubleKind, protoreflect.FloatKind:
		return d.float(kind, n)
	case protoreflect.Uint32Kind, protoreflect.Fixed32Kind, protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
		bits := sizeOf(kind)
		u, err := strconv.ParseUint(n, 10, bits)
		if err != nil {
			return v, d.badInteger(n, "0", strconv.FormatUint(1<<(bits-1)-1+1<<(bits-1), 10))
		}
		if bits == 32 {
			return protoreflect.ValueOfUint32(uint32(u)), true //nolint:gosec // parsed as 32 bits
		}
		return protoreflect.ValueOfUint64(u), true
	default:
		bits := sizeOf(kind)
		i, err := strconv.ParseInt(n, 10, bits)
		if err != nil {
			most := int64(1<<(bits-1) - 1)
			return v, d.badInteger(n, strconv.FormatInt(-most-1, 10), strconv.FormatInt(most, 10))
		}
		if bits == 32 {
			return protoreflect.ValueOfInt32(int32(i)), true //nolint:gosec // parsed as 32 bits
		}
		return protoreflect.ValueOfInt64(i), true
	}
}

func sizeOf(kind protoreflect.Kind) int {
	switch kind {
	case protoreflect.Int32Kind, protoreflect.Sint32Kind, protoreflect.Sfixed32Kind, protoreflect.Uint32Kind, protoreflect.Fixed32Kind:
		return 32
	default:
		return 64
	}
}

// badInteger notes a number that is no whole number or too large, and returns false for its caller.
func (d *decoder) badInteger(n, least, most string) bool {
	if strings.ContainsAny(n, ".eE") {
		d.problem("want a whole number, found %s: write it without a fraction or an exponent", shorten(n))
	} else {
		d.problem("%s is out of range: want %s to %s", shorten(n), least, most)
	}
	return false
}

func (d *decoder) float(kind protoreflect.Kind, n string) (protoreflect.Value, bool) {
	bits := 64
	if kind == protoreflect.FloatKind {
		bits = 32
	}
	f, err := strconv.ParseFloat(n, bits)
	if err != nil {
		d.problem("%s is out of range for a number with %d bits", shorten(n), bits)
		return protoreflect.Value{}, false
	}
	if bits == 32 {
		return protoreflect.ValueOfFloat32(float32(f)), true
	}
	return protoreflect.ValueOfFloat64(f), true
}

func (d *decoder) mapKey(fd protoreflect.FieldDescriptor, key string) (protoreflect.MapKey, bool) {
	switch fd.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(key).MapKey(), true
	case protoreflect.BoolKind:
		if key == "true" || key == "false" {
			return protoreflect.ValueOfBool(key == "true").MapKey(), true
		}
		d.problem("want the key true or false, found %q", shorten(key))
		return protoreflect.MapKey{}, false
	default:
		if !looksNumeric(key) {
			d.problem("want a whole number as the key, found %q", shorten(key))
			return protoreflect.MapKey{}, false
		}
		v, ok := d.number(fd.Kind(), key)
		if !ok {
			return protoreflect.MapKey{}, false
		}
		return v.MapKey(), true
	}
}

func (d *decoder) duration(m protoreflect.Message, tok json.Token) {
	const want = `want a duration such as "90s", "2m" or "1h30m"`
	s, ok := tok.(string)
	if !ok {
		hint := ""
		if n, isNumber := tok.(json.Number); isNumber {
			hint = fmt.Sprintf(`: if seconds are meant, write "%ss"`, shorten(n.String()))
		}
		d.problem("%s, found %s%s", want, describe(tok), hint)
		d.skip(tok)
		return
	}
	v, ok := parseDuration(s)
	if !ok {
		d.problem("%s, found %q", want, shorten(s))
		return
	}
	setTime(m, v.GetSeconds(), v.GetNanos())
}

func (d *decoder) timestamp(m protoreflect.Message, tok json.Token) {
	const want = `want a time such as "2030-01-31T12:00:00Z"`
	s, ok := tok.(string)
	if !ok {
		d.problem("%s, found %s", want, describe(tok))
		d.skip(tok)
		return
	}
	t, err := time.Parse(time.RFC3339Nano, s)
	v := timestamppb.New(t)
	if err != nil || !v.IsValid() {
		d.problem("%s (RFC 3339 with a zone), found %q", want, shorten(s))
		return
	}
	setTime(m, v.GetSeconds(), v.GetNanos())
}

// setTime fills a Duration or a Timestamp, whose fields have the same numbers.
func setTime(m protoreflect.Message, seconds int64, nanos int32) {
	fields := m.Descriptor().Fields()
	if seconds != 0 {
		m.Set(fields.ByNumber(1), protoreflect.ValueOfInt64(seconds))
	}
	if nanos != 0 {
		m.Set(fields.ByNumber(2), protoreflect.ValueOfInt32(nanos))
	}
}
