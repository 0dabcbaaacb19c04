package control

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// messages has one of each type that can be the body of a frame, by type.
func messages() map[Type]Message {
	return map[Type]Message{
		TypeChallenge:    &millracev1.ControlChallenge{Nonce: make([]byte, 32), DispatcherId: "d", ProtocolVersion: 1},
		TypeHello:        &millracev1.ControlHello{WorkerId: "w", Queues: []string{"default"}},
		TypeWelcome:      &millracev1.ControlWelcome{DispatcherId: "d"},
		TypeHeartbeat:    &millracev1.ControlHeartbeat{WorkerId: "w", Sequence: 7},
		TypeHeartbeatAck: &millracev1.ControlHeartbeatAck{Sequence: 7, Renewed: true},
		TypeHungry:       &millracev1.ControlHungry{Sequence: 3, Lanes: []string{"default"}, FreeSlots: 2},
		TypeRing:         &millracev1.ControlRing{Lane: "default"},
		TypeCancel:       &millracev1.ControlCancel{TaskId: "t", Attempt: 1},
		TypeSignal:       &millracev1.ControlSignal{TaskId: "t", Attempt: 1, Signal: "USR1"},
		TypeDrain:        &millracev1.ControlDrain{Reason: "kernel update"},
		TypeResume:       &millracev1.ControlResume{},
		TypeKill:         &millracev1.ControlKill{TaskId: "t", Attempt: 1},
		TypeAck:          &millracev1.ControlAck{Sequence: 3},
		TypeError:        &millracev1.ControlError{Message: "no"},
		TypePing:         &millracev1.ControlPing{Sequence: 1},
		TypePong:         &millracev1.ControlPong{Sequence: 1},
	}
}

func mustFrame(tb testing.TB, ms ...Message) []byte {
	tb.Helper()
	var out []byte
	for _, m := range ms {
		var err error
		if out, err = AppendFrame(out, m); err != nil {
			tb.Fatal(err)
		}
	}
	return out
}

// header makes one that lies as it is told.
func header(mag string, version byte, length uint32, t Type) []byte {
	h := append([]byte(mag), version, 0, 0, 0, 0, byte(t))
	binary.BigEndian.PutUint32(h[5:], length)
	return h
}

// The bytes of a frame are what other implementations build on: they are written out here and must not change.
func TestFrameBytes(t *testing.T) {
	t.Parallel()
	got := mustFrame(t, &millracev1.ControlRing{Lane: "gpu"})
	want := []byte{0x4d, 0x4c, 0x52, 0x43, 1, 0, 0, 0, 15, 7, 0x0a, 3, 'g', 'p', 'u'}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("frame (-want +got):\n%s", diff)
	}
}

func TestTypesAreComplete(t *testing.T) {
	t.Parallel()
	ms := messages()
	for typ := Type(1); typ < typeEnd; typ++ {
		m, ok := ms[typ]
		if !ok {
			t.Errorf("no message for type %d", typ)
			continue
		}
		if got, ok := TypeOf(m); !ok || got != typ {
			t.Errorf("TypeOf(%T) = %d, %v; want %d", m, got, ok, typ)
		}
		if strings.HasPrefix(typ.String(), "type(") || typ.String() == "" {
			t.Errorf("type %d has no name", typ)
		}
	}
	if got := Type(200).String(); got != "type(200)" {
		t.Errorf("unknown type is called %q", got)
	}
	if _, err := AppendFrame(nil, &millracev1.ControlAttempt{}); err == nil {
		t.Error("a message that is no frame was encoded")
	}
}

