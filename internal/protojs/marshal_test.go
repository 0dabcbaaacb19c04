package protojs

import (
	"math"
	"testing"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

var _ connect.Codec = Codec{}

func TestMarshal(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		in   proto.Message
		want string
	}{
		"empty": {&millracev1.Task{}, `{}`},
		"task": {&millracev1.Task{
			Id: "a", Labels: map[string]string{"b": "2", "a": "1", "": "0"},
			Work:       &millracev1.Task_Command{Command: &millracev1.Command{Argv: []string{"echo", "hi"}, StdinBytes: []byte{0xfb, 0xff}}},
			Timeout:    durationpb.New(120e9),
			NotBefore:  &timestamppb.Timestamp{Seconds: 1893456000, Nanos: 1},
			ArrayIndex: proto.Uint32(0), Log: &millracev1.LogOptions{},
			Retry: &millracev1.Retry{RetryOn: []millracev1.Reason{7, 0, 99}, MaxLost: proto.Uint32(0)},
		}, `{"id":"a","labels":{"":"0","a":"1","b":"2"},"command":{"argv":["echo","hi"],"stdinBytes":"+/8="},"timeout":"2m",` +
			`"notBefore":"2030-01-01T00:00:00.000000001Z","retry":{"maxLost":0,"retryOn":["worker_lost","unspecified",99]},"log":{},"arrayIndex":0}`},
		"view":     {&millracev1.TaskView{State: millracev1.State_STATE_QUEUED, ExitCode: proto.Int32(0)}, `{"state":"queued","exitCode":0}`},
		"nested":   {&millracev1.LogChunk{Compression: millracev1.LogChunk_COMPRESSION_ZSTD, Size: 1<<64 - 1}, `{"compression":"zstd","size":18446744073709551615}`},
		"floats":   {&millracev1.Backoff{Factor: 1e21, Jitter: new(1e-7)}, `{"factor":1e+21,"jitter":1e-07}`},
		"harmless": {&millracev1.Task{Name: "\x1b[31m\u0085\u2028</script>&\"\\\n\r\t\x00é"}, `{"name":"\u001b[31m\u0085\u2028\u003c/script\u003e\u0026\"\\\n\r\t\u0000é"}`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := Marshal(tc.in)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, string(got)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestMarshalFull(t *testing.T) {
	t.Parallel()
	got, err := MarshalOptions{Full: true, Indent: "  "}.Append([]byte("> "), &millracev1.CancelTaskResponse{Id: "a"})
	if err != nil {
		t.Fatal(err)
	}
	want := "> {\n  \"id\": \"a\",\n  \"state\": null,\n  \"accepted\": false\n}"
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	got, err = Codec{Full: true}.Marshal(&millracev1.SubmitRequest{Task: &millracev1.Task{Id: "a", Log: &millracev1.LogOptions{}}})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(`{"task":{"id":"a","log":{}}}`, string(got)); diff != "" {
		t.Errorf("a task is filled up (-want +got):\n%s", diff)
	}
	got, err = Codec{Full: true}.Marshal(kinds(t).New().Interface())
	if err != nil {
		t.Fatal(err)
	}
	want = `{"aBool":false,"i32":0,"s32":0,"sf32":[],"f32":0,"i64":[],"s64":0,"sf64":0,"f64":0,"flt":[],"child":null,` +
		`"byBool":{},"byInt":{},"word":null,"zLast":""}`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestMarshalProblems(t *testing.T) {
	t.Parallel()
	for want, m := range map[string]proto.Message{
		`encode Backoff as JSON: factor: NaN has no form in JSON`:                                    &millracev1.Backoff{Factor: math.NaN()},
		`encode Task as JSON: timeout: duration of 1 s and -1 ns is out of range or has two signs`:   &millracev1.Task{Timeout: &durationpb.Duration{Seconds: 1, Nanos: -1}},
		`encode Task as JSON: notBefore: time of 253402300800 s and 0 ns since 1970 is out of range`: &millracev1.Task{NotBefore: &timestamppb.Timestamp{Seconds: 253402300800}},
		`encode Task as JSON: command: argv: element 1: "\xff" is not valid UTF-8`:                   &millracev1.Task{Work: &millracev1.Task_Command{Command: &millracev1.Command{Argv: []string{"", "\xff"}}}},
		`encode Task as JSON: labels: key "a": "\xff" is not valid UTF-8`:                            &millracev1.Task{Labels: map[string]string{"a": "\xff"}},
		`encode Task as JSON: labels: key: "\xff" is not valid UTF-8`:                                &millracev1.Task{Labels: map[string]string{"\xff": ""}},
		`encode JSON: no message`: nil,
	} {
		if _, err := Marshal(m); err == nil || err.Error() != want {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

func TestFormatDuration(t *testing.T) {
	t.Parallel()
	for want, d := range map[string]*durationpb.Duration{
		"0s":               {},
		"2m":               {Seconds: 120},
		"1h":               {Seconds: 3600},
		"-1h30m":           {Seconds: -5400},
		"1h0m1s":           {Seconds: 3601},
		"10m":              {Seconds: 600},
		"1.5s":             {Seconds: 1, Nanos: 5e8},
		"100ns":            {Nanos: 100},
		"315576000000s":    {Seconds: 315576000000},
		"-9300000000.005s": {Seconds: -9300000000, Nanos: -5e6},
	} {
		got := formatDuration(d)
		if got != want {
			t.Errorf("formatDuration(%v) = %q, want %q", d, got, want)
		}
		if back, ok := parseDuration(got); !ok || !proto.Equal(back, d) {
			t.Errorf("parseDuration(%q) = %v, %t, want %v", got, back, ok, d)
		}
	}
}

func TestCodec(t *testing.T) {
	t.Parallel()
	c := Codec{Label: CodecNameCharset}
	if c.Name() != "json; charset=utf-8" || (Codec{}).Name() != "json" || c.IsBinary() {
		t.Errorf("Name() = %q, IsBinary() = %t", c.Name(), c.IsBinary())
	}
	if _, err := c.Marshal(5); err == nil || err.Error() != "encode int as JSON: not a Protobuf message" {
		t.Errorf("Marshal(5): %v", err)
	}
	if err := c.Unmarshal([]byte("{}"), 5); err == nil || err.Error() != "decode JSON into int: not a Protobuf message" {
		t.Errorf("Unmarshal into 5: %v", err)
	}
	got, err := c.MarshalAppend([]byte("x"), &millracev1.SubmitResponse{Id: "a", Created: true})
	if err != nil || string(got) != `x{"id":"a","created":true}` {
		t.Errorf("MarshalAppend: %s, %v", got, err)
	}
	var back millracev1.SubmitResponse
	if err := c.Unmarshal(got[1:], &back); err != nil || back.GetId() != "a" {
		t.Errorf("Unmarshal: %v, %v", &back, err)
	}
}

func BenchmarkUnmarshal(b *testing.B) {
	in := []byte(`{"id":"train-17","queue":"gpu","labels":{"user":"ann"},"command":{"argv":["python3","train.py","--seed","17"],"env":{"A":"b"}},"timeout":"2h","retry":{"maxAttempts":3}}`)
	b.ReportAllocs()
	for b.Loop() {
		if err := Unmarshal(in, &millracev1.Task{}); err != nil {
			b.Fatal(err)
		}
	}
}
