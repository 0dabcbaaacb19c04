package protojs

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func TestUnmarshal(t *testing.T) {
	t.Parallel()
	argv := func(args ...string) *millracev1.Task_Command {
		return &millracev1.Task_Command{Command: &millracev1.Command{Argv: args}}
	}
	for name, tc := range map[string]struct {
		in   string
		want proto.Message
	}{
		"the smallest": {`{"command":{"argv":["echo","hi"]}}`, &millracev1.Task{Work: argv("echo", "hi")}},
		"camel and snake": {
			`{"notBefore":"2030-01-01T00:00:00Z","expires_at":"2030-01-01T02:00:00.5+02:00","array_index":0}`,
			&millracev1.Task{
				NotBefore:  &timestamppb.Timestamp{Seconds: 1893456000},
				ExpiresAt:  &timestamppb.Timestamp{Seconds: 1893456000, Nanos: 5e8},
				ArrayIndex: proto.Uint32(0),
			},
		},
		"durations": {
			`{"timeout":"120s","grace":"1.5s","retention":"1h30m"}`,
			&millracev1.Task{
				Timeout:   &durationpb.Duration{Seconds: 120},
				Grace:     &durationpb.Duration{Seconds: 1, Nanos: 5e8},
				Retention: &durationpb.Duration{Seconds: 5400},
			},
		},
		"negative duration":       {`{"timeout":"-2m"}`, &millracev1.Task{Timeout: &durationpb.Duration{Seconds: -120}}},
		"duration beyond Go's":    {`{"timeout":"-315576000000.5s"}`, &millracev1.Task{Timeout: &durationpb.Duration{Seconds: -315576000000, Nanos: -5e8}}},
		"null is absent":          {`{"id":null,"command":null,"call":{"handler":"h"},"arrayIndex":null}`, &millracev1.Task{Work: &millracev1.Task_Call{Call: &millracev1.Call{Handler: "h"}}}},
		"present and empty":       {`{"log":{},"labels":{},"after":[]}`, &millracev1.Task{Log: &millracev1.LogOptions{}}},
		"optional zero":           {`{"maxLost":0,"backoff":{"jitter":0}}`, &millracev1.Retry{MaxLost: proto.Uint32(0), Backoff: &millracev1.Backoff{Jitter: proto.Float64(0)}}},
		"enum words":              {`{"retryOn":["exit","worker_lost","unspecified"]}`, &millracev1.Retry{RetryOn: []millracev1.Reason{1, 7, 0}}},
		"bytes std":               {`{"payload":"+/8="}`, &millracev1.Call{Payload: []byte{0xfb, 0xff}}},
		"bytes url unpadded":      {`{"payload":"-_8"}`, &millracev1.Call{Payload: []byte{0xfb, 0xff}}},
		"64 bits":                 {`{"memoryBytes":18446744073709551615,"cpus":1.5e0}`, &millracev1.Resources{MemoryBytes: 1<<64 - 1, Cpus: 1.5}},
		"least int32":             {`{"exitCode":-2147483648}`, &millracev1.AttemptEnd{ExitCode: -1 << 31}},
		"map of bytes":            {`{"fields":{"":"","b":"AA=="}}`, &millracev1.DeadLetter{Fields: map[string][]byte{"": {}, "b": {0}}}},
		"escapes":                 {`{"name":"\ud83d\ude00 \\ud800 \u0000\n"}`, &millracev1.Task{Name: "😀 \\ud800 \x00\n"}},
		"white space around":      {" \n\t{ } \r\n", &millracev1.Task{}},
		"replacement char itself": {"{\"name\":\"\ufffd\"}", &millracev1.Task{Name: "\ufffd"}},
		"list of messages":        {`{"attempts":[{"attempt":1},{}]}`, &millracev1.TaskView{Attempts: []*millracev1.AttemptEnd{{Attempt: 1}, {}}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := tc.want.ProtoReflect().New().Interface()
			if err := Unmarshal([]byte(tc.in), got); err != nil {
				t.Fatalf("Unmarshal(%s): %v", tc.in, err)
			}
			if diff := cmp.Diff(tc.want, got, protocmp.Transform()); diff != "" {
				t.Errorf("Unmarshal(%s) (-want +got):\n%s", tc.in, diff)
			}
		})
	}
}