func TestReaderRoundTrip(t *testing.T) {
	t.Parallel()
	var stream []byte
	var want []Type
	for typ := Type(1); typ < typeEnd; typ++ {
		stream = append(stream, mustFrame(t, messages()[typ])...)
		want = append(want, typ)
	}
	// Between two large ones, so that the buffer grows, moves and shrinks.
	large := &millracev1.ControlDrain{Reason: strings.Repeat("x", 700_000)}
	stream = append(mustFrame(t, large), append(stream, mustFrame(t, large)...)...)
	want = append(append([]Type{TypeDrain}, want...), TypeDrain)

	for name, r := range map[string]io.Reader{
		"whole":       bytes.NewReader(stream),
		"half":        iotest.HalfReader(bytes.NewReader(stream)),
		"byte a time": iotest.OneByteReader(bytes.NewReader(stream)),
		"late error":  iotest.DataErrReader(bytes.NewReader(stream)),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFrameReader(r, MaxFrame)
			var got []Type
			for {
				typ, body, err := f.next()
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, typ)
				m := messages()[typ]
				wantMsg := m
				if len(body) > 600_000 {
					wantMsg = large
				}
				m = m.ProtoReflect().New().Interface()
				if err := decode(typ, body, m); err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(wantMsg, m, protocmp.Transform()); diff != "" {
					t.Errorf("%s (-want +got):\n%s", typ, diff)
				}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("types (-want +got):\n%s", diff)
			}
		})
	}
}

func TestReaderRefuses(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		in   []byte
		want BadFrame
	}{
		{"http", []byte("GET / HTTP/1.1\r\n\r\n"), BadMagic},
		{"wrong from the first byte", []byte{0x16}, BadMagic},
		{"last letter of the magic", header("MLRD", 1, 10, TypePing), BadMagic},
		{"version 0", header(magic, 0, 10, TypePing), BadVersion},
		{"version 2, seen before the length", []byte("MLRC\x02"), BadVersion},
		{"length 0", header(magic, 1, 0, TypePing), BadLength},
		{"length of the body instead of the frame", header(magic, 1, 9, TypePing), BadLength},
		{"one too long", header(magic, 1, MaxFrame+1, TypePing), BadLength},
		{"4 GiB", header(magic, 1, math.MaxUint32, TypePing), BadLength},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			// Nothing more may be asked for: an honest answer needs no further byte.
			_, _, err := newFrameReader(io.MultiReader(bytes.NewReader(tt.in), iotest.ErrReader(errors.New("read on"))), MaxFrame).next()
			bad, ok := errors.AsType[*FrameError](err)
			if !ok || bad.Kind != tt.want {
				t.Errorf("got %v, want kind %s", err, tt.want)
			}
		})
	}
}

func TestReaderTruncated(t *testing.T) {
	t.Parallel()
	whole := mustFrame(t, &millracev1.ControlCancel{TaskId: "t", Attempt: 1})
	for n := range whole {
		_, _, err := newFrameReader(bytes.NewReader(whole[:n]), MaxFrame).next()
		want := io.ErrUnexpectedEOF
		if n == 0 {
			want = io.EOF
		}
		if !errors.Is(err, want) {
			t.Errorf("after %d bytes: %v, want %v", n, err, want)
		}
	}
}

// A header that claims a megabyte gets memory only as the bytes come.
func TestReaderMemoryFollowsBytes(t *testing.T) {
	t.Parallel()
	in := append(header(magic, 1, MaxFrame, TypePing), make([]byte, 3000)...)
	f := newFrameReader(bytes.NewReader(in), MaxFrame)
	if _, _, err := f.next(); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatalf("got %v", err)
	}
	if len(f.buf) > 8<<10 {
		t.Errorf("3 KB of a frame took a buffer of %d bytes", len(f.buf))
	}
}

