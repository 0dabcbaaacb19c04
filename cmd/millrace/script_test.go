package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/millrace/millrace/internal/apitest"
	"github.com/millrace/millrace/internal/redistest"
	"github.com/millrace/millrace/internal/storetest"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func TestMain(m *testing.M) {
	testscript.Main(leakCheck{m}, map[string]func(){"millrace": main})
}

// leakCheck looks for goroutines that are left over, within what testscript sets up and removes.
type leakCheck struct{ m *testing.M }

func (l leakCheck) Run() int {
	code := l.m.Run()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, "goroutines are left over:", err)
		return 1
	}
	return code
}

// TestScripts runs the command line as a user would, against an API whose fleet does what the script says. Beside
// the commands of testscript there are:
//
//	exits CODE VERB ARG…      run millrace and compare the exit code; stdout, stderr and cmp look at its output
//	submit ID [LANE]          a task comes to be
//	await ID STATE            wait until the task is in that state; "marked" is running with a cancel mark
//	claim ID                  the worker takes it; it must be the next one of its lane
//	ends ID REASON CODE [SIGNAL [MESSAGE]]   its attempt ends; the reason "none" is success
//	retries ID                its attempt fails, the next one is due in an hour
//	prints ID ATTEMPT TEXT    output comes; "\n" and the like as in Go
//	printed ID ATTEMPT        its output is complete
func TestScripts(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t)
	files, err := filepath.Glob("testdata/script/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			t.Parallel()
			token := "let-me-in"
			f := apitest.Start(t, apitest.Options{
				Store: storetest.OpenAt(t, srv.URL(), redistest.Prefix(t)), Token: "let-me-in", LogPatience: time.Second,
			})
			testscript.Run(t, testscript.Params{
				Files: []string{file},
				Setup: func(e *testscript.Env) error {
					e.Setenv("MILLRACE_SERVER", f.URL)
					e.Setenv("MILLRACE_TOKEN", token)
					e.Setenv("TZ", "UTC")
					e.Setenv("GORACE", "atexit_sleep_ms=0") // or each command under -race ends a second late
					return nil
				},
				Cmds: fleetCmds(t, f),
			})
		})
	}
}

type scriptCmd = func(ts *testscript.TestScript, neg bool, args []string)

func fleetCmds(t *testing.T, f *apitest.Fleet) map[string]scriptCmd {
	t.Helper()
	cmd := func(least int, do func(ts *testscript.TestScript, args []string)) scriptCmd {
		return func(ts *testscript.TestScript, neg bool, args []string) {
			if neg || len(args) < least {
				ts.Fatalf("want at least %d words, and no !", least)
			}
			do(ts, args)
		}
	}
	return map[string]scriptCmd{
		"exits": cmd(2, exits),
		"submit": cmd(1, func(_ *testscript.TestScript, args []string) {
			c := apitest.Command(args[0])
			if len(args) > 1 {
				c.Queue, c.Priority, _ = strings.Cut(args[1], ":")
			}
			f.Submit(c)
		}),
		"await": cmd(2, func(_ *testscript.TestScript, args []string) {
			storetest.Until(t, args[0]+" "+args[1], func() bool {
				sn, err := f.Store.Snapshots(t.Context(), []task.ID{task.ID(args[0])})
				if args[1] == "marked" {
					return err == nil && sn[0].Cancel
				}
				return err == nil && sn[0].State.String() == args[1]
			})
		}),
		"claim": cmd(1, func(ts *testscript.TestScript, args []string) {
			if got := f.Claim("default:normal", 1); got[0] != task.ID(args[0]) {
				ts.Fatalf("claimed %s", got[0])
			}
		}),
		"ends": cmd(3, func(ts *testscript.TestScript, args []string) {
			f.Finish(task.ID(args[0]), attemptEnd(ts, args[1:]))
		}),
		"retries": cmd(1, func(_ *testscript.TestScript, args []string) {
			f.Retry(task.ID(args[0]), &millracev1.AttemptEnd{Reason: millracev1.Reason_REASON_EXIT, ExitCode: 4}, time.Hour)
		}),
		"prints": cmd(3, func(ts *testscript.TestScript, args []string) {
			text, err := strconv.Unquote(`"` + args[2] + `"`)
			ts.Check(err)
			f.Logs.Write(task.ID(args[0]), attemptNumber(ts, args[1]), text)
		}),
		"printed": cmd(2, func(ts *testscript.TestScript, args []string) {
			f.Logs.End(task.ID(args[0]), attemptNumber(ts, args[1]))
			f.SetLog(task.ID(args[0]), attemptNumber(ts, args[1]), &millracev1.LogView{Complete: true, Bytes: 5})
		}),
	}
}

func attemptNumber(ts *testscript.TestScript, s string) uint32 {
	n, err := strconv.ParseUint(s, 10, 32)
	ts.Check(err)
	return uint32(n)
}

func attemptEnd(ts *testscript.TestScript, args []string) *millracev1.AttemptEnd {
	code, err := strconv.Atoi(args[1])
	ts.Check(err)
	e := &millracev1.AttemptEnd{ExitCode: int32(code), NoOutput: true, StartedAt: timestamppb.Now()} //nolint:gosec // an exit code
	if args[0] != "none" {
		e.Reason = millracev1.Reason(millracev1.Reason_value["REASON_"+strings.ToUpper(args[0])])
		if e.Reason == millracev1.Reason_REASON_UNSPECIFIED {
			ts.Fatalf("%s is no reason", args[0])
		}
	}
	if len(args) > 2 {
		e.Signal = args[2]
	}
	if len(args) > 3 {
		e.Message = args[3]
	}
	return e
}

func exits(ts *testscript.TestScript, args []string) {
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec("millrace", args[1:]...)
	got := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		got = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != want {
		ts.Fatalf("millrace %s: exit code %d, want %d; stderr:\n%s", strings.Join(args[1:], " "), got, want, ts.ReadFile("stderr"))
	}
}
