package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/millrace/millrace/internal/spec"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// taskFlags describe a task on the command line.
type taskFlags struct {
	id, name, queue, priority string
	labels, env               []string
	timeout, grace            time.Duration
	delay                     time.Duration
	at, expires               string
	retention                 time.Duration
	attempts, retries         uint32
	maxLost                   uint32
	backoff                   time.Duration
	dir, stdin                string
	shell, split              bool
	logLimit                  string
	call, payload             string
	slots                     uint32
}

func (f *taskFlags) register(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.SetInterspersed(false) // what follows the command is the command's
	fs.StringVar(&f.name, "name", "", "name for people")
	fs.StringVarP(&f.queue, "queue", "q", "", `queue (default "default")`)
	fs.StringVarP(&f.priority, "priority", "p", "", "high, normal or low (default normal)")
	fs.StringArrayVarP(&f.labels, "label", "l", nil, "label as key=value; may be repeated")
	fs.DurationVarP(&f.timeout, "timeout", "t", 0, "longest run of one attempt, such as 90s or 2h (default none)")
	fs.DurationVar(&f.grace, "grace", 0, "time between SIGTERM and SIGKILL (default 10s)")
	fs.Uint32Var(&f.retries, "retries", 0, "how often to try again after a failure")
	fs.Uint32Var(&f.attempts, "max-attempts", 0, "the same as --retries, counting the first attempt too (default 1)")
	fs.Uint32Var(&f.maxLost, "max-lost", 0, "attempts that may be lost with their worker (default 3)")
	fs.DurationVar(&f.backoff, "backoff", 0, "pause before the second attempt, doubled for each later one (default 1s)")
	fs.StringArrayVarP(&f.env, "env", "e", nil, "environment as NAME=value, or NAME to pass on yours; may be repeated")
	fs.StringVar(&f.dir, "dir", "", "working directory on the worker (default one made for the attempt)")
	fs.StringVar(&f.stdin, "stdin", "", "file whose content is the task's standard input; - for this command's own")
	fs.StringVar(&f.id, "id", "", "id of the task; submitting the same task under the same id again makes no second one")
	fs.DurationVar(&f.delay, "delay", 0, "do not start before this time has passed")
	fs.StringVar(&f.at, "not-before", "", "do not start before this time, as 2030-01-31T12:00:00Z")
	fs.StringVar(&f.expires, "expires", "", "do not start after this time, or after this long, as 10m")
	fs.DurationVar(&f.retention, "retention", 0, "how long the record is kept after the end (default 24h)")
	fs.BoolVar(&f.shell, "shell", false, "run the arguments, joined by spaces, with /bin/sh -c")
	fs.BoolVar(&f.split, "split", false, "keep stdout and stderr apart; their order to each other is lost")
	fs.StringVar(&f.logLimit, "log-limit", "", "bytes of output that are kept, as 64MiB; head and tail are")
	fs.StringVar(&f.call, "call", "", "call this Go handler of an agent instead of running a command")
	fs.StringVar(&f.payload, "payload", "", "what the handler is called with; @FILE for a file, - for standard input")
	fs.Uint32Var(&f.slots, "slots", 0, "slots of the worker that the task takes (default 1)")
	cmd.MarkFlagsMutuallyExclusive("retries", "max-attempts")
	cmd.MarkFlagsMutuallyExclusive("delay", "not-before")
	for _, name := range []string{"shell", "dir", "stdin", "env"} {
		cmd.MarkFlagsMutuallyExclusive("call", name)
	}
}

// task builds the task and checks it, so that a mistake is told without a server. limit is not known here: the
// dispatcher may allow more or less than the default.
func (f *taskFlags) task(cmd *cobra.Command, args []string, in io.Reader, now time.Time) (*millracev1.Task, error) {
	t := &millracev1.Task{Id: f.id, Name: f.name, Queue: f.queue, Priority: f.priority}
	set := cmd.Flags().Changed
	var errs []error
	keep := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	keep(f.work(t, args, in))
	var err error
	t.Labels, err = pairs("label", f.labels, false)
	keep(err)
	for flag, to := range map[string]struct {
		value time.Duration
		field **durationpb.Duration
	}{"timeout": {f.timeout, &t.Timeout}, "grace": {f.grace, &t.Grace}, "retention": {f.retention, &t.Retention}} {
		if set(flag) {
			*to.field = durationpb.New(to.value)
		}
	}
	if set("delay") {
		t.NotBefore = timestamppb.New(now.Add(f.delay))
	}
	t.NotBefore, err = moment("not-before", f.at, now, t.NotBefore)
	keep(err)
	t.ExpiresAt, err = moment("expires", f.expires, now, nil)
	keep(err)
	keep(f.rest(t, set))
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return t, spec.Validate(t, spec.Limits{TaskBytes: maxTaskBytes})
}

// maxTaskBytes is the most that any dispatcher can be configured to take.
const maxTaskBytes = 64 << 20

