package proc

import (
	"bytes"
	"strconv"
	"syscall"
	"time"
)

// memory finds the peak size of the main process. Its rusage has it, but a child of a fork starts out with its
// parent's peak, and the agent is larger than many a task. So the peak of a process that is not known to have grown beyond the
// agent is looked at now and then.
type memory struct {
	floor int64 // the agent's own peak at the fork; rusage says nothing below it
	peak  int64 // largest seen
	next  time.Time
	pause time.Duration
}

// maxMemoryPause bounds how rarely a small process is looked at.
const maxMemoryPause = 8 * time.Second

func newMemory() memory {
	var own syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &own) // cannot fail with a valid argument
	return memory{floor: own.Maxrss << 10}
}

// sample looks at the running main process if it is time to.
func (m *memory) sample(pid int, now time.Time) {
	if m.peak > m.floor || now.Before(m.next) {
		return
	}
	m.pause = min(max(2*m.pause, reapInterval), maxMemoryPause)
	m.next = now.Add(m.pause)
	m.peak = max(m.peak, peakOf(pid))
}

// settle corrects what the rusage said.
func (m *memory) settle(maxRSS int64) int64 {
	if maxRSS > m.floor {
		return maxRSS
	}
	return m.peak
}

// peakOf reads the peak resident set since the last exec.
func peakOf(pid int) int64 {
	raw, err := readProc("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		return 0
	}
	_, after, _ := bytes.Cut(raw, []byte("\nVmHWM:"))
	f := bytes.Fields(after[:min(len(after), 32)])
	if len(f) == 0 {
		return 0
	}
	kib, err := strconv.ParseInt(string(f[0]), 10, 64)
	if err != nil {
		return 0
	}
	return kib << 10
}
