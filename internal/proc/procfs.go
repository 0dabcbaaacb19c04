package proc

import (
	"bytes"
	"errors"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ticksPerSecond is USER_HZ, the unit of start times in /proc. The kernel has fixed it at 100 for user space on every
// architecture Go runs on.
const ticksPerSecond = 100

// MarkerEnv is the environment variable that carries Spec.Marker.
const MarkerEnv = "MILLRACE_MARKER"

// stat is the part of /proc/<pid>/stat that is needed to tell processes apart.
type stat struct {
	pid     int
	comm    string
	state   byte
	ppid    int
	group   int
	session int
	start   uint64 // clock ticks since boot; with pid it names a process for good
}

// alive reports whether the process can still run code. Zombies cannot.
func (s stat) alive() bool { return s.state != 'Z' && s.state != 'X' && s.state != 'x' }

// key names a process beyond the re-use of its pid.
type key struct {
	pid   int
	start uint64
}

func (s stat) key() key { return key{s.pid, s.start} }

// readStat reads /proc/<pid>/stat; ok is false when there is no such process any more.
func readStat(pid int) (s stat, ok bool) {
	raw, err := readProc("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return stat{}, false
	}
	return parseStat(raw)
}

// parseStat copes with every comm: it may hold spaces, parentheses and newlines, so the fields are counted from the last
// closing parenthesis.
func parseStat(raw []byte) (s stat, ok bool) {
	open, end := bytes.IndexByte(raw, '('), bytes.LastIndexByte(raw, ')')
	if open < 0 || end < open {
		return stat{}, false
	}
	pid, err := strconv.Atoi(string(bytes.TrimSpace(raw[:open])))
	if err != nil {
		return stat{}, false
	}
	f := bytes.Fields(raw[end+1:])
	const state, ppid, group, session, start = 0, 1, 2, 3, 19
	if len(f) <= start {
		return stat{}, false
	}
	s = stat{pid: pid, comm: string(raw[open+1 : end]), state: f[state][0]}
	var errs [4]error
	s.ppid, errs[0] = strconv.Atoi(string(f[ppid]))
	s.group, errs[1] = strconv.Atoi(string(f[group]))
	s.session, errs[2] = strconv.Atoi(string(f[session]))
	s.start, errs[3] = strconv.ParseUint(string(f[start]), 10, 64)
	return s, errors.Join(errs[:]...) == nil
}

// readProc reads a small file of /proc without the poller and the size guess of os.ReadFile.
func readProc(path string) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	buf, n := make([]byte, 1024), 0
	for {
		m, err := unix.Read(fd, buf[n:])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || m <= 0 {
			return buf[:n], err
		}
		if n += m; n == len(buf) {
			buf = slices.Grow(buf, len(buf))[:2*len(buf)]
		}
	}
}

// children returns the pids of pid's children, whichever of its threads forked them. A process that is gone has none.
// Call it only when hasChildrenFile.
func children(pid int) (pids []int) {
	dir := "/proc/" + strconv.Itoa(pid) + "/task"
	tids, err := dirNumbers(dir)
	if err != nil {
		return nil
	}
	for _, tid := range tids {
		if raw, err := readProc(dir + "/" + strconv.Itoa(tid) + "/children"); err == nil {
			pids = append(pids, parsePIDs(raw)...)
		}
	}
	return pids
}

// hasChildrenFile says whether this kernel has /proc/<pid>/task/<tid>/children.
var hasChildrenFile = func() bool {
	pid := strconv.Itoa(os.Getpid())
	_, err := os.Stat("/proc/self/task/" + pid + "/children")
	return err == nil
}()

func parsePIDs(raw []byte) []int {
	var pids []int
	for f := range bytes.FieldsSeq(raw) {
		if pid, err := strconv.Atoi(string(f)); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// dirNumbers returns the entries of a directory of /proc that are numbers.
func dirNumbers(dir string) ([]int, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	var nums []int
	for _, name := range names {
		if n, err := strconv.Atoi(name); err == nil {
			nums = append(nums, n)
		}
	}
	return nums, err
}

// everyProcess returns the stat of every process of this machine.
func everyProcess() (map[int]stat, error) {
	pids, err := dirNumbers("/proc")
	if err != nil {
		return nil, err
	}
	all := make(map[int]stat, len(pids))
	for _, pid := range pids {
		if s, ok := readStat(pid); ok {
			all[pid] = s
		}
	}
	return all, nil
}

// markerOf returns the marker in the environment a process was started with; "" when it has none or hides it.
func markerOf(pid int) string {
	raw, err := readProc("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		return ""
	}
	for v := range bytes.SplitSeq(raw, []byte{0}) {
		if m, ok := bytes.CutPrefix(v, []byte(MarkerEnv+"=")); ok {
			return string(m)
		}
	}
	return ""
}

// commandLine returns argv of a process joined by blanks, shortened.
func commandLine(pid int) string {
	raw, err := readProc("/proc/" + strconv.Itoa(pid) + "/cmdline")
	if err != nil {
		return ""
	}
	const limit = 200
	line := strings.ToValidUTF8(strings.TrimSpace(string(bytes.ReplaceAll(raw, []byte{0}, []byte{' '}))), "\uFFFD")
	if len(line) > limit {
		line = strings.ToValidUTF8(line[:limit], "") + "…"
	}
	return line
}

// nowTicks is the present time in the unit of stat.start, rounded down as the kernel does.
func nowTicks() uint64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0
	}
	return uint64(ts.Nano()) / uint64(time.Second/ticksPerSecond)
}

// kill sends sig to the process named by k and to no other: the pidfd is opened first and the start time compared after
// that, so a re-used pid is noticed. It reports whether the signal was sent.
func kill(k key, sig unix.Signal) bool {
	fd, err := unix.PidfdOpen(k.pid, 0)
	if err != nil && !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.EPERM) {
		return false
	}
	noPidfd := err != nil // kernels before 5.3 and some sandboxes: the comparison alone must do
	if !noPidfd {
		defer unix.Close(fd)
	}
	if s, ok := readStat(k.pid); !ok || s.start != k.start || !s.alive() {
		return false
	}
	if noPidfd {
		return unix.Kill(k.pid, sig) == nil
	}
	return unix.PidfdSendSignal(fd, sig, nil, 0) == nil
}