// rest sets what is in messages of its own, which are left out when nothing in them is asked for.
func (f *taskFlags) rest(t *millracev1.Task, set func(string) bool) error {
	if set("retries") || set("max-attempts") || set("max-lost") || set("backoff") {
		t.Retry = &millracev1.Retry{MaxAttempts: f.attempts}
		if set("retries") {
			t.Retry.MaxAttempts = f.retries + 1
		}
		if set("max-lost") {
			t.Retry.MaxLost = new(f.maxLost)
		}
		if set("backoff") {
			t.Retry.Backoff = &millracev1.Backoff{Initial: durationpb.New(f.backoff)}
		}
	}
	if set("slots") {
		t.Resources = &millracev1.Resources{Slots: f.slots}
	}
	if f.split || f.logLimit != "" {
		n, err := byteSize(f.logLimit)
		if err != nil {
			return fmt.Errorf("--log-limit: %w", err)
		}
		t.Log = &millracev1.LogOptions{Split: f.split, LimitBytes: n}
	}
	return nil
}

func (f *taskFlags) work(t *millracev1.Task, args []string, in io.Reader) error {
	if f.call != "" {
		if len(args) > 0 {
			return errors.New("--call and a command exclude each other: leave one out")
		}
		payload, err := content(f.payload, in)
		if err != nil {
			return fmt.Errorf("--payload: %w", err)
		}
		t.Work = &millracev1.Task_Call{Call: &millracev1.Call{Handler: f.call, Payload: payload}}
		return nil
	}
	if f.payload != "" {
		return errors.New("--payload is for --call: use --stdin to feed a command")
	}
	if len(args) == 0 {
		return errors.New("the command is missing: write it behind --, as in `-- python3 train.py`")
	}
	env, err := pairs("env", f.env, true)
	if err != nil {
		return err
	}
	c := &millracev1.Command{Argv: args, Shell: f.shell, Env: env, Dir: f.dir}
	if f.stdin != "" {
		data, err := fileOrInput(f.stdin, in)
		if err != nil {
			return fmt.Errorf("--stdin: %w", err)
		}
		if utf8.Valid(data) {
			c.Stdin = string(data)
		} else {
			c.StdinBytes = data
		}
	}
	t.Work = &millracev1.Task_Command{Command: c}
	return nil
}

// pairs reads key=value words; with fromEnv a lone name stands for its value in our environment.
func pairs(flag string, words []string, fromEnv bool) (map[string]string, error) {
	if len(words) == 0 {
		return nil, nil
	}
	m := make(map[string]string, len(words))
	for _, w := range words {
		k, v, ok := strings.Cut(w, "=")
		if !ok && fromEnv {
			if v, ok = os.LookupEnv(k); !ok {
				return nil, fmt.Errorf("--%s %s: it is not set in your environment: write %s=value", flag, k, k)
			}
		}
		if !ok || k == "" {
			return nil, fmt.Errorf("--%s %q: write it as key=value", flag, w)
		}
		m[k] = v
	}
	return m, nil
}

// moment reads a time, or a span from now on.
func moment(flag, s string, now time.Time, otherwise *timestamppb.Timestamp) (*timestamppb.Timestamp, error) {
	if s == "" {
		return otherwise, nil
	}
	if d, err := time.ParseDuration(s); err == nil {
		return timestamppb.New(now.Add(d)), nil
	}
	at, err := time.Parse(time.RFC3339Nano, s)
	if err != nil {
		return nil, fmt.Errorf("--%s %q: write a time as %s, or a span as 10m", flag, s, now.UTC().Format(time.RFC3339))
	}
	return timestamppb.New(at), nil
}

var byteUnits = []struct {
	suffix string
	size   uint64
}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"GB", 1e9}, {"MB", 1e6}, {"kB", 1e3}, {"G", 1 << 30}, {"M", 1 << 20}, {"K", 1 << 10}, {"B", 1}}

// byteSize reads a number of bytes with an optional unit.
func byteSize(s string) (uint64, error) {
	if s == "" {
		return 0, nil
	}
	num, unit := s, uint64(1)
	for _, u := range byteUnits {
		if n, ok := strings.CutSuffix(s, u.suffix); ok {
			num, unit = strings.TrimSpace(n), u.size
			break
		}
	}
	var n uint64
	if _, err := fmt.Sscanf(num+"\n", "%d\n", &n); err != nil || n > 1<<40 || n*unit/unit != n {
		return 0, fmt.Errorf("%q is not a number of bytes: write 1048576 or 64MiB", s)
	}
	return n * unit, nil
}

// content is text as given, @FILE or - for standard input.
func content(s string, in io.Reader) ([]byte, error) {
	if name, ok := strings.CutPrefix(s, "@"); ok {
		return fileOrInput(name, in)
	}
	if s == "-" {
		return fileOrInput(s, in)
	}
	return []byte(s), nil
}

// fileOrInput reads a file, or standard input for "-", up to what a task can hold.
func fileOrInput(name string, in io.Reader) ([]byte, error) {
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer func() { _ = f.Close() }()
		in = f
	}
	data, err := io.ReadAll(io.LimitReader(in, maxTaskBytes+1))
	if err == nil && len(data) > maxTaskBytes {
		err = fmt.Errorf("%s is larger than a task can be: put it where the worker can read it, and pass its address", name)
	}
	return data, err
}
