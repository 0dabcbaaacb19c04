package api_test

import (
	"flag"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/millrace/millrace/internal/api"
	"github.com/millrace/millrace/internal/protojs"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

var update = flag.Bool("update", false, "write the golden files")

var noon = time.Date(2030, 1, 31, 12, 0, 0, 0, time.UTC)

// record is one as the store reads it; change makes it special.
func record(t *testing.T, st task.State, change func(*store.Record)) *store.Record {
	t.Helper()
	spec, err := proto.Marshal(&millracev1.Task{
		Name: "train", Timeout: durationpb.New(2 * time.Second), ExpiresAt: timestamppb.New(noon.Add(time.Hour)),
		Work: &millracev1.Task_Command{Command: &millracev1.Command{Argv: []string{"python3", "train.py"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	r := &store.Record{ID: "t1", Spec: spec, Created: noon}
	r.State, r.Attempt, r.Lane = st, 1, "default:normal"
	if change != nil {
		change(r)
	}
	return r
}

func ran(ends ...*millracev1.AttemptEnd) func(*store.Record) {
	return func(r *store.Record) {
		r.Owner, r.Started, r.Ended = "agent-1", noon.Add(time.Second), noon.Add(3*time.Second)
		for i, e := range ends {
			e.Attempt, e.Worker = uint32(i+1), "agent-1" //nolint:gosec // a handful
			r.Reason = e.GetReason()
		}
		r.Ends, r.Attempt = ends, uint32(len(ends)) //nolint:gosec // a handful
	}
}

// TestView holds the JSON of a task to files: programs read it, so that a change must be meant.
func TestView(t *testing.T) {
	t.Parallel()
	exit := func() *millracev1.AttemptEnd {
		return &millracev1.AttemptEnd{Reason: millracev1.Reason_REASON_EXIT, ExitCode: 3}
	}
	for name, r := range map[string]*store.Record{
		"queued":  record(t, task.Queued, nil),
		"running": record(t, task.Running, func(r *store.Record) { r.Owner, r.Started, r.Cancel = "agent-1", noon, true }),
		"succeeded": record(t, task.Succeeded, func(r *store.Record) {
			ran(&millracev1.AttemptEnd{})(r)
			r.LogOf = 1
			r.Log, _ = proto.Marshal(&millracev1.LogView{Complete: true, Bytes: 5})
		}),
		"failed":  record(t, task.Failed, ran(exit())),
		"signal":  record(t, task.Failed, ran(&millracev1.AttemptEnd{Reason: millracev1.Reason_REASON_SIGNAL, ExitCode: 139, Signal: "SEGV", CoreDumped: true})),
		"timeout": record(t, task.Failed, ran(&millracev1.AttemptEnd{Reason: millracev1.Reason_REASON_TIMEOUT, ExitCode: 143, Signal: "TERM"})),
		"refused": record(t, task.Failed, ran(&millracev1.AttemptEnd{Reason: millracev1.Reason_REASON_REFUSED, ExitCode: 127, Message: `program "x" was not found`})),
		"lost for good": record(t, task.Failed, func(r *store.Record) {
			ran(&millracev1.AttemptEnd{Reason: millracev1.Reason_REASON_WORKER_LOST}, &millracev1.AttemptEnd{Reason: millracev1.Reason_REASON_WORKER_LOST})(r)
			r.Lost = 2
		}),
		"waits for its retry": record(t, task.Delayed, func(r *store.Record) {
			ran(exit())(r)
			r.Attempt, r.Failures, r.Due, r.Ended, r.Reason = 2, 1, noon.Add(time.Minute), time.Time{}, 0
		}),
		"cancelled in the queue": record(t, task.Cancelled, func(r *store.Record) {
			r.Ended, r.Reason, r.Cancel = noon.Add(time.Second), millracev1.Reason_REASON_CANCELLED, true
		}),
		"cancelled before its retry": record(t, task.Cancelled, func(r *store.Record) {
			ran(exit())(r)
			r.Attempt, r.Failures, r.Reason, r.Cancel = 2, 1, millracev1.Reason_REASON_CANCELLED, true
		}),
		"cancelled with exit 0": record(t, task.Cancelled, ran(&millracev1.AttemptEnd{Reason: millracev1.Reason_REASON_CANCELLED})),
		"killed after grace":    record(t, task.Cancelled, ran(&millracev1.AttemptEnd{Reason: millracev1.Reason_REASON_CANCELLED, ExitCode: 137, Signal: "KILL", Killed: true})),
		"expired":               record(t, task.Expired, func(r *store.Record) { r.Ended = noon.Add(time.Hour) }),
		"unreadable spec":       record(t, task.Queued, func(r *store.Record) { r.Spec = []byte{0xff} }),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := protojs.MarshalOptions{Full: true, Indent: "  "}.Marshal(api.View(r, true))
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, '\n')
			file := filepath.Join("testdata", "view", filepath.Base(t.Name())+".json")
			if *update {
				if err := os.WriteFile(file, got, 0o600); err != nil {
					t.Fatal(err)
				}
				return
			}
			want, err := os.ReadFile(file) //nolint:gosec // ours
			if err != nil {
				t.Fatalf("%v: write it with -update", err)
			}
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("%s (-want +got); if it is meant, write it with -update:\n%s", file, diff)
			}
		})
	}
}
