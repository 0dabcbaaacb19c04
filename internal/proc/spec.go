package proc

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// Spec says what to run. Only Argv is required.
type Spec struct {
	// Argv is the command. Argv[0] without a slash is looked up in the PATH of Env, never in the agent's; with a slash
	// it is taken relative to Dir.
	Argv []string
	// Env is the whole environment, as "NAME=value".
	Env []string
	// Dir is the working directory and must exist; "" is the agent's own.
	Dir string
	// Stdin is fed to the process and then closed; nil means /dev/null.
	Stdin []byte
	// Stdout and Stderr receive raw bytes from proc's copying goroutines, in pieces of at most 64 KiB, and must not block
	// for long. The pieces are valid only during the call. When Stderr is nil, both streams share one pipe and arrive at
	// Stdout in the exact order in which they were written. A nil Stdout discards.
	Stdout, Stderr io.Writer
	// Marker goes into the environment as MILLRACE_MARKER, identifies the tree in sweeps of /proc and must be unique to
	// the attempt. A marker in Env is dropped.
	Marker string
}

// Exit codes for a command that could not be run, as shells give them.
const (
	CodeNotExecutable = 126
	CodeNotFound      = 127
)

// RefusedError says that the command of a Spec cannot be run and would not run at a second try either. Every other
// error of Start is the machine's fault (no memory, no process or file left) and may go away.
type RefusedError struct {
	Code int    // CodeNotExecutable or CodeNotFound
	Text string // for people; names the command or directory, and never arguments or environment
	Err  error  // the errno behind it, when there is one
}

func (e *RefusedError) Error() string { return e.Text }

// Unwrap returns the errno.
func (e *RefusedError) Unwrap() error { return e.Err }

func refuse(code int, err error, format string, args ...any) *RefusedError {
	return &RefusedError{Code: code, Text: fmt.Sprintf(format, args...), Err: err}
}

// defaultPath is what execvp takes when the environment has no PATH.
const defaultPath = "/usr/local/bin:/usr/bin:/bin"

// check finds what no exec would report well.
func (s *Spec) check() error {
	if len(s.Argv) == 0 || s.Argv[0] == "" {
		return refuse(CodeNotFound, nil, "the command is empty: argv[0] must name a program")
	}
	for i, a := range s.Argv {
		if strings.IndexByte(a, 0) >= 0 {
			return refuse(CodeNotExecutable, syscall.EINVAL, "argument %d of the command contains a NUL byte, which no program can receive", i)
		}
	}
	for _, v := range s.Env {
		if strings.IndexByte(v, 0) >= 0 {
			name, _, _ := strings.Cut(v, "=")
			return refuse(CodeNotExecutable, syscall.EINVAL, "environment variable %q contains a NUL byte, which no program can receive", name)
		}
	}
	if strings.IndexByte(s.Dir, 0) >= 0 {
		return refuse(CodeNotExecutable, syscall.EINVAL, "the working directory contains a NUL byte")
	}
	return nil
}

// environ is Env with our marker and without anybody else's.
func (s *Spec) environ() []string {
	env := make([]string, 0, len(s.Env)+1)
	for _, v := range s.Env {
		if !strings.HasPrefix(v, MarkerEnv+"=") {
			env = append(env, v)
		}
	}
	if s.Marker != "" {
		env = append(env, MarkerEnv+"="+s.Marker)
	}
	return env
}

// lookPath finds the program in the PATH of Env as execvp would: the first executable file, or else 126 when there was
// a file that is not executable, or else 127.
func (s *Spec) lookPath() (string, error) {
	name := s.Argv[0]
	if strings.Contains(name, "/") {
		return name, nil
	}
	path := defaultPath
	for _, v := range s.Env {
		if p, ok := strings.CutPrefix(v, "PATH="); ok {
			path = p // the last one wins, as in a shell
		}
	}
	var denied string
	for _, dir := range filepath.SplitList(path) {
		if dir == "" {
			dir = "."
		}
		candidate := dir + "/" + name
		switch err := executable(s.inDir(candidate)); {
		case err == nil:
			return candidate, nil
		case denied == "" && errors.Is(err, syscall.EACCES):
			denied = candidate
		}
	}
	if denied != "" {
		return "", refuse(CodeNotExecutable, syscall.EACCES, "%s is not executable: run chmod +x on it, or name its interpreter", denied)
	}
	return "", refuse(CodeNotFound, syscall.ENOENT, "program %q was not found in PATH (%s)", name, path)
}

