package proc

import (
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// copyBuffer is the largest piece handed to a writer; it is also what a pipe holds by default.
const copyBuffer = 64 << 10

var buffers = sync.Pool{New: func() any { return new([copyBuffer]byte) }}

// nullDevice is the stdin of every process that gets none.
var nullDevice = sync.OnceValues(func() (int, error) {
	return unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
})

// output is the reading end of a pipe that processes write to.
type output struct {
	file *os.File
	conn syscall.RawConn
	dst  io.Writer
	done chan struct{}
	cut  bool  // given up before the end; valid after done
	err  error // first error of dst; valid after done
}

// newOutput makes a pipe. The writing end is for the child only and stays blocking: O_NONBLOCK would be seen by every
// process that shares it.
func newOutput(dst io.Writer) (o *output, childEnd int, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, -1, err
	}
	o, err = pollable(fds[0], "output")
	if err != nil {
		unix.Close(fds[1])
		return nil, -1, err
	}
	o.dst, o.done = dst, make(chan struct{})
	if dst == nil {
		o.dst = io.Discard
	}
	return o, fds[1], nil
}

// pollable wraps a descriptor so that reading it parks the goroutine, not a thread. It takes fd over.
func pollable(fd int, name string) (*output, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	conn, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return nil, err
	}
	return &output{file: f, conn: conn}, nil
}

// copy reads to the end. It holds a buffer only while there is something to read, so that a thousand silent tasks cost
// no memory.
func (o *output) copy() {
	defer close(o.done)
	defer o.file.Close()
	var end bool
	step := func(fd uintptr) bool {
		n, err := o.move(int(fd))
		end = n == 0 && err == nil || err != nil && !errors.Is(err, unix.EAGAIN)
		return end || n > 0
	}
	for !end {
		if err := o.conn.Read(step); err != nil {
			o.rest()
			return
		}
	}
}

// move passes one piece from the pipe to the writer. A writer that fails is not called again, but the pipe is still
// emptied: a task must not stall or die because its output could not be kept.
func (o *output) move(fd int) (n int, err error) {
	buf := buffers.Get().(*[copyBuffer]byte)
	defer buffers.Put(buf)
	for {
		n, err = unix.Read(fd, buf[:])
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if n > 0 && o.err == nil {
		_, o.err = o.dst.Write(buf[:n])
	}
	return max(n, 0), err
}

// rest passes on what was in the pipe when waiting for its end was given up. A slow writer may have been the reason, and
// what the task wrote must not be lost for that.
func (o *output) rest() {
	_ = o.conn.Control(func(fd uintptr) {
		left, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ)
		for n := 1; err == nil && left > 0 && n > 0; left -= n {
			n, err = o.move(int(fd))
		}
		n, err := o.move(int(fd))
		o.cut = n > 0 || err != nil // the end reads as nothing, without an error
	})
}

// giveUpAfter ends the copying although somebody still holds the other end.
func (o *output) giveUpAfter(d time.Duration) {
	_ = o.file.SetReadDeadline(time.Now().Add(d))
}

// feed writes data to the stdin of a process and closes it. A process that does not read it all, which is its right,
// ends this with EPIPE.
func feed(w *os.File, data []byte) {
	_, _ = w.Write(data)
	_ = w.Close()
}

// newInput makes the pipe for stdin.
func newInput() (w *os.File, childEnd int, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, -1, err
	}
	if err := unix.SetNonblock(fds[1], true); err != nil {
		unix.Close(fds[0])
		unix.Close(fds[1])
		return nil, -1, err
	}
	return os.NewFile(uintptr(fds[1]), "stdin"), fds[0], nil
}
