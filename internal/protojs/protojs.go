// Package protojs writes and reads our Protobuf messages as JSON for people: the JSON door of the tasks stream, the
// HTTP/JSON API and the --json output of the command line all use this one codec.
//
// It differs from protojson where protojson is made for machines: enums are lower-case words without their prefix,
// durations are Go's ("2m"), every integer is a JSON number, unknown fields and duplicate keys are refused with the
// path and a suggestion, and the output is byte for byte the same every time. It knows nothing about what the
// messages mean; that is the work of package spec.
//
// In short: names are lowerCamelCase (the proto names are read too), times RFC 3339, bytes base64, null is the same as
// absent, an unspecified enum is left out, and 64-bit integers are numbers as well, so readers in JavaScript must take
// care beyond 2^53.
package protojs

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Names of the codec as Connect looks it up by content type. A server or client needs both, because some programs
// send the character set along.
const (
	CodecName        = "json"
	CodecNameCharset = "json; charset=utf-8"
)

// Codec is the JSON codec for Connect servers and clients; it replaces the built-in one of the same name. The zero
// value is ready to use, and all methods are safe for concurrent use.
type Codec struct {
	// Label is what Name returns; CodecName when empty.
	Label string
	// Full makes Marshal write fields that are not set, as MarshalOptions.Full does.
	Full bool
}

// Name returns the name under which Connect registers the codec.
func (c Codec) Name() string {
	if c.Label == "" {
		return CodecName
	}
	return c.Label
}

// Marshal encodes a proto.Message.
func (c Codec) Marshal(message any) ([]byte, error) { return c.MarshalAppend(nil, message) }

// MarshalStable is Marshal: its output is always deterministic.
func (c Codec) MarshalStable(message any) ([]byte, error) { return c.MarshalAppend(nil, message) }

// MarshalAppend encodes a proto.Message behind dst.
func (c Codec) MarshalAppend(dst []byte, message any) ([]byte, error) {
	m, ok := message.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("encode %T as JSON: not a Protobuf message", message)
	}
	return MarshalOptions{Full: c.Full}.Append(dst, m)
}

// Unmarshal decodes into a proto.Message, whose former content is lost.
func (c Codec) Unmarshal(data []byte, message any) error {
	m, ok := message.(proto.Message)
	if !ok {
		return fmt.Errorf("decode JSON into %T: not a Protobuf message", message)
	}
	return Unmarshal(data, m)
}

// IsBinary tells Connect that the output is text.
func (c Codec) IsBinary() bool { return false }

const (
	durationName  protoreflect.FullName = "google.protobuf.Duration"
	timestampName protoreflect.FullName = "google.protobuf.Timestamp"
)

// enumPrefix is what the names of an enum's values begin with: WORKER_STATE_ for WorkerState.
func enumPrefix(ed protoreflect.EnumDescriptor) string {
	var b strings.Builder
	for i, r := range string(ed.Name()) {
		if i > 0 && r >= 'A' && r <= 'Z' {
			b.WriteByte('_')
		}
		b.WriteRune(r)
	}
	return strings.ToUpper(b.String()) + "_"
}

// enumWord is the word for a value: STATE_QUEUED is "queued".
func enumWord(ed protoreflect.EnumDescriptor, v protoreflect.EnumValueDescriptor) string {
	return strings.ToLower(strings.TrimPrefix(string(v.Name()), enumPrefix(ed)))
}