// inDir resolves a path the way the child will after it has changed its directory.
func (s *Spec) inDir(path string) string {
	if filepath.IsAbs(path) || s.Dir == "" {
		return path
	}
	return filepath.Join(s.Dir, path)
}

// executable returns nil, ENOENT or EACCES.
func executable(path string) error {
	fi, err := os.Stat(path)
	switch {
	case errors.Is(err, os.ErrPermission):
		return syscall.EACCES
	case err != nil:
		return syscall.ENOENT
	case fi.IsDir():
		return syscall.ENOENT // execvp goes on looking
	case fi.Mode()&0o111 == 0:
		return syscall.EACCES
	}
	return nil
}

// diagnose turns the errno of a failed fork, chdir or exec, which does not say which of them it was, into a reason. It
// costs system calls, but only after a failure.
func (s *Spec) diagnose(path string, err error) error {
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		switch errno {
		case syscall.EAGAIN, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE, syscall.ENOSPC, syscall.EIO:
			return fmt.Errorf("start process: %w", err)
		}
	}
	if s.Dir != "" {
		fi, statErr := os.Stat(s.Dir)
		switch {
		case errors.Is(statErr, os.ErrNotExist):
			return refuse(CodeNotExecutable, syscall.ENOENT, "working directory %q does not exist on this worker", s.Dir)
		case statErr == nil && !fi.IsDir():
			return refuse(CodeNotExecutable, syscall.ENOTDIR, "working directory %q is not a directory", s.Dir)
		case statErr != nil:
			return refuse(CodeNotExecutable, statErr, "working directory %q: %s", s.Dir, reason(statErr))
		case syscall.Access(s.Dir, 1) != nil:
			return refuse(CodeNotExecutable, syscall.EACCES, "working directory %q: permission denied", s.Dir)
		}
	}
	return s.diagnoseProgram(path, err)
}

func (s *Spec) diagnoseProgram(path string, err error) error {
	full := s.inDir(path)
	fi, statErr := os.Stat(full)
	switch {
	case errors.Is(err, syscall.E2BIG):
		return refuse(CodeNotExecutable, err, "arguments and environment are too long for this system (%s)", reason(err))
	case errors.Is(err, syscall.ENOENT) && statErr == nil:
		return refuse(CodeNotFound, err, "%s: its interpreter%s does not exist on this worker", path, interpreter(full))
	case errors.Is(err, syscall.ENOENT):
		return refuse(CodeNotFound, err, "program %q does not exist on this worker", path)
	case statErr == nil && fi.IsDir():
		return refuse(CodeNotExecutable, err, "%s is a directory, not a program", path)
	case errors.Is(err, syscall.ENOEXEC):
		return refuse(CodeNotExecutable, err, "%s is not in a format this machine can run: a script needs a first line such as #!/bin/sh, a binary the right architecture", path)
	case errors.Is(err, syscall.EACCES) && statErr == nil && fi.Mode()&0o111 == 0:
		return refuse(CodeNotExecutable, err, "%s is not executable: run chmod +x on it, or name its interpreter", path)
	}
	return refuse(CodeNotExecutable, err, "cannot run %s: %s", path, reason(err))
}

// interpreter returns what a script's first line names, with a leading blank, or "".
func interpreter(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	head := make([]byte, 128)
	n, _ := f.Read(head)
	line, ok := strings.CutPrefix(string(head[:n]), "#!")
	if !ok {
		return ""
	}
	line, _, _ = strings.Cut(line, "\n")
	if words := strings.Fields(line); len(words) > 0 {
		return " " + strings.TrimSuffix(words[0], "\r")
	}
	return ""
}

// reason is the text of the innermost error: "permission denied", not "stat /x: permission denied".
func reason(err error) string {
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno.Error()
	}
	return err.Error()
}