func TestReaderAllocatesNothing(t *testing.T) { //nolint:paralleltest // AllocsPerRun counts the whole process
	// Not parallel: AllocsPerRun counts the whole process.
	frame := mustFrame(t, &millracev1.ControlRing{Lane: "default"})
	src := &loop{data: frame}
	f := newFrameReader(src, MaxFrame)
	if n := testing.AllocsPerRun(1000, func() {
		if _, _, err := f.next(); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("reading a frame allocates %v times", n)
	}
	m := &millracev1.ControlRing{Lane: "default"}
	buf := make([]byte, 0, 256)
	if n := testing.AllocsPerRun(1000, func() { buf, _ = AppendFrame(buf[:0], m) }); n > 0 {
		t.Errorf("writing a frame allocates %v times", n)
	}
}

// loop repeats data for ever.
type loop struct {
	data []byte
	at   int
}

func (l *loop) Read(p []byte) (int, error) {
	n := copy(p, l.data[l.at:])
	l.at = (l.at + n) % len(l.data)
	return n, nil
}

func TestFrameTooLarge(t *testing.T) {
	t.Parallel()
	dst := []byte("before")
	got, err := AppendFrame(dst, &millracev1.ControlDrain{Reason: strings.Repeat("x", MaxFrame)})
	if err == nil || string(got) != "before" {
		t.Errorf("got %d bytes and error %v", len(got), err)
	}
}

func FuzzFrame(f *testing.F) {
	for _, m := range messages() {
		f.Add(mustFrame(f, m), uint8(255))
	}
	f.Add(header(magic, 1, math.MaxUint32, TypePing), uint8(1))
	f.Add(header(magic, 1, 9, TypePing), uint8(3))
	f.Add(header(magic, 2, 10, TypePing), uint8(10))
	f.Add(header(magic, 1, 12, Type(99)), uint8(4))
	f.Add(append(mustFrame(f, &millracev1.ControlPing{}), "GET / HTTP/1.1"...), uint8(7))
	f.Add([]byte{}, uint8(0))
	f.Fuzz(func(t *testing.T, in []byte, step uint8) {
		// Whatever arrives, and in whatever pieces: the same frames, memory within bounds, and no frame that was not there.
		whole, wholeErr := readAll(bytes.NewReader(in))
		pieces, piecesErr := readAll(&stepReader{r: bytes.NewReader(in), step: int(step)%64 + 1})
		if diff := cmp.Diff(whole, pieces); diff != "" {
			t.Fatalf("pieces read otherwise (-whole +pieces):\n%s", diff)
		}
		if kind(wholeErr) != kind(piecesErr) {
			t.Fatalf("pieces end otherwise: %v, %v", wholeErr, piecesErr)
		}
		for _, fr := range whole {
			checkBody(t, fr)
		}
		if len(whole) > 0 && !bytes.HasPrefix(in, whole[0].bytes()) {
			t.Fatal("the first frame is not what the bytes begin with")
		}
	})
}

type rawFrame struct {
	Type Type
	Body string
}

func (r rawFrame) bytes() []byte {
	return append(header(magic, FrameVersion, uint32(HeaderSize+len(r.Body)), r.Type), r.Body...)
}

func readAll(r io.Reader) ([]rawFrame, error) {
	f := newFrameReader(r, MaxFrame)
	var all []rawFrame
	for {
		t, body, err := f.next()
		if err != nil {
			return all, err
		}
		all = append(all, rawFrame{t, string(body)})
	}
}

func kind(err error) string {
	if bad, ok := errors.AsType[*FrameError](err); ok {
		return string(bad.Kind)
	}
	return err.Error()
}

// checkBody decodes the body as its type; what can be read can be written and read again, and is then the same.
func checkBody(t *testing.T, fr rawFrame) {
	t.Helper()
	like, ok := messages()[fr.Type]
	if !ok {
		return
	}
	m := like.ProtoReflect().New().Interface()
	if decode(fr.Type, []byte(fr.Body), m) != nil {
		return
	}
	again, err := AppendFrame(nil, m)
	if err != nil {
		if len(fr.Body) > MaxFrame/2 {
			return // writing can be longer than an unusual reading
		}
		t.Fatal(err)
	}
	m2 := like.ProtoReflect().New().Interface()
	if err := decode(fr.Type, again[HeaderSize:], m2); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(m, m2) {
		t.Fatalf("%s changed on its way", fr.Type)
	}
}

type stepReader struct {
	r    io.Reader
	step int
}

func (s *stepReader) Read(p []byte) (int, error) { return s.r.Read(p[:min(len(p), s.step)]) }
