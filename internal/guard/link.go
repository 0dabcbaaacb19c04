package guard

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// envName tells the child that it is one, and whose: descriptors alone could be anybody's.
const envName = "MILLRACE_GUARD_LINK"

// Descriptors of the link in the child.
const (
	socketFD = 3
	pageFD   = 4
)

func linkEnv() string { return envName + "=" + strconv.Itoa(os.Getpid()) }

// Instant is a point in time on CLOCK_BOOTTIME, in nanoseconds since boot. Unlike time.Time's monotonic clock it runs on
// while the machine is suspended, and unlike the wall clock nobody sets it.
type Instant int64

// Now is the present.
func Now() Instant {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("read CLOCK_BOOTTIME: " + err.Error()) // every kernel since 2.6.39 has it
	}
	return Instant(ts.Nano())
}

// Add returns the instant d later.
func (i Instant) Add(d time.Duration) Instant { return i + Instant(d) }

// Sub returns the time from j to i.
func (i Instant) Sub(j Instant) time.Duration { return time.Duration(i - j) }

// Link is the agent's line to its guard. Its methods are safe for concurrent use and never block. All of them may be
// called on a nil Link, which is that of an agent without a guard: they do nothing, and Lost is never closed.
type Link struct {
	socket   *os.File
	page     []byte
	deadline *atomic.Int64 // in page, shared with the guard; 0 is none
	lost     chan struct{}
	closed   sync.Once
}

// inherit takes over what the guard left for its child; nil when this process has no guard.
func inherit() (*Link, error) {
	value, ok := os.LookupEnv(envName)
	if !ok {
		return nil, nil
	}
	_ = os.Unsetenv(envName) // it is not for anything this process starts
	if value != strconv.Itoa(os.Getppid()) {
		return nil, nil // came from a guard further up, or that guard died at once
	}
	unix.CloseOnExec(socketFD)
	unix.CloseOnExec(pageFD)
	if err := unix.SetNonblock(socketFD, true); err != nil {
		return nil, fmt.Errorf("link to the guard: %w", err)
	}
	page, err := mapPage(pageFD)
	unix.Close(pageFD)
	if err != nil {
		return nil, fmt.Errorf("link to the guard: %w", err)
	}
	l := &Link{socket: os.NewFile(socketFD, "guard"), page: page, deadline: deadlineIn(page), lost: make(chan struct{})}
	go l.listen()
	return l, nil
}

// listen ends when the guard is gone: it never says anything.
func (l *Link) listen() {
	defer close(l.lost)
	var b [1]byte
	for {
		if n, err := l.socket.Read(b[:]); n == 0 || err != nil {
			return
		}
	}
}

// Extend sets the moment at which the guard kills every task tree of this agent, if nothing else is said before. It is
// a store to shared memory, so that it cannot be late, lost or in the way.
func (l *Link) Extend(deadline Instant) {
	if l != nil {
		l.deadline.Store(int64(max(deadline, 1)))
	}
}

// Disarm says that there is no deadline now, because nothing runs that could run twice.
func (l *Link) Disarm() {
	if l != nil {
		l.deadline.Store(0)
	}
}

// Announce tells the guard that markers of this agent begin with prefix, such as "<worker id>/". It has to be called
// before the first task of an incarnation; what was announced before stays known.
func (l *Link) Announce(prefix string) error {
	if l == nil {
		return nil
	}
	if prefix == "" || strings.IndexByte(prefix, 0) >= 0 || len(prefix) > maxMessage {
		return fmt.Errorf("announce to the guard: bad marker prefix %q", prefix)
	}
	if err := l.send([]byte(prefix), nil); err != nil {
		return fmt.Errorf("announce to the guard: %w", err)
	}
	return nil
}

// Hold gives the guard a copy of an open file, which stays open until no process of the tasks is left. A lock taken
// with flock on it is then held until the same moment, even when the agent is killed.
func (l *Link) Hold(f *os.File) error {
	if l == nil {
		return nil
	}
	conn, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("hand a file to the guard: %w", err)
	}
	ctlErr := conn.Control(func(fd uintptr) { err = l.send([]byte{0}, unix.UnixRights(int(fd))) })
	if err = errors.Join(err, ctlErr); err != nil {
		return fmt.Errorf("hand a file to the guard: %w", err)
	}
	return nil
}

// send puts one message into the socket. It is full only when the guard has read none of some hundred.
func (l *Link) send(message, rights []byte) error {
	conn, err := l.socket.SyscallConn()
	if err != nil {
		return err
	}
	ctlErr := conn.Control(func(fd uintptr) {
		err = unix.Sendmsg(int(fd), message, rights, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	})
	return errors.Join(err, ctlErr)
}

// Lost is closed when the guard has died. Nobody would kill the tasks of a hung agent from then on, and nobody would
// adopt what it leaves: the agent kills its trees and stops.
func (l *Link) Lost() <-chan struct{} {
	if l == nil {
		return nil
	}
	return l.lost
}

// Close ends the link. The guard takes it for the beginning of the agent's end, and waits for that.
func (l *Link) Close() {
	if l == nil {
		return
	}
	l.closed.Do(func() {
		l.socket.Close()
		<-l.lost
	})
}

// pageSize is what the shared memory takes; it holds one number.
const pageSize = 4096

func mapPage(fd int) ([]byte, error) {
	return unix.Mmap(fd, 0, pageSize, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
}

// deadlineIn is the number at the start of the page, which is aligned as memory maps are.
func deadlineIn(page []byte) *atomic.Int64 {
	return (*atomic.Int64)(unsafe.Pointer(unsafe.SliceData(page)))
}
