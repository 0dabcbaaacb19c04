package spec

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// work is what a task needs to be valid; tests put it in front of what they look at.
const work = `"command":{"argv":["x"]}`

func TestValid(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"smallest":           `{` + work + `}`,
		"call":               `{"call":{"handler":"resize","payload":"AA=="}}`,
		"shell":              `{"command":{"argv":["","echo hi"],"shell":true}}`,
		"empty argument":     `{"command":{"argv":["x",""]}}`,
		"environment":        `{"command":{"argv":["x"],"env":{"A":"","a b":"=","MILLRACE":"x","MILLRACE_SERVER":"http://x","MILLRACE_TOKEN":"t"}}}`,
		"stdin":              `{"command":{"argv":["x"],"stdin":"\u0000","stdinBytes":""}}`,
		"in the past":        `{` + work + `,"notBefore":"2001-01-01T00:00:00Z","expiresAt":"2002-01-01T00:00:00Z"}`,
		"bounds of time":     `{` + work + `,"notBefore":"2000-01-01T00:00:00Z","expiresAt":"2200-12-31T23:59:59Z"}`,
		"bounds of duration": `{` + work + `,"timeout":"1ms","grace":"0s","retention":"1s","retry":{"backoff":{"initial":"0s","max":"0s"}}}`,
		"other bounds":       `{` + work + `,"timeout":"87600h","grace":"24h","retention":"87600h","retry":{"backoff":{"initial":"720h","max":"720h"}}}`,
		"retry":              `{` + work + `,"retry":{"maxAttempts":1000,"maxLost":1000,"backoff":{"factor":100,"jitter":1},"retryOn":["exit","signal","oom","timeout","refused","internal","exit"],"noRetryOn":["exit"]}}`,
		"plain data":         `{` + work + `,"id":"a.1","name":"näme","labels":{"a b=c":"x\ny"},"group":"a","arrayIndex":0,"traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}`,
		"later trace":        `{` + work + `,"traceparent":"cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more"}`,
		"options":            `{` + work + `,"queue":"gpu-8_x","priority":"high","onIsolation":"keep","log":{"split":true,"limitBytes":1099511627776},"resources":{"slots":1024}}`,
		"empty messages":     `{` + work + `,"log":{},"retry":{"backoff":{}},"resources":{},"after":[],"secrets":[]}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if err := Validate(parse(t, text), Limits{}); err != nil {
				t.Errorf("%s: %v", text, err)
			}
		})
	}
}

// TestInvalid holds the exact texts: a person meets them in a dead letter or an API error.
func TestInvalid(t *testing.T) {
	t.Parallel()
	const (
		pastTwo = "; leave it out for no timeout"
		allowed = "use exit, signal, oom, timeout, refused or internal"
	)
	for text, want := range map[string]string{
		`{}`:                        `command: missing, there is nothing to run: give "command": {"argv": ["echo", "hi"]} or "call": {"handler": "…"}`,
		`{"command":{}}`:            `command.argv: empty: give the program and its arguments, such as ["echo", "hi"]`,
		`{"command":{"argv":[""]}}`: `command.argv[0]: empty: give the name or the path of a program`,
		`{"command":{"argv":[" ","\n"],"shell":true}}`:               `command.argv: blank: give a line for the shell, such as ["echo hi | wc -c"]`,
		`{"command":{"argv":["x","a\u0000b","\u0000"]}}`:             `command.argv[1]: "a\x00b" has a NUL byte, which no program can be given: remove it, or pass the data as stdinBytes`,
		`{"command":{"argv":["x"],"dir":"/a\u0000"}}`:                `command.dir: "/a\x00" has a NUL byte: remove it`,
		`{"command":{"argv":["x"],"env":{"":"a"}}}`:                  `command.env: a variable has no name: give it one or remove it`,
		`{"command":{"argv":["x"],"env":{"A=B":"a"}}}`:               `command.env: the name "A=B" has a = or a NUL byte: remove it`,
		`{"command":{"argv":["x"],"env":{"A":"s3cr3t\u0000"}}}`:      `command.env: the value of "A" has a NUL byte: remove it, or pass the data as stdinBytes`,
		`{"command":{"argv":["x"],"env":{"MILLRACE_ID":"a"}}}`:       `command.env: the name "MILLRACE_ID" is taken: names that begin with MILLRACE_ are set by the agent (except MILLRACE_SERVER and MILLRACE_TOKEN); choose another`,
		`{"command":{"argv":["x"],"stdin":"a","stdinBytes":"AA=="}}`: `command.stdin: given together with stdinBytes: keep one of the two`,
		`{"call":{}}`:                         `call.handler: empty: give the name under which an agent registered the handler`,
		`{"call":{"handler":"a\n"}}`:          `call.handler: "a\n" has a control character: use plain text`,
		`{` + work + `,"id":"a b"}`:           `id: "a b" is not allowed: use 1 to 128 of A-Z a-z 0-9 . _ -, not starting with a dot, or leave it out to get one`,
		`{` + work + `,"group":".a"}`:         `group: ".a" is not allowed: use 1 to 128 of A-Z a-z 0-9 . _ -, not starting with a dot`,
		`{` + work + `,"name":"a\u001b"}`:     `name: "a\x1b" has a control character: use one line of plain text`,
		`{` + work + `,"queue":"GPU"}`:        `queue: "GPU" is not allowed: use 1 to 64 of a-z 0-9 _ -; did you mean "gpu"?`,
		`{` + work + `,"queue":"a:b"}`:        `queue: "a:b" is not allowed: use 1 to 64 of a-z 0-9 _ -`,
		`{` + work + `,"priority":"urgent"}`:  `priority: "urgent" is unknown: use high, normal or low`,
		`{` + work + `,"priority":"High"}`:    `priority: "High" is unknown: use high, normal or low`,
		`{` + work + `,"traceparent":"00-0"}`: `traceparent: "00-0" is not a W3C trace context: want 00-<32 hex digits>-<16 hex digits>-<2 hex digits>, or leave it out`,
		`{` + work + `,"traceparent":"00-00000000000000000000000000000000-b7ad6b7169203331-01"}`: `traceparent: "00-00000000000000000000000000000000-b7ad"… (55 bytes) is not a W3C trace context: want 00-<32 hex digits>-<16 hex digits>-<2 hex digits>, or leave it out`,
		`{` + work + `,"labels":{"":"a"}}`:                                                          `labels: a label has no name: give it one or remove it`,
		`{` + work + `,"labels":{"a\n":"a"}}`:                                                       `labels: the name "a\n" has a control character: use plain text`,
		`{` + work + `,"labels":{"a":"\u0000"}}`:                                                    `labels: the value of "a" has a NUL byte: remove it`,
		`{` + work + `,"timeout":"0s"}`:                                                             `timeout: 0s is out of range: want 1ms to 3650 days` + pastTwo,
		`{` + work + `,"timeout":"-2m"}`:                                                            `timeout: -2m0s is out of range: want 1ms to 3650 days` + pastTwo,
		`{` + work + `,"timeout":"87601h"}`:                                                         `timeout: 87601h0m0s is out of range: want 1ms to 3650 days` + pastTwo,
		`{` + work + `,"timeout":"315576000000s"}`:                                                  `timeout: 2562047h47m16.854775807s is out of range: want 1ms to 3650 days` + pastTwo,
		`{` + work + `,"grace":"-1ns"}`:                                                             `grace: -1ns is out of range: want 0s to 24h`,
		`{` + work + `,"retention":"999ms"}`:                                                        `retention: 999ms is out of range: want 1s to 3650 days`,
		`{` + work + `,"notBefore":"1999-12-31T23:59:59Z"}`:                                         `notBefore: 1999-12-31T23:59:59Z is out of range: want the years 2000 to 2200`,
		`{` + work + `,"expiresAt":"2201-01-01T00:00:00Z"}`:                                         `expiresAt: 2201-01-01T00:00:00Z is out of range: want the years 2000 to 2200`,
		`{` + work + `,"notBefore":"2030-01-01T00:00:00Z","expiresAt":"2030-01-01T01:00:00+01:00"}`: `expiresAt: 2030-01-01T00:00:00Z is not after notBefore (2030-01-01T00:00:00Z): such a task could never start; set it later or leave one out`,
		`{` + work + `,"retry":{"maxAttempts":1001}}`:                                               `retry.maxAttempts: 1001 is too many: want 1 to 1000`,
		`{` + work + `,"retry":{"maxLost":4294967295}}`:                                             `retry.maxLost: 4294967295 is too many: want 0 to 1000`,
		`{` + work + `,"retry":{"backoff":{"initial":"-1s"}}}`:                                      `retry.backoff.initial: -1s is out of range: want 0s to 30 days`,
		`{` + work + `,"retry":{"backoff":{"max":"721h"}}}`:                                         `retry.backoff.max: 721h0m0s is out of range: want 0s to 30 days`,
		`{` + work + `,"retry":{"backoff":{"initial":"2s","max":"1s"}}}`:                            `retry.backoff.max: 1s is less than initial (2s): make it longer or leave it out`,
		`{` + work + `,"retry":{"backoff":{"factor":0.5}}}`:                                         `retry.backoff.factor: 0.5 is out of range: want 1 to 100`,
		`{` + work + `,"retry":{"backoff":{"factor":101,"jitter":1.01}}}`:                           "retry.backoff.factor: 101 is out of range: want 1 to 100\nretry.backoff.jitter: 1.01 is out of range: want 0 to 1",
		`{` + work + `,"retry":{"retryOn":["worker_lost","worker_lost"]}}`:                          `retry.retryOn: worker_lost is decided by retry.maxLost (0 means never again): ` + allowed,
		`{` + work + `,"retry":{"noRetryOn":["preempted","never_started"]}}`:                        "retry.noRetryOn: preempted is always followed by another attempt: " + allowed + "\nretry.noRetryOn: never_started is always followed by another attempt: " + allowed,
		`{` + work + `,"retry":{"retryOn":["cancelled","dependency"]}}`:                             "retry.retryOn: cancelled is never followed by another attempt: " + allowed + "\nretry.retryOn: dependency is never followed by another attempt: " + allowed,
		`{` + work + `,"retry":{"retryOn":["unspecified"]}}`:                                        `retry.retryOn: unspecified is no reason: ` + allowed,
		`{` + work + `,"resources":{"slots":1025}}`:                                                 `resources.slots: 1025 is too many: want 1 to 1024`,
		`{` + work + `,"log":{"limitBytes":1099511627777}}`:                                         `log.limitBytes: 1099511627777 is too large: want at most 1099511627776, or leave it out for the agent's own limit`,
		`{` + work + `,"onIsolation":"stay"}`:                                                       `onIsolation: "stay" is unknown: use kill or keep`,
		`{"id":".","queue":"Q","priority":"x","command":{"argv":[]}}`: "id: \".\" is not allowed: use 1 to 128 of A-Z a-z 0-9 . _ -, not starting with a dot, or leave it out to get one\n" +
			"queue: \"Q\" is not allowed: use 1 to 64 of a-z 0-9 _ -; did you mean \"q\"?\n" +
			"priority: \"x\" is unknown: use high, normal or low\n" +
			"command.argv: empty: give the program and its arguments, such as [\"echo\", \"hi\"]",
	} {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			wantProblems(t, parse(t, text), Limits{}, want)
		})
	}
}

