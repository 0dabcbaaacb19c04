package main

import (
	"bytes"
	"strings"
	"testing"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func TestExitCodes(t *testing.T) {
	t.Parallel()
	code := func(n int32) *int32 { return &n }
	for name, c := range map[string]struct {
		view *millracev1.TaskView
		want int
	}{
		"succeeded":      {&millracev1.TaskView{State: millracev1.State_STATE_SUCCEEDED, ExitCode: code(0)}, 0},
		"exit 3":         {&millracev1.TaskView{State: millracev1.State_STATE_FAILED, Reason: millracev1.Reason_REASON_EXIT, ExitCode: code(3)}, 3},
		"exit 255":       {&millracev1.TaskView{State: millracev1.State_STATE_FAILED, Reason: millracev1.Reason_REASON_EXIT, ExitCode: code(255)}, 255},
		"SIGTERM":        {&millracev1.TaskView{State: millracev1.State_STATE_FAILED, Reason: millracev1.Reason_REASON_SIGNAL, Signal: "TERM", ExitCode: code(143)}, 143},
		"SIGSEGV":        {&millracev1.TaskView{State: millracev1.State_STATE_FAILED, Reason: millracev1.Reason_REASON_SIGNAL, Signal: "SEGV"}, 139},
		"timeout":        {&millracev1.TaskView{State: millracev1.State_STATE_FAILED, Reason: millracev1.Reason_REASON_TIMEOUT, ExitCode: code(143)}, 124},
		"expired":        {&millracev1.TaskView{State: millracev1.State_STATE_EXPIRED}, 124},
		"lost":           {&millracev1.TaskView{State: millracev1.State_STATE_FAILED, Reason: millracev1.Reason_REASON_WORKER_LOST}, 125},
		"not executable": {&millracev1.TaskView{State: millracev1.State_STATE_FAILED, Reason: millracev1.Reason_REASON_REFUSED, ExitCode: code(126)}, 126},
		"not found":      {&millracev1.TaskView{State: millracev1.State_STATE_FAILED, Reason: millracev1.Reason_REASON_REFUSED, ExitCode: code(127)}, 127},
		"cancelled":      {&millracev1.TaskView{State: millracev1.State_STATE_CANCELLED, ExitCode: code(7)}, 130},
	} {
		if got := exitCode(c.view); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}

// Mistakes on the command line are told with the next step, on stderr, with millrace's own code.
func TestMistakesAreTold(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		word string
	}{
		{[]string{"subimt"}, "no verb"},
		{[]string{"submit", "--nosuch", "--", "x"}, "--help"},
		{[]string{"submit"}, "--"},
		{[]string{"dev", "echo", "hi"}, "--"},
		{[]string{"show"}, "missing"},
	} {
		var out, errOut bytes.Buffer
		if got := run(c.args, strings.NewReader(""), &out, &errOut); got != codeFault || !strings.Contains(errOut.String(), c.word) || out.Len() > 0 {
			t.Errorf("%v: code %d, stdout %q, stderr %q", c.args, got, out.String(), errOut.String())
		}
	}
}

func TestVersionAndHelp(t *testing.T) {
	t.Parallel()
	for args, word := range map[string]string{"version": "millrace", "version --json": `"version"`, "--help": "dispatcher", "agent -h": "MILLRACE_SLOTS", "dispatcher --help": "MILLRACE_HTTP_ADDR"} {
		var out, errOut bytes.Buffer
		if got := run(strings.Fields(args), strings.NewReader(""), &out, &errOut); got != 0 || !strings.Contains(out.String(), word) {
			t.Errorf("%s: %d %q %q", args, got, out.String(), errOut.String())
		}
	}
}
