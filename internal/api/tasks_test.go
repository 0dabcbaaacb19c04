package api_test

import (
	"context"
	"net/http"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/millrace/millrace/internal/apitest"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
	"github.com/millrace/millrace/proto/millrace/v1/millracev1connect"
)

func tasks(t *testing.T, f *apitest.Fleet) millracev1connect.TaskServiceClient {
	t.Helper()
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return millracev1connect.NewTaskServiceClient(&http.Client{Transport: transport}, f.URL)
}

const lane = "default:normal"

type waited struct {
	resp *millracev1.WaitTaskResponse
	err  error
}

// wait calls WaitTask in the background.
func wait(ctx context.Context, c millracev1connect.TaskServiceClient, id string, logs bool) <-chan waited {
	out := make(chan waited, 1)
	go func() {
		resp, err := c.WaitTask(ctx, connect.NewRequest(&millracev1.WaitTaskRequest{Id: id, Timeout: durationpb.New(time.Minute), Logs: logs}))
		if err != nil {
			out <- waited{err: err}
			return
		}
		out <- waited{resp: resp.Msg}
	}()
	return out
}

func TestWaitIsWokenByTheResult(t *testing.T) {
	t.Parallel()
	f := apitest.Start(t, apitest.Options{})
	c := tasks(t, f)
	f.Submit(apitest.Command("w-1"))
	got := wait(t.Context(), c, "w-", false) // by prefix
	f.Claim(lane, 1)
	begin := time.Now()
	f.Finish("w-1", &millracev1.AttemptEnd{Reason: millracev1.Reason_REASON_EXIT, ExitCode: 3})
	w := <-got
	if w.err != nil || !w.resp.GetDone() || w.resp.GetTask().GetExitCode() != 3 || w.resp.GetTask().GetMessage() != "exit 3" {
		t.Errorf("%+v", w)
	}
	if d := time.Since(begin); d > 3*time.Second {
		t.Errorf("woken after %v", d)
	}
}

func TestWaitEndsWithItsTime(t *testing.T) {
	t.Parallel()
	f := apitest.Start(t, apitest.Options{})
	f.Submit(apitest.Command("w-1"))
	resp, err := tasks(t, f).WaitTask(t.Context(), connect.NewRequest(&millracev1.WaitTaskRequest{Id: "w-1", Timeout: durationpb.New(0)}))
	if err != nil || resp.Msg.GetDone() || resp.Msg.GetTask().GetState() != millracev1.State_STATE_QUEUED {
		t.Errorf("%v, %v", resp, err)
	}
}

func TestWaitForLogs(t *testing.T) {
	t.Parallel()
	f := apitest.Start(t, apitest.Options{})
	c := tasks(t, f)
	f.Submit(apitest.Command("printed"), apitest.Command("silent"), apitest.Command("unrun"))
	f.Claim(lane, 2)
	f.Finish("printed", nil)
	f.Finish("silent", &millracev1.AttemptEnd{NoOutput: true})
	if _, err := f.Cancel(t.Context(), "unrun"); err != nil {
		t.Fatal(err)
	}
	// Neither of these has a log that could be waited for.
	for _, id := range []string{"silent", "unrun"} {
		if w := <-wait(t.Context(), c, id, true); w.err != nil || !w.resp.GetDone() {
			t.Errorf("%s: %+v", id, w)
		}
	}
	resp, err := c.WaitTask(t.Context(), connect.NewRequest(&millracev1.WaitTaskRequest{Id: "printed", Timeout: durationpb.New(50 * time.Millisecond), Logs: true}))
	if err != nil || resp.Msg.GetDone() || resp.Msg.GetTask().GetState() != millracev1.State_STATE_SUCCEEDED {
		t.Errorf("before the log is complete: %v, %v", resp, err)
	}
	got := wait(t.Context(), c, "printed", true)
	f.SetLog("printed", 1, &millracev1.LogView{Complete: true, Bytes: 7})
	if w := <-got; w.err != nil || !w.resp.GetDone() || w.resp.GetTask().GetLog().GetBytes() != 7 {
		t.Errorf("after: %+v", w)
	}
}

func TestWaitForLogsHasAnEnd(t *testing.T) {
	t.Parallel()
	f := apitest.Start(t, apitest.Options{LogPatience: 200 * time.Millisecond})
	f.Submit(apitest.Command("w"))
	f.Claim(lane, 1)
	f.Finish("w", nil)
	if w := <-wait(t.Context(), tasks(t, f), "w", true); w.err != nil || !w.resp.GetDone() {
		t.Errorf("%+v", w)
	}
}

func TestCancel(t *testing.T) {
	t.Parallel()
	f := apitest.Start(t, apitest.Options{})
	c := tasks(t, f)
	f.Submit(apitest.Command("runs"), apitest.Command("waits"))
	f.Claim(lane, 1)
	for _, want := range []struct {
		id       string
		state    millracev1.State
		accepted bool
	}{
		{"runs", millracev1.State_STATE_RUNNING, true},
		{"runs", millracev1.State_STATE_RUNNING, true}, // again: it is on its way already
		{"waits", millracev1.State_STATE_CANCELLED, true},
		{"waits", millracev1.State_STATE_CANCELLED, false},
	} {
		resp, err := c.CancelTask(t.Context(), connect.NewRequest(&millracev1.CancelTaskRequest{Id: want.id}))
		if err != nil || resp.Msg.GetState() != want.state || resp.Msg.GetAccepted() != want.accepted {
			t.Errorf("%+v: %v, %v", want, resp, err)
		}
	}
}

func TestFleet(t *testing.T) {
	t.Parallel()
	f := apitest.Start(t, apitest.Options{})
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	c := millracev1connect.NewFleetServiceClient(&http.Client{Transport: transport}, f.URL)
	low := apitest.Command("low")
	low.Priority = "low"
	bulk := apitest.Command("bulk")
	bulk.Queue = "bulk"
	f.Submit(apitest.Command("a"), apitest.Command("b"), apitest.Command("c"), low, bulk)
	f.Claim(lane, 2)
	if _, err := f.Store.Declare(t.Context(), task.WorkerID("nobody"), true); err != nil {
		t.Fatal(err)
	}
	ws, err := c.ListWorkers(t.Context(), connect.NewRequest(&millracev1.ListWorkersRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	if w := ws.Msg.GetWorkers()[0]; w.GetId() != string(apitest.Worker) || w.GetRunning() != 2 || w.GetState() != "ready" || w.GetSlots() != 100 {
		t.Errorf("worker: %v", w)
	}
	qs, err := c.ListQueues(t.Context(), connect.NewRequest(&millracev1.ListQueuesRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	q := qs.Msg.GetQueues()
	if len(q) != 2 || q[0].GetName() != "bulk" || q[0].GetQueued()["normal"] != 1 || q[1].GetQueued()["low"] != 1 ||
		q[1].GetQueued()["normal"] != 1 || q[1].GetRunning() != 2 || q[1].GetWorkers() != 1 {
		t.Errorf("queues: %v", q)
	}
}
