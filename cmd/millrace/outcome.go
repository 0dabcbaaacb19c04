package main

import (
	"fmt"
	"strings"
	"syscall"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// Exit codes beside the task's own.
const (
	codeTimeout       = 124 // the task ran out of time, or expired before it started
	codeFault         = 125 // millrace could not do it
	codeNotExecutable = 126
	codeNotFound      = 127
	codeCancelled     = 130
)

// exitCode is the code that run, wait and submit --wait end with for a final task.
func exitCode(t *millracev1.TaskView) int {
	switch t.GetState() {
	case millracev1.State_STATE_SUCCEEDED:
		return 0
	case millracev1.State_STATE_CANCELLED:
		return codeCancelled
	case millracev1.State_STATE_EXPIRED:
		return codeTimeout
	default:
	}
	own := int(t.GetExitCode())
	switch t.GetReason() {
	case millracev1.Reason_REASON_TIMEOUT:
		return codeTimeout
	case millracev1.Reason_REASON_EXIT:
		return orCode(own, 1)
	case millracev1.Reason_REASON_SIGNAL:
		return orCode(own, 128+signalNumber(t.GetSignal()))
	case millracev1.Reason_REASON_OOM:
		return orCode(own, 128+int(syscall.SIGKILL))
	case millracev1.Reason_REASON_REFUSED:
		if own == codeNotExecutable || own == codeNotFound {
			return own
		}
		return codeNotExecutable
	default:
		return codeFault
	}
}

// orCode is code, or otherwise when code would say that all is well.
func orCode(code, otherwise int) int {
	if code <= 0 || code > 255 {
		return otherwise
	}
	return code
}

var signalNumbers = map[string]syscall.Signal{
	"HUP": syscall.SIGHUP, "INT": syscall.SIGINT, "QUIT": syscall.SIGQUIT, "ILL": syscall.SIGILL, "TRAP": syscall.SIGTRAP,
	"ABRT": syscall.SIGABRT, "BUS": syscall.SIGBUS, "FPE": syscall.SIGFPE, "KILL": syscall.SIGKILL, "USR1": syscall.SIGUSR1,
	"SEGV": syscall.SIGSEGV, "USR2": syscall.SIGUSR2, "PIPE": syscall.SIGPIPE, "ALRM": syscall.SIGALRM, "TERM": syscall.SIGTERM,
	"XCPU": syscall.SIGXCPU, "XFSZ": syscall.SIGXFSZ, "SYS": syscall.SIGSYS,
}

// signalNumber is 0 for a name that is not known here.
func signalNumber(name string) int {
	return int(signalNumbers[strings.TrimPrefix(name, "SIG")])
}

// outcomeLine says in one line how a task ended.
func outcomeLine(t *millracev1.TaskView) string {
	line := fmt.Sprintf("task %s %s", t.GetId(), stateWord(t.GetState()))
	if m := printable(t.GetMessage()); m != "" && m != stateWord(t.GetState()) {
		line += ": " + m
	}
	if t.GetState() == millracev1.State_STATE_FAILED && t.GetAttempt() > 1 {
		line += fmt.Sprintf(" (after %d attempts)", t.GetAttempt())
	}
	if l := t.GetLog(); l.GetMissingBytes() > 0 {
		line += fmt.Sprintf("; %d bytes of its output are missing", l.GetMissingBytes())
	}
	return line
}

func stateWord(s millracev1.State) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), "STATE_"))
}

func reasonWord(r millracev1.Reason) string {
	if r == millracev1.Reason_REASON_UNSPECIFIED {
		return ""
	}
	return strings.ToLower(strings.TrimPrefix(r.String(), "REASON_"))
}
