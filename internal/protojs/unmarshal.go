package protojs

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

const (
	// maxDepth of nested objects and lists. Our messages need 5.
	maxDepth = 32
	// maxProblems that one error lists.
	maxProblems = 20
)

// Unmarshal decodes one JSON object into m, whose former content is lost. The error lists every problem, a line each;
// only a syntax error stands alone, since nothing behind it can be trusted. After an error the content of m is
// undefined.
func Unmarshal(data []byte, m proto.Message) error {
	if err := checkText(data); err != nil {
		return err
	}
	proto.Reset(m)
	d := decoder{dec: json.NewDecoder(bytes.NewReader(data))}
	d.dec.UseNumber()
	if tok := d.next(); tok == json.Delim('{') {
		d.object(m.ProtoReflect())
	} else if d.err == nil {
		d.problem("want a JSON object such as {\"…\": …}, found %s", describe(tok))
	}
	if d.err != nil {
		return d.err
	}
	if d.more > 0 {
		d.problems = append(d.problems, fmt.Errorf("and %d more", d.more))
	}
	return errors.Join(d.problems...)
}

// checkText refuses what is not one well-formed JSON value in clean UTF-8.
func checkText(data []byte) error {
	switch {
	case len(bytes.TrimSpace(data)) == 0:
		return errors.New("empty: want a JSON object")
	case bytes.HasPrefix(data, []byte("\xef\xbb\xbf")):
		return errors.New("begins with a byte order mark: write it as UTF-8 without one")
	case bytes.HasPrefix(data, []byte("\xff\xfe")), bytes.HasPrefix(data, []byte("\xfe\xff")):
		return errors.New("looks like UTF-16: write it as UTF-8 without a byte order mark")
	case !utf8.Valid(data):
		return fmt.Errorf("not valid UTF-8 at byte %d: bytes that are not text go into base64 fields", invalidAt(data))
	}
	var raw json.RawMessage
	if err := json.Unmarshal(data, &raw); err != nil {
		return syntaxProblem(data, err)
	}
	if i := loneSurrogate(data); i >= 0 {
		return fmt.Errorf("half a character at byte %d: %s needs its other half (a surrogate pair), or write the character itself",
			i, data[i:i+6])
	}
	return nil
}

func invalidAt(data []byte) int {
	for i := 0; i < len(data); {
		r, n := utf8.DecodeRune(data[i:])
		if r == utf8.RuneError && n == 1 {
			return i
		}
		i += n
	}
	return len(data)
}

// syntaxProblem says where, shows the place, and knows the two mistakes that everybody makes.
func syntaxProblem(data []byte, err error) error {
	var syn *json.SyntaxError
	if !errors.As(err, &syn) {
		return fmt.Errorf("not JSON: %w", err)
	}
	at := int(min(max(syn.Offset-1, 0), int64(len(data)-1)))
	hint := ""
	switch {
	case strings.HasPrefix(syn.Error(), "unexpected end"):
		return errors.New("not JSON: it ends too early: a closing } or ] or \" is missing")
	case strings.Contains(syn.Error(), "after top-level value"):
		hint = ": only one object is allowed"
	case data[at] == '\'':
		hint = `: JSON wants double quotes (")`
	case data[at] == '}' || data[at] == ']':
		hint = ": is there a comma too many?"
	}
	start := max(0, at-20)
	for start < at && !utf8.RuneStart(data[start]) {
		start++
	}
	return fmt.Errorf("not JSON: %s at byte %d, behind %q%s", syn.Error(), at, data[start:at], hint)
}

// decoder walks the tokens of a text that was checked before.
type decoder struct {
	dec      *json.Decoder
	depth    int
	path     []string // of the value at hand, in pieces that only need to be joined
	problems []error
	more     int
	err      error // ends the walk
}

// problem notes something wrong at the present path and lets the walk go on.
func (d *decoder) problem(format string, args ...any) {
	if len(d.problems) >= maxProblems {
		d.more++
		return
	}
	text := fmt.Sprintf(format, args...)
	if p := d.where(); p != "" {
		text = p + ": " + text
	}
	d.problems = append(d.problems, errors.New(text))
}

func (d *decoder) where() string { return strings.TrimPrefix(strings.Join(d.path, ""), ".") }

func (d *decoder) push(piece string) { d.path = append(d.path, piece) }
func (d *decoder) pop()              { d.path = d.path[:len(d.path)-1] }

// next returns the next token, or nil with d.err set.
func (d *decoder) next() json.Token {
	if d.err != nil {
		return nil
	}
	tok, err := d.dec.Token()
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		d.err = fmt.Errorf("not JSON: %w", err)
		return nil
	}
	if delim, ok := tok.(json.Delim); ok {
		switch delim {
		case '{', '[':
			d.depth++
		default:
			d.depth--
		}
		if d.depth > maxDepth {
			d.err = fmt.Errorf("nested deeper than %d levels", maxDepth)
			return nil
		}
	}
	return tok
}

