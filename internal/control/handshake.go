package control

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// The protocol versions that this build speaks: what bodies mean and which frames may be sent when.
const (
	ProtocolMin = 1
	ProtocolMax = 1
)

const nonceSize = 32

// What the dispatcher's proof begins with, so that it can never be taken for an agent's: that begins with a nonce and
// ends with a worker id, which has no zero byte.
const dispatcherProof = "millrace control v1: dispatcher\x00"

// helloMAC is the agent's proof that it knows the token.
func helloMAC(token, nonce []byte, workerID string) []byte {
	h := hmac.New(sha256.New, token)
	h.Write(nonce)
	h.Write([]byte(workerID))
	return h.Sum(nil)
}

// welcomeMAC is the dispatcher's.
func welcomeMAC(token, nonce []byte, dispatcherID string) []byte {
	h := hmac.New(sha256.New, token)
	h.Write([]byte(dispatcherProof))
	h.Write(nonce)
	h.Write([]byte(dispatcherID))
	return h.Sum(nil)
}

func newNonce() []byte {
	n := make([]byte, nonceSize)
	_, _ = rand.Read(n) // never fails: the runtime ends the process instead
	return n
}

// negotiate returns the highest protocol version in both ranges.
func negotiate(aMin, aMax, bMin, bMax uint32) (uint32, bool) {
	v := min(aMax, bMax)
	return v, v >= max(aMin, bMin, 1)
}

// ValidID reports whether id can be the id of a worker or a dispatcher: 1 to 128 of A-Z a-z 0-9 . _ -, the first not a dot.
func ValidID(id string) bool {
	if id == "" || len(id) > 128 || id[0] == '.' {
		return false
	}
	for _, c := range []byte(id) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '.', c == '_', c == '-':
		default:
			return false
		}
	}
	return true
}

// refusal ends a handshake: reason is for the counter, the rest for the peer. Without a code there is no ERROR frame.
type refusal struct {
	reason string
	code   millracev1.ControlErrorCode
	text   string
	heard  bool  // the other side said it
	err    error // what happened, when the peer did nothing wrong
}

func (r *refusal) Error() string {
	if r.err != nil {
		return r.err.Error()
	}
	return r.text
}

func (r *refusal) Unwrap() error { return r.err }

// peerError is what the other side said before it hung up.
func peerError(e *millracev1.ControlError) error {
	r := &refusal{
		reason: refusedGone, code: e.GetCode(), heard: true,
		text: fmt.Sprintf("the other side hung up: %.1000s", e.GetMessage()),
	}
	switch e.GetCode() {
	case millracev1.ControlErrorCode_CONTROL_ERROR_CODE_TOKEN:
		r.reason = refusedToken
	case millracev1.ControlErrorCode_CONTROL_ERROR_CODE_VERSION:
		r.reason = refusedVersion
	case millracev1.ControlErrorCode_CONTROL_ERROR_CODE_UNAVAILABLE:
		r.reason = refusedUnavailable
	default:
	}
	return r
}

// readRefusal turns an error of reading during the handshake into a refusal.
func readRefusal(err error) *refusal {
	if _, ok := errors.AsType[*FrameError](err); ok {
		return &refusal{
			reason: refusedFrame, code: millracev1.ControlErrorCode_CONTROL_ERROR_CODE_BAD_FRAME,
			text: err.Error(), err: err,
		}
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return &refusal{
			reason: refusedTimeout, code: millracev1.ControlErrorCode_CONTROL_ERROR_CODE_PROTOCOL,
			text: "the handshake took too long", err: fmt.Errorf("handshake took too long: %w", err),
		}
	}
	return &refusal{reason: refusedGone, err: fmt.Errorf("peer hung up during the handshake: %w", err)}
}