func wantProblems(t *testing.T, task *millracev1.Task, lim Limits, want string) {
	t.Helper()
	err := Validate(task, lim)
	if err == nil {
		t.Fatalf("valid, want %s", want)
	}
	if diff := cmp.Diff(want, err.Error()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestInvalidBinary has what only Protobuf can say.
func TestInvalidBinary(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		change func(*millracev1.Task)
		want   string
	}{
		"two signs": {func(t *millracev1.Task) { t.Grace = &durationpb.Duration{Seconds: 1, Nanos: -1} }, `grace: 1 s and -1 ns is not a duration: want 0s to 24h`},
		"no time":   {func(t *millracev1.Task) { t.NotBefore = &timestamppb.Timestamp{Nanos: -1} }, `notBefore: 0 s and -1 ns since 1970 is not a time: want the years 2000 to 2200`},
		"time 0":    {func(t *millracev1.Task) { t.ExpiresAt = &timestamppb.Timestamp{} }, `expiresAt: 1970-01-01T00:00:00Z is out of range: want the years 2000 to 2200`},
		"NaN": {func(t *millracev1.Task) {
			t.Retry = &millracev1.Retry{Backoff: &millracev1.Backoff{Factor: math.NaN(), Jitter: new(math.NaN())}}
		}, "retry.backoff.factor: NaN is out of range: want 1 to 100\nretry.backoff.jitter: NaN is out of range: want 0 to 1"},
		"Inf": {func(t *millracev1.Task) {
			t.Retry = &millracev1.Retry{Backoff: &millracev1.Backoff{Factor: math.Inf(1)}}
		}, "retry.backoff.factor: +Inf is out of range: want 1 to 100"},
		"unknown reason": {func(t *millracev1.Task) { t.Retry = &millracev1.Retry{RetryOn: []millracev1.Reason{99}} }, "retry.retryOn: 99 is no reason: use exit, signal, oom, timeout, refused or internal"},
		"unknown fields": {func(t *millracev1.Task) {
			t.ProtoReflect().SetUnknown([]byte{0xd0, 0x0f, 1})
			t.GetCommand().ProtoReflect().SetUnknown([]byte{0x78, 1})
		}, "task: field number 250 is not known to this version: leave it out, or update the dispatchers first\ncommand: field number 15 is not known to this version: leave it out, or update the dispatchers first"},
		"empty command":    {func(t *millracev1.Task) { t.Work = &millracev1.Task_Command{} }, `command.argv: empty: give the program and its arguments, such as ["echo", "hi"]`},
		"10,000 labels":    {func(t *millracev1.Task) { t.Labels = labels(10_000) }, `labels: 10000 labels are too many: use at most 64`},
		"65 labels":        {func(t *millracev1.Task) { t.Labels = labels(65) }, `labels: 65 labels are too many: use at most 64`},
		"long label":       {func(t *millracev1.Task) { t.Labels = map[string]string{strings.Repeat("a", 129): ""} }, `labels: the name "` + strings.Repeat("a", 40) + `"… (129 bytes) is too long: use at most 128 bytes`},
		"long label value": {func(t *millracev1.Task) { t.Labels = map[string]string{"a": strings.Repeat("a", 1025)} }, `labels: the value of "a" has 1025 bytes: use at most 1024`},
		"long name":        {func(t *millracev1.Task) { t.Name = strings.Repeat("ä", 129) }, `name: "` + strings.Repeat("ä", 20) + `"… (258 bytes) is too long: use at most 256 bytes`},
		"long id":          {func(t *millracev1.Task) { t.Id = strings.Repeat("a", 129) }, `id: "` + strings.Repeat("a", 40) + `"… (129 bytes) is not allowed: use 1 to 128 of A-Z a-z 0-9 . _ -, not starting with a dot, or leave it out to get one`},
		"long handler": {func(t *millracev1.Task) {
			t.Work = &millracev1.Task_Call{Call: &millracev1.Call{Handler: strings.Repeat("h", 129)}}
		}, `call.handler: "` + strings.Repeat("h", 40) + `"… (129 bytes) is too long: use at most 128 bytes`},
		"too large":           {func(t *millracev1.Task) { t.GetCommand().Stdin = strings.Repeat("a", DefaultLimit) }, fmt.Sprintf("task has %d bytes, at most 262144 are allowed: put large input into a file or an object store and pass its address", DefaultLimit+11)},
		"unsupported: signed": {func(t *millracev1.Task) { *t = millracev1.Task{Signed: &millracev1.SignedTask{}} }, `signed: not supported by this version: submit the task itself, unsigned`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			task := parse(t, `{`+work+`}`)
			tc.change(task)
			wantProblems(t, task, Limits{}, tc.want)
		})
	}
}

