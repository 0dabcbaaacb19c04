package control

import (
	"encoding/binary"
	"fmt"
	"io"
	"strconv"

	"google.golang.org/protobuf/proto"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// A frame is a header of ten bytes and a body of Protobuf:
//
//	0  4  magic 4D 4C 52 43, "MLRC"
//	4  1  version, 1
//	5  4  length of the whole frame, header included, big-endian
//	9  1  type
//	10 …  body
const (
	// HeaderSize is the size of the header of a frame, and so of the shortest frame.
	HeaderSize = 10
	// MaxFrame is the size of the longest frame, header included.
	MaxFrame = 1 << 20
	// FrameVersion is the only version of the frame's layout. What the bodies mean has a version of its own, agreed
	// on in the handshake.
	FrameVersion = 1

	magic = "MLRC"
)

// Type is the type of a frame. The numbers are part of the protocol: none changes its meaning, none is used again.
// A type that the receiver does not know is skipped and counted.
type Type uint8

// The types of frames, with the message that is their body. D is the dispatcher, A the agent.
const (
	TypeChallenge    Type = 1  // D→A ControlChallenge: first frame on every connection
	TypeHello        Type = 2  // A→D ControlHello: who I am, proof that I know the token
	TypeWelcome      Type = 3  // D→A ControlWelcome: the connection is registered
	TypeHeartbeat    Type = 4  // A→D ControlHeartbeat: I live, this runs, perhaps: please renew for me
	TypeHeartbeatAck Type = 5  // D→A ControlHeartbeatAck: what came of it
	TypeHungry       Type = 6  // A→D ControlHungry: I wait for tasks of these lanes
	TypeRing         Type = 7  // D→A ControlRing: there are tasks
	TypeCancel       Type = 8  // D→A ControlCancel: end an attempt with grace
	TypeSignal       Type = 9  // D→A ControlSignal: send a signal to an attempt
	TypeDrain        Type = 10 // D→A ControlDrain: take no more tasks
	TypeResume       Type = 11 // D→A ControlResume: take tasks again
	TypeKill         Type = 12 // D→A ControlKill: end an attempt at once
	TypeAck          Type = 13 // D→A ControlAck: your HUNGRY is registered
	TypeError        Type = 14 // both ControlError: why I hang up now
	TypePing         Type = 15 // both ControlPing: are you there
	TypePong         Type = 16 // both ControlPong: I am

	typeEnd Type = 17 // one past the last
)

var typeNames = [typeEnd]string{
	TypeChallenge: "challenge", TypeHello: "hello", TypeWelcome: "welcome",
	TypeHeartbeat: "heartbeat", TypeHeartbeatAck: "heartbeat_ack",
	TypeHungry: "hungry", TypeRing: "ring", TypeCancel: "cancel", TypeSignal: "signal",
	TypeDrain: "drain", TypeResume: "resume", TypeKill: "kill",
	TypeAck: "ack", TypeError: "error", TypePing: "ping", TypePong: "pong",
}

// String returns the name of the type in lower case, or type(n).
func (t Type) String() string {
	if t.known() {
		return typeNames[t]
	}
	return "type(" + strconv.Itoa(int(t)) + ")"
}

func (t Type) known() bool { return t > 0 && t < typeEnd }

// Message is one of the generated Control messages that are the body of a frame; the type of the frame follows from it.
type Message = proto.Message

// TypeOf returns the frame type whose body m is, and false when there is none.
func TypeOf(m Message) (Type, bool) {
	switch m.(type) {
	case *millracev1.ControlChallenge:
		return TypeChallenge, true
	case *millracev1.ControlHello:
		return TypeHello, true
	case *millracev1.ControlWelcome:
		return TypeWelcome, true
	case *millracev1.ControlHeartbeat:
		return TypeHeartbeat, true
	case *millracev1.ControlHeartbeatAck:
		return TypeHeartbeatAck, true
	case *millracev1.ControlHungry:
		return TypeHungry, true
	case *millracev1.ControlRing:
		return TypeRing, true
	case *millracev1.ControlCancel:
		return TypeCancel, true
	case *millracev1.ControlSignal:
		return TypeSignal, true
	case *millracev1.ControlDrain:
		return TypeDrain, true
	case *millracev1.ControlResume:
		return TypeResume, true
	case *millracev1.ControlKill:
		return TypeKill, true
	case *millracev1.ControlAck:
		return TypeAck, true
	case *millracev1.ControlError:
		return TypeError, true
	case *millracev1.ControlPing:
		return TypePing, true
	case *millracev1.ControlPong:
		return TypePong, true
	}
	return 0, false
}

// AppendFrame appends m as one frame to dst. On an error dst comes back as it was.
func AppendFrame(dst []byte, m Message) ([]byte, error) {
	t, ok := TypeOf(m)
	if !ok {
		return dst, fmt.Errorf("encode frame: %T is the body of no frame type", m)
	}
	start := len(dst)
	out := append(dst, magic...)
	out = append(out, FrameVersion, 0, 0, 0, 0, byte(t))
	out, err := proto.MarshalOptions{}.MarshalAppend(out, m)
	if err != nil {
		return dst, fmt.Errorf("encode %s frame: %w", t, err)
	}
	size := len(out) - start
	if size > MaxFrame {
		return dst, fmt.Errorf("encode %s frame: %d bytes, a frame has at most %d", t, size, MaxFrame)
	}
	binary.BigEndian.PutUint32(out[start+5:], uint32(size))
	return out, nil
}

// BadFrame says in which way bytes are no frame.
type BadFrame string

// The ways in which bytes can be no frame; they are label values of the bad-frames counter.
const (
	BadMagic   BadFrame = "magic"   // not MLRC: something else speaks to this port
	BadVersion BadFrame = "version" // a layout that this build does not know
	BadLength  BadFrame = "length"  // shorter than a header or longer than allowed
	BadBody    BadFrame = "body"    // not the Protobuf message of its type
)

var badFrames = []BadFrame{BadMagic, BadVersion, BadLength, BadBody}

// FrameError is the error for bytes that are no frame. The connection cannot go on after it.
type FrameError struct {
	Kind   BadFrame
	Detail string
}

// Error says what is wrong with the bytes.
func (e *FrameError) Error() string { return "bad frame: " + e.Detail }

// ParseHeader reads the header at the start of b, which may be shorter than a header: then size is 0, unless what is
// there is wrong already. It accepts frames of at most limit bytes.
func ParseHeader(b []byte, limit int) (t Type, size int, err error) {
	if n := min(len(b), len(magic)); string(b[:n]) != magic[:n] {
		return 0, 0, &FrameError{BadMagic, fmt.Sprintf("it begins with %q, not with %q; does something else than a millrace agent or dispatcher use this port?", b[:n], magic)}
	}
	if len(b) > 4 && b[4] != FrameVersion {
		return 0, 0, &FrameError{BadVersion, fmt.Sprintf("frame version %d, this side speaks %d", b[4], FrameVersion)}
	}
	if len(b) < HeaderSize {
		return 0, 0, nil
	}
	length := binary.BigEndian.Uint32(b[5:9])
	if length < HeaderSize || uint64(length) > uint64(limit) {
		return 0, 0, &FrameError{BadLength, fmt.Sprintf("its length says %d bytes, allowed are %d to %d", length, HeaderSize, limit)}
	}
	return Type(b[9]), int(length), nil
}

const (
	// Most frames are under 100 bytes; an idle connection holds this much for reading.
	readBuffer = 1 << 10
	// A buffer that grew past this for one large frame is given back after it.
	keepBuffer = 8 << 10
)

// frameReader cuts a stream into frames. Its memory follows the bytes that have arrived, not the length a header
// claims.
type frameReader struct {
	r     io.Reader
	limit int // longest frame accepted
	// wait is called before each read, with whether a part of a frame is there already: the place for deadlines.
	wait func(midFrame bool) error

	buf        []byte
	start, end int // unread bytes
	last       int // size of the frame handed out last, still in front of the unread bytes
}

func newFrameReader(r io.Reader, limit int) *frameReader {
	return &frameReader{r: r, limit: limit, buf: make([]byte, readBuffer)}
}

// next returns the next frame. The body is valid until the call after it. The error is io.EOF only between frames.
func (f *frameReader) next() (Type, []byte, error) {
	f.start += f.last
	f.last = 0
	for {
		have := f.buf[f.start:f.end]
		t, size, err := ParseHeader(have, f.limit)
		if err != nil {
			return 0, nil, err
		}
		if size > 0 && len(have) >= size {
			f.last = size
			return t, have[HeaderSize:size:size], nil
		}
		if err := f.fill(size); err != nil {
			return 0, nil, err
		}
	}
}

// fill reads once. size is that of the frame in the making, 0 while its header is not complete.
func (f *frameReader) fill(size int) error {
	f.makeRoom(size)
	midFrame := f.end > f.start
	if f.wait != nil {
		if err := f.wait(midFrame); err != nil {
			return err
		}
	}
	n, err := f.r.Read(f.buf[f.end:])
	f.end += n
	if n > 0 {
		return nil // an error that came with bytes comes again without
	}
	if err == io.EOF && midFrame {
		return io.ErrUnexpectedEOF
	}
	if err == nil {
		return io.ErrNoProgress
	}
	return err
}

func (f *frameReader) makeRoom(size int) {
	if f.start == f.end {
		f.start, f.end = 0, 0
		if len(f.buf) > keepBuffer {
			f.buf = make([]byte, readBuffer)
		}
		return
	}
	if f.end < len(f.buf) {
		return
	}
	have := f.buf[f.start:f.end]
	if f.start > 0 && size <= len(f.buf) {
		f.end = copy(f.buf, have)
		f.start = 0
		return
	}
	grown := make([]byte, max(readBuffer, min(2*len(f.buf), max(size, HeaderSize))))
	f.end = copy(grown, have)
	f.start, f.buf = 0, grown
}

// decode reads the body of a frame of type t into m.
func decode(t Type, body []byte, m Message) error {
	if err := proto.Unmarshal(body, m); err != nil {
		return &FrameError{BadBody, fmt.Sprintf("the body of a %s frame cannot be read: %v", t, err)}
	}
	return nil
}