func TestUnmarshalResets(t *testing.T) {
	t.Parallel()
	got := &millracev1.Task{Id: "old", Labels: map[string]string{"a": "b"}}
	if err := Unmarshal([]byte(`{"name":"new"}`), got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&millracev1.Task{Name: "new"}, got, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
}

// TestUnmarshalProblems holds the texts: they are what a person sees in a dead letter or an API error.
func TestUnmarshalProblems(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		in, want string
		msg      proto.Message // Task when nil
	}{
		"unknown":              {in: `{"comand":{"argv":["x"]}}`, want: `unknown field "comand": did you mean "command"?`},
		"unknown deeper":       {in: `{"task":{"comand":{"argv":[]}}}`, msg: &millracev1.SubmitRequest{}, want: `unknown field "comand" at task.comand: did you mean "command"?`},
		"unknown in a list":    {in: `{"attempts":[{},{"exitcode":1}]}`, msg: &millracev1.TaskView{}, want: `unknown field "exitcode" at attempts[1].exitcode: did you mean "exitCode"?`},
		"unknown, one deeper":  {in: `{"argv":["x"]}`, want: `unknown field "argv": did you mean "command.argv"?`},
		"unknown, none near":   {in: `{"call":{"xyzzy":1}}`, want: `unknown field "xyzzy" at call.xyzzy: known are handler, payload`},
		"unknown, hostile":     {in: `{"call":{"\u001b[31m":1}}`, want: `unknown field "\x1b[31m" in call: known are handler, payload`},
		"unknown, no fields":   {in: `{"a":1}`, msg: &millracev1.ListQueuesRequest{}, want: `unknown field "a": no field is known here`},
		"several":              {in: `{"id":1,"idd":2,"log":{"split":"yes"}}`, want: "id: want a string, found the number 1: write \"1\"\nunknown field \"idd\": did you mean \"id\"?\nlog.split: want true or false, found the string \"yes\""},
		"list as string":       {in: `{"command":{"argv":"echo hi"}}`, want: `command.argv: want a list of strings, found the string "echo hi": write ["echo", "hi"]`},
		"list as quoted":       {in: `{"command":{"argv":"sh -c 'a b'"}}`, want: `command.argv: want a list of strings, found the string "sh -c 'a b'": write ["first", "second"]`},
		"element":              {in: `{"command":{"argv":["sleep",5]}}`, want: `command.argv[1]: want a string, found the number 5: write "5"`},
		"null element":         {in: `{"command":{"argv":["a",null]}}`, want: `command.argv[1]: want a string, found null`},
		"map as list":          {in: `{"command":{"env":["A=b"]}}`, want: `command.env: want an object of strings, found a list: write {"NAME": "value"}`},
		"map value":            {in: `{"labels":{"n":5,"x":{"y":1},"z":null}}`, want: "labels[\"n\"]: want a string, found the number 5: write \"5\"\nlabels[\"x\"]: want a string, found an object\nlabels[\"z\"]: want a string, found null"},
		"object as string":     {in: `{"command":"echo hi"}`, want: `command: want an object, found the string "echo hi"`},
		"bool as string":       {in: `{"preemptible":"true"}`, want: `preemptible: want true or false, found the string "true": write true without quotes`},
		"number as string":     {in: `{"retry":{"maxAttempts":"3"}}`, want: `retry.maxAttempts: want a whole number, found the string "3": write 3 without quotes`},
		"fraction":             {in: `{"retry":{"maxAttempts":1.5}}`, want: `retry.maxAttempts: want a whole number, found 1.5: write it without a fraction or an exponent`},
		"exponent":             {in: `{"retry":{"maxAttempts":1e3}}`, want: `retry.maxAttempts: want a whole number, found 1e3: write it without a fraction or an exponent`},
		"negative":             {in: `{"arrayIndex":-1}`, want: `arrayIndex: -1 is out of range: want 0 to 4294967295`},
		"too large 64":         {in: `{"resources":{"memoryBytes":18446744073709551616}}`, want: `resources.memoryBytes: 18446744073709551616 is out of range: want 0 to 18446744073709551615`},
		"too large int32":      {in: `{"exitCode":2147483648}`, msg: &millracev1.AttemptEnd{}, want: `exitCode: 2147483648 is out of range: want -2147483648 to 2147483647`},
		"float too large":      {in: `{"resources":{"cpus":1e999}}`, want: `resources.cpus: 1e999 is out of range for a number with 64 bits`},
		"float as NaN":         {in: `{"resources":{"cpus":"NaN"}}`, want: `resources.cpus: want a number, found the string "NaN"`},
		"duration as number":   {in: `{"timeout":120}`, want: `timeout: want a duration such as "90s", "2m" or "1h30m", found the number 120: if seconds are meant, write "120s"`},
		"duration in words":    {in: `{"timeout":"2 minutes"}`, want: `timeout: want a duration such as "90s", "2m" or "1h30m", found "2 minutes"`},
		"duration as object":   {in: `{"timeout":{"seconds":[1,{"a":2}]},"idd":1}`, want: "timeout: want a duration such as \"90s\", \"2m\" or \"1h30m\", found an object\nunknown field \"idd\": did you mean \"id\"?"},
		"duration far out":     {in: `{"timeout":"315576000001s"}`, want: `timeout: want a duration such as "90s", "2m" or "1h30m", found "315576000001s"`},
		"time without zone":    {in: `{"notBefore":"2030-01-01 00:00:00"}`, want: `notBefore: want a time such as "2030-01-31T12:00:00Z" (RFC 3339 with a zone), found "2030-01-01 00:00:00"`},
		"time as number":       {in: `{"notBefore":1893456000}`, want: `notBefore: want a time such as "2030-01-31T12:00:00Z", found the number 1893456000`},
		"time before year 1":   {in: `{"notBefore":"0000-01-01T00:00:00Z"}`, want: `notBefore: want a time such as "2030-01-31T12:00:00Z" (RFC 3339 with a zone), found "0000-01-01T00:00:00Z"`},
		"bad base64":           {in: `{"command":{"stdinBytes":"hi!"}}`, want: `command.stdinBytes: want bytes in base64, found "hi!"`},
		"bytes as list":        {in: `{"call":{"payload":[1,2]}}`, want: `call.payload: want a string in base64, found a list`},
		"enum":                 {in: `{"retry":{"retryOn":["EXIT","crash"]}}`, want: "retry.retryOn[0]: unknown word \"EXIT\": want one of exit, signal, oom, timeout, cancelled, preempted, worker_lost, refused, never_started, dependency, internal\nretry.retryOn[1]: unknown word \"crash\": want one of exit, signal, oom, timeout, cancelled, preempted, worker_lost, refused, never_started, dependency, internal"},
		"enum as number":       {in: `{"retry":{"retryOn":[1]}}`, want: `retry.retryOn[0]: want a word, found the number 1`},
		"enum list as string":  {in: `{"retry":{"retryOn":"exit"}}`, want: `retry.retryOn: want a list of words, found the string "exit"`},
		"duplicate":            {in: `{"id":"a","id":"b"}`, want: `id: given twice: remove one`},
		"duplicate by case":    {in: `{"notBefore":null,"not_before":[1]}`, want: `notBefore: given twice: remove one`},
		"duplicate map key":    {in: `{"labels":{"a":"1","a":"2"}}`, want: `labels["a"]: given twice: remove one`},
		"both of a oneof":      {in: `{"command":{"argv":["x"]},"call":{"handler":"h"}}`, want: `call: cannot be given together with command: keep one of the two`},
		"both of a oneof, bad": {in: `{"command":5,"call":[1]}`, want: "command: want an object, found the number 5\ncall: cannot be given together with command: keep one of the two"},
		"not an object":        {in: `[{"id":"a"}]`, want: `want a JSON object such as {"…": …}, found a list`},
		"only null":            {in: `null`, want: `want a JSON object such as {"…": …}, found null`},
		"empty":                {in: " \n", want: `empty: want a JSON object`},
		"BOM":                  {in: "\xef\xbb\xbf{}", want: `begins with a byte order mark: write it as UTF-8 without one`},
		"UTF-16":               {in: "\xff\xfe{\x00}\x00", want: `looks like UTF-16: write it as UTF-8 without a byte order mark`},
		"not UTF-8":            {in: "{\"name\":\"a\xff\"}", want: `not valid UTF-8 at byte 10: bytes that are not text go into base64 fields`},
		"lone surrogate":       {in: `{"name":"\ud800\n"}`, want: `half a character at byte 9: \ud800 needs its other half (a surrogate pair), or write the character itself`},
		"second half alone":    {in: `{"name":"\\\uDE00"}`, want: `half a character at byte 11: \uDE00 needs its other half (a surrogate pair), or write the character itself`},
		"trailing":             {in: `{} {}`, want: `not JSON: invalid character '{' after top-level value at byte 3, behind "{} ": only one object is allowed`},
		"cut off":              {in: `{"command":{"argv":["x"`, want: `not JSON: it ends too early: a closing } or ] or " is missing`},
		"single quotes":        {in: `{'id':'a'}`, want: `not JSON: invalid character '\'' looking for beginning of object key string at byte 1, behind "{": JSON wants double quotes (")`},
		"trailing comma":       {in: `{"id":"a",}`, want: `not JSON: invalid character '}' looking for beginning of object key string at byte 10, behind "{\"id\":\"a\",": is there a comma too many?`},
		"NaN":                  {in: `{"resources":{"cpus":NaN}}`, want: `not JSON: invalid character 'N' looking for beginning of value at byte 21, behind "\"resources\":{\"cpus\":"`},
		"deep":                 {in: `{"x":` + strings.Repeat("[", 40) + strings.Repeat("]", 40) + `}`, want: `nested deeper than 32 levels`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := tc.msg
			if m == nil {
				m = &millracev1.Task{}
			}
			err := Unmarshal([]byte(tc.in), m)
			if err == nil {
				t.Fatalf("Unmarshal(%s) = nil, want %s", tc.in, tc.want)
			}
			if diff := cmp.Diff(tc.want, err.Error()); diff != "" {
				t.Errorf("Unmarshal(%s) (-want +got):\n%s", tc.in, diff)
			}
		})
	}
}

func TestUnmarshalManyProblems(t *testing.T) {
	t.Parallel()
	in := `{"labels":{` + strings.TrimSuffix(strings.Repeat(`"a":1,`, 500), ",") + `}}`
	err := Unmarshal([]byte(in), &millracev1.Task{})
	if err == nil {
		t.Fatal("want an error")
	}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != maxProblems+1 || lines[maxProblems] != "and 480 more" {
		t.Errorf("got %d lines, the last is %q", len(lines), lines[len(lines)-1])
	}
}

func TestHugeNumbersAreCheap(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("9", 100_000)
	for _, in := range []string{`{"retry":{"maxAttempts":` + long + `}}`, `{"resources":{"cpus":1e-` + long + `}}`, `{"` + long + `":1}`, `{"timeout":"` + long + `s"}`} {
		err := Unmarshal([]byte(in), &millracev1.Task{})
		if err != nil && len(err.Error()) > 1000 {
			t.Errorf("the error has %d bytes", len(err.Error()))
		}
	}
}
