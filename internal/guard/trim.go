package guard

import (
	"bufio"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Trim gives back memory that the start of a program took. A large program's package initialisation touches most of its
// code, which then counts as memory in use for as long as the process sleeps, although little of it is needed again. The
// guard does this for itself; an idle agent may do it once, after its own start.
func Trim() {
	debug.FreeOSMemory()
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return
	}
	defer f.Close()
	for _, m := range cleanMappings(bufio.NewScanner(f)) {
		// Pages of a file that nobody wrote to come back from the page cache when they are needed.
		_, _, _ = unix.RawSyscall(unix.SYS_MADVISE, m.start, m.end-m.start, unix.MADV_DONTNEED)
	}
}

type mapping struct{ start, end uintptr }

// cleanMappings returns the mappings of the program's file that cannot be written and hold no page of their own. A
// position-independent program has relocated pages among its read-only ones; those would come back wrong.
func cleanMappings(smaps *bufio.Scanner) (clean []mapping) {
	const pointer = 8 * int(unsafe.Sizeof(uintptr(0)))
	var current *mapping
	for smaps.Scan() {
		f := strings.Fields(smaps.Text())
		if len(f) >= 5 && !strings.HasSuffix(f[0], ":") { // 00400000-00f3a000 r-xp 00000000 fe:00 1234 /path
			current = nil
			from, to, _ := strings.Cut(f[0], "-")
			start, err1 := strconv.ParseUint(from, 16, pointer)
			end, err2 := strconv.ParseUint(to, 16, pointer)
			if err1 == nil && err2 == nil && strings.HasPrefix(f[1], "r") && f[1][1] != 'w' && len(f) > 5 && f[5][0] == '/' {
				current = &mapping{uintptr(start), uintptr(end)}
			}
		}
		if current != nil && len(f) >= 2 && f[0] == "Anonymous:" {
			if f[1] == "0" {
				clean = append(clean, *current)
			}
			current = nil
		}
	}
	return clean
}
