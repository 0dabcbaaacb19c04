//go:build unix

package control

import (
	"net"
	"syscall"
)

// inlineWriter writes to a socket from the goroutine that sends, as far as the kernel takes it without waiting. On an
// idle connection this saves the change to the writer's goroutine: PING to PONG over loopback takes 6.8 µs instead of
// 9.6 when hot, 20 instead of 31 after a pause; two bare sockets take 5.6 and 15.
type inlineWriter struct {
	rc  syscall.RawConn
	try func(fd uintptr) bool // made once: a closure for each write would be an allocation
	buf []byte
	n   int
}

// newInlineWriter returns nil when nc is no plain socket.
func newInlineWriter(nc net.Conn) *inlineWriter {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return nil
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	w := &inlineWriter{rc: rc}
	w.try = func(fd uintptr) bool {
		w.n, _ = syscall.Write(int(fd), w.buf) // whatever it was, the writer meets it again
		return true                            // never wait
	}
	return w
}

// write returns how many bytes the kernel took. The caller makes sure that nobody else writes.
func (w *inlineWriter) write(b []byte) int {
	w.buf, w.n = b, 0
	err := w.rc.Write(w.try)
	w.buf = nil
	if err != nil {
		return 0
	}
	return max(w.n, 0)
}