// inside is true while the object or list at hand has more; at its end it takes the closing token.
func (d *decoder) inside() bool {
	if d.err != nil {
		return false
	}
	if d.dec.More() {
		return true
	}
	d.next()
	return false
}

// skip passes over the rest of a value of which tok was the first token.
func (d *decoder) skip(tok json.Token) {
	if delim, ok := tok.(json.Delim); !ok || delim == '}' || delim == ']' {
		return
	}
	for level := d.depth - 1; d.depth > level && d.err == nil; {
		d.next()
	}
}

// object reads fields up to the closing brace; the opening one was read.
func (d *decoder) object(m protoreflect.Message) {
	md := m.Descriptor()
	var seen []protoreflect.FieldNumber
	for d.inside() {
		key, _ := d.next().(string)
		fd := md.Fields().ByJSONName(key)
		if fd == nil {
			fd = md.Fields().ByName(protoreflect.Name(key))
		}
		if fd == nil {
			d.unknown(md, key)
			continue
		}
		d.push("." + fd.JSONName())
		if slices.Contains(seen, fd.Number()) {
			d.problem("given twice: remove one")
			d.skip(d.next())
		} else {
			seen = append(seen, fd.Number())
			d.field(m, fd)
		}
		d.pop()
	}
}

// unknown notes a name that the message does not have, with the nearest one that it has.
func (d *decoder) unknown(md protoreflect.MessageDescriptor, key string) {
	at := ""
	switch {
	case len(d.path) == 0: // the name says it all
	case plainName(key):
		at = " at " + d.where() + "." + key
	default:
		at = " in " + d.where()
	}
	path := d.path
	d.path = nil
	d.problem("unknown field %q%s: %s", shorten(key), at, suggest(md, key))
	d.path = path
	d.skip(d.next())
}

func (d *decoder) field(m protoreflect.Message, fd protoreflect.FieldDescriptor) {
	tok := d.next()
	if tok == nil {
		return // null is the same as absent
	}
	if inRealOneof(fd) {
		if other := m.WhichOneof(fd.ContainingOneof()); other != nil {
			d.problem("cannot be given together with %s: keep one of the two", other.JSONName())
			d.skip(tok)
			return
		}
	}
	switch {
	case fd.IsList():
		d.list(m, fd, tok)
	case fd.IsMap():
		d.mapping(m, fd, tok)
	case fd.Message() != nil:
		// Set even when something inside is wrong, so that a second member of the oneof is noticed.
		v := m.NewField(fd)
		m.Set(fd, v)
		d.message(v.Message(), fd, tok)
	default:
		if v, ok := d.scalar(fd, tok); ok {
			m.Set(fd, v)
		}
	}
}

func (d *decoder) list(m protoreflect.Message, fd protoreflect.FieldDescriptor, tok json.Token) {
	if tok != json.Delim('[') {
		d.mismatch(fd, tok)
		return
	}
	l := m.Mutable(fd).List()
	for i := 0; d.inside(); i++ {
		d.push(fmt.Sprintf("[%d]", i))
		tok := d.next()
		switch {
		case d.err != nil:
		case fd.Message() != nil:
			v := l.NewElement()
			d.message(v.Message(), fd, tok)
			l.Append(v)
		default:
			if v, ok := d.scalar(fd, tok); ok {
				l.Append(v)
			}
		}
		d.pop()
	}
}

func (d *decoder) mapping(m protoreflect.Message, fd protoreflect.FieldDescriptor, tok json.Token) {
	if tok != json.Delim('{') {
		d.mismatch(fd, tok)
		return
	}
	entries := m.Mutable(fd).Map()
	seen := make(map[string]bool)
	for d.inside() {
		key, _ := d.next().(string)
		d.push(fmt.Sprintf("[%q]", shorten(key)))
		d.entry(entries, fd, key, seen[key])
		seen[key] = true
		d.pop()
	}
}

func (d *decoder) entry(entries protoreflect.Map, fd protoreflect.FieldDescriptor, key string, again bool) {
	tok := d.next()
	k, ok := d.mapKey(fd.MapKey(), key)
	switch {
	case d.err != nil:
	case again || ok && entries.Has(k): // numbers have several spellings
		d.problem("given twice: remove one")
		d.skip(tok)
	case !ok:
		d.skip(tok)
	case fd.MapValue().Message() != nil:
		v := entries.NewValue()
		d.message(v.Message(), fd.MapValue(), tok)
		entries.Set(k, v)
	default:
		if v, ok := d.scalar(fd.MapValue(), tok); ok {
			entries.Set(k, v)
		}
	}
}

func (d *decoder) message(m protoreflect.Message, fd protoreflect.FieldDescriptor, tok json.Token) {
	switch m.Descriptor().FullName() {
	case durationName:
		d.duration(m, tok)
	case timestampName:
		d.timestamp(m, tok)
	default:
		if tok != json.Delim('{') {
			d.mismatch(fd, tok)
			return
		}
		d.object(m)
	}
}
