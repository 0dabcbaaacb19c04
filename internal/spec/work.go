package spec

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// reservedEnv begins the names of the variables by which an agent tells a task about itself. The two exceptions are
// the settings of the command line, so that a task can submit further tasks.
const reservedEnv = "MILLRACE_"

var allowedEnv = map[string]bool{"MILLRACE_SERVER": true, "MILLRACE_TOKEN": true}

func (v *validator) work(t *millracev1.Task) {
	switch w := t.GetWork().(type) {
	case *millracev1.Task_Command:
		v.command(w.Command)
	case *millracev1.Task_Call:
		v.call(w.Call)
	default:
		if t.GetSigned() == nil {
			v.add("command", `missing, there is nothing to run: give "command": {"argv": ["echo", "hi"]} or "call": {"handler": "…"}`)
		}
	}
}

func (v *validator) command(c *millracev1.Command) {
	v.argv(c)
	v.env(c.GetEnv())
	if strings.ContainsRune(c.GetDir(), 0) {
		v.add("command.dir", "%s has a NUL byte: remove it", shorten(c.GetDir()))
	}
	if c.GetStdin() != "" && len(c.GetStdinBytes()) > 0 {
		v.add("command.stdin", "given together with stdinBytes: keep one of the two")
	}
}

func (v *validator) argv(c *millracev1.Command) {
	argv := c.GetArgv()
	switch {
	case len(argv) == 0:
		v.add("command.argv", `empty: give the program and its arguments, such as ["echo", "hi"]`)
		return
	case c.GetShell() && strings.TrimSpace(strings.Join(argv, " ")) == "":
		v.add("command.argv", `blank: give a line for the shell, such as ["echo hi | wc -c"]`)
	case !c.GetShell() && argv[0] == "":
		v.add("command.argv[0]", `empty: give the name or the path of a program`)
	}
	for i, a := range argv {
		if strings.ContainsRune(a, 0) {
			v.add(fmt.Sprintf("command.argv[%d]", i), "%s has a NUL byte, which no program can be given: "+
				"remove it, or pass the data as stdinBytes", shorten(a))
			return // one is enough: a binary argument list would fill pages
		}
	}
}

func (v *validator) env(env map[string]string) {
	for _, name := range sortedKeys(env) {
		switch {
		case name == "":
			v.add("command.env", "a variable has no name: give it one or remove it")
		case strings.ContainsAny(name, "=\x00"):
			v.add("command.env", "the name %s has a = or a NUL byte: remove it", shorten(name))
		case strings.ContainsRune(env[name], 0):
			// The value itself may be a secret and stays out of the message.
			v.add("command.env", "the value of %s has a NUL byte: remove it, or pass the data as stdinBytes", shorten(name))
		case strings.HasPrefix(name, reservedEnv) && !allowedEnv[name]:
			v.add("command.env", "the name %s is taken: names that begin with MILLRACE_ are set by the agent "+
				"(except MILLRACE_SERVER and MILLRACE_TOKEN); choose another", shorten(name))
		}
	}
}

func (v *validator) call(c *millracev1.Call) {
	switch h := c.GetHandler(); {
	case h == "":
		v.add("call.handler", "empty: give the name under which an agent registered the handler")
	case len(h) > maxHandlerBytes:
		v.add("call.handler", "%s is too long: use at most %d bytes", shorten(h), maxHandlerBytes)
	case hasControl(h):
		v.add("call.handler", "%s has a control character: use plain text", shorten(h))
	}
}

// unsupported lists what the message can already say and this version does not do. To ignore it would be worse than
// to refuse it: a task that asks for a GPU or a user must not run without. Whoever builds a feature removes its row.
var unsupported = []struct {
	path   string
	asked  func(*millracev1.Task) bool
	remedy string
}{
	{"signed", func(t *millracev1.Task) bool { return t.GetSigned() != nil }, "submit the task itself, unsigned"},
	{"after", func(t *millracev1.Task) bool { return len(t.GetAfter()) > 0 }, "submit the task when the others have ended"},
	{"unique", func(t *millracev1.Task) bool { return t.GetUnique() != "" }, "give the task an id of your own: the same id never runs twice"},
	{"limitKey", func(t *millracev1.Task) bool { return t.GetLimitKey() != "" }, "use a queue of its own with few slots"},
	{"preemptible", (*millracev1.Task).GetPreemptible, "leave it out"},
	{"secrets", func(t *millracev1.Task) bool { return len(t.GetSecrets()) > 0 }, "leave them out"},
	{"user", func(t *millracev1.Task) bool { return t.GetUser() != "" }, "leave it out; tasks run as the agent's user"},
	{"signalBefore", func(t *millracev1.Task) bool { return t.GetSignalBefore() != nil }, "leave it out; the signal TERM and the grace come after the timeout"},
	{"resources.gpus", func(t *millracev1.Task) bool { return t.GetResources().GetGpus() != 0 }, "leave it out and use a queue of agents with GPUs"},
	{"resources.cpus", func(t *millracev1.Task) bool { return t.GetResources().GetCpus() != 0 }, "leave it out"},
	{"resources.memoryBytes", func(t *millracev1.Task) bool { return t.GetResources().GetMemoryBytes() != 0 }, "leave it out"},
	{"resources.pids", func(t *millracev1.Task) bool { return t.GetResources().GetPids() != 0 }, "leave it out"},
}

func sortedKeys(m map[string]string) []string { return slices.Sorted(maps.Keys(m)) }

// hasControl finds line breaks, escapes and their like, which would break every list that shows the text.
func hasControl(s string) bool {
	return strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r >= 0x7f && r < 0xa0 })
}

// validTraceparent checks the form of a W3C trace context; versions after 00 may append more.
func validTraceparent(s string) bool {
	parts := strings.Split(s, "-")
	if len(s) > 256 || len(parts) < 4 || parts[0] == "00" && len(parts) > 4 || parts[0] == "ff" {
		return false
	}
	for i, digits := range []int{2, 32, 16, 2} {
		if len(parts[i]) != digits || strings.Trim(parts[i], "0123456789abcdef") != "" {
			return false
		}
	}
	return strings.Trim(parts[1], "0") != "" && strings.Trim(parts[2], "0") != ""
}

func reasonWord(r millracev1.Reason) string {
	return strings.ToLower(strings.TrimPrefix(r.String(), "REASON_"))
}

func format(t time.Time) string { return t.UTC().Format(time.RFC3339Nano) }

// span writes a bound for people: days above two of them.
func span(d time.Duration) string {
	if d > 2*day && d%day == 0 {
		return fmt.Sprintf("%d days", d/day)
	}
	if d == 0 {
		return "0s"
	}
	if d%time.Hour == 0 {
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	return d.String()
}
