package agent

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/logship"
	"github.com/millrace/millrace/internal/proc"
	"github.com/millrace/millrace/internal/spec"
	"github.com/millrace/millrace/internal/task"
)

// processSpec is the process of a command task: its arguments, a clean environment, its directories and its output.
func (a *attempt) processSpec(lg *logship.Log) (proc.Spec, error) {
	c := a.t.GetCommand()
	h := a.l.a.home
	id := string(a.c.ID)
	work, check := h.workDir(id, a.c.Attempt), h.checkpointDir(id)
	for _, d := range []string{work, check} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return proc.Spec{}, fmt.Errorf("directory for the task: %w", err)
		}
	}
	s := proc.Spec{Argv: c.GetArgv(), Dir: c.GetDir(), Env: a.environment(work, check), Stdin: []byte(c.GetStdin()), Marker: a.marker()}
	if len(c.GetStdinBytes()) > 0 {
		s.Stdin = c.GetStdinBytes()
	}
	if s.Dir == "" {
		s.Dir = work
	}
	if c.GetShell() {
		s.Argv = []string{"/bin/sh", "-c", strings.Join(c.GetArgv(), " ")}
	}
	if a.t.GetLog().GetSplit() {
		s.Stdout, s.Stderr = lg.Writer(1), lg.Writer(2)
	} else {
		s.Stdout = lg.Writer(0)
	}
	return s, nil
}

// marker identifies the tree in /proc: the guard and the next agent kill by its beginning. A task that is to survive
// isolation has a beginning that the guard was not told.
func (a *attempt) marker() string {
	m := fmt.Sprintf("%s%s/%d", markerPrefix(a.l.id), a.c.ID, a.c.Attempt)
	if a.keep() {
		return "keep/" + m
	}
	return m
}

// environment starts from a clean base: nothing of the agent's own settings reaches a task.
func (a *attempt) environment(work, check string) []string {
	home := os.Getenv("HOME")
	if home == "" {
		home = work
	}
	path := os.Getenv("PATH")
	if path == "" {
		path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	}
	lang := os.Getenv("LANG")
	if lang == "" {
		lang = "C.UTF-8"
	}
	env := map[string]string{
		"PATH": path, "HOME": home, "LANG": lang, "PYTHONUNBUFFERED": "1",
		"MILLRACE_TASK_ID": string(a.c.ID), "MILLRACE_TASK_NAME": a.t.GetName(), "MILLRACE_ATTEMPT": strconv.FormatUint(uint64(a.c.Attempt), 10),
		"MILLRACE_QUEUE": spec.Queue(a.t), "MILLRACE_WORKER": string(a.l.id), "MILLRACE_GRACE": spec.Grace(a.t).String(),
		"MILLRACE_WORKDIR": work, "MILLRACE_CHECKPOINT_DIR": check,
	}
	if d := spec.Timeout(a.t); d > 0 {
		env["MILLRACE_DEADLINE"] = a.started.Add(d).UTC().Format(time.RFC3339Nano)
	}
	if tp := a.t.GetTraceparent(); tp != "" {
		env["TRACEPARENT"] = tp
	}
	maps.Copy(env, a.t.GetCommand().GetEnv())
	out := make([]string, 0, len(env))
	for k, v := range env {
		out = append(out, k+"="+v)
	}
	sort.Strings(out)
	return out
}

// cleanup removes the working directory of an attempt that is of no use any more: what failed is kept for a while, for
// people to look at. Checkpoints go when the task has ended well.
func (a *Agent) cleanup(at *attempt, now task.State) {
	if at.t.GetCommand() == nil {
		return
	}
	id := string(at.c.ID)
	work := a.home.workDir(id, at.c.Attempt)
	if now == task.Failed || now == task.Delayed {
		removeIfEmpty(work)
		removeIfEmpty(a.home.checkpointDir(id))
		return
	}
	err := os.RemoveAll(work)
	removeIfEmpty(filepath.Dir(work))
	if now == task.Succeeded {
		err = errors.Join(err, os.RemoveAll(a.home.checkpointDir(id)))
	} else {
		removeIfEmpty(a.home.checkpointDir(id))
	}
	if err != nil {
		a.log.Warn("working directory not removed", logkey.Task, id, logkey.Err, err)
	}
}

func removeIfEmpty(dir string) { _ = os.Remove(dir) } // fails when there is something in it, which is meant