func labels(n int) map[string]string {
	m := make(map[string]string, n)
	for i := range n {
		m[fmt.Sprint("l", i)] = "v"
	}
	return m
}

func TestUnsupported(t *testing.T) {
	t.Parallel()
	for path, text := range map[string]string{
		"signed":                `"signed":{"task":"AA=="}`,
		"after":                 `"after":["a"]`,
		"unique":                `"unique":"u"`,
		"limitKey":              `"limitKey":"l"`,
		"preemptible":           `"preemptible":true`,
		"secrets":               `"secrets":["s"]`,
		"user":                  `"user":"nobody"`,
		"signalBefore":          `"signalBefore":{}`,
		"resources.gpus":        `"resources":{"gpus":1}`,
		"resources.cpus":        `"resources":{"cpus":0.5}`,
		"resources.memoryBytes": `"resources":{"memoryBytes":1}`,
		"resources.pids":        `"resources":{"pids":1}`,
	} {
		err := Validate(parse(t, `{`+work+`,`+text+`}`), Limits{})
		if err == nil || !strings.HasPrefix(err.Error(), path+": not supported by this version: ") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", text, err)
		}
	}
	if len(unsupported) != 12 {
		t.Errorf("%d rows are in the table: test the new ones, and drop those that work now", len(unsupported))
	}
}

func TestNoTask(t *testing.T) {
	t.Parallel()
	wantProblems(t, nil, Limits{}, `command: missing, there is nothing to run: give "command": {"argv": ["echo", "hi"]} or "call": {"handler": "…"}`)
}

func TestOwnLimit(t *testing.T) {
	t.Parallel()
	task := parse(t, `{"command":{"argv":["0123456789"]}}`)
	size := proto.Size(task)
	if err := Validate(task, Limits{TaskBytes: size}); err != nil {
		t.Errorf("at the limit: %v", err)
	}
	wantProblems(t, task, Limits{TaskBytes: size - 1}, fmt.Sprintf(
		"task has %d bytes, at most %d are allowed: put large input into a file or an object store and pass its address", size, size-1))
}
