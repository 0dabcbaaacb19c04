package api

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/redistest"
	"github.com/millrace/millrace/internal/spec"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/storetest"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// bench is an API over a real store, with the moves of a dispatcher and without its rules.
type bench struct {
	t    *testing.T
	st   *store.Store
	url  string
	logs map[uint32]string // what "logsinks" have of every task, by attempt
}

func setup(t *testing.T, token string) *bench {
	t.Helper()
	b := &bench{t: t, st: storetest.Open(t), logs: map[uint32]string{}}
	a, err := New(Config{Token: config.Secret(token), LogPatience: 200 * time.Millisecond}, Deps{Store: b.st, Admit: b, Cancel: b, Logs: b})
	if err != nil {
		t.Fatal(err)
	}
	storetest.Run(t, a.Run)
	srv := httptest.NewServer(a.Handler())
	t.Cleanup(srv.Close)
	b.url = srv.URL
	return b
}

// Admit implements Admitter.
func (b *bench) Admit(ctx context.Context, t *millracev1.Task) (string, bool, error) {
	if err := spec.Validate(t, spec.Limits{}); err != nil {
		return "", false, Refuse(spec.Code(err), err)
	}
	if t.GetId() == "taken" {
		return "", false, Refuse(CodeIDTaken, fmt.Errorf("another task has the id %q", t.GetId()))
	}
	if t.GetId() == "" {
		t.Id = spec.NewID(time.Now())
	}
	raw, err := proto.Marshal(t)
	if err != nil {
		return "", false, err
	}
	out, err := b.st.Do(ctx, []*store.Change{{
		Move: task.Admit, ID: task.ID(t.GetId()), In: task.Input{To: task.Queued}, Spec: t, SpecBytes: raw,
		Guess: store.Snapshot{Record: task.Record{State: task.None}}, Created: time.Now(),
	}})
	if err != nil {
		return "", false, err
	}
	return t.GetId(), out[0].Done, nil
}

// Cancel implements Canceller.
func (b *bench) Cancel(ctx context.Context, id task.ID) (store.Outcome, error) {
	r, err := b.st.Record(ctx, id)
	if err != nil {
		return store.Outcome{}, err
	}
	out, err := b.st.Do(ctx, []*store.Change{{Move: task.Cancel, ID: id, Guess: r.Snapshot, In: task.Input{Attempt: r.Attempt}, Retention: time.Hour}})
	if err != nil {
		return store.Outcome{}, err
	}
	return out[0], nil
}

// ReadLog implements LogReader.
func (b *bench) ReadLog(_ context.Context, q LogQuery, piece func(LogPiece) error) (LogStatus, error) {
	text, ok := b.logs[q.Attempt]
	if !ok {
		return LogStatus{}, nil
	}
	if q.Offset < uint64(len(text)) {
		if err := piece(LogPiece{Offset: q.Offset, Data: []byte(text[q.Offset:])}); err != nil {
			return LogStatus{}, err
		}
	}
	return LogStatus{Ended: true, View: &millracev1.LogView{Complete: true, Bytes: uint64(len(text))}}, nil
}

func (b *bench) post(method, body string, header ...string) (int, map[string]any, string) {
	b.t.Helper()
	req, err := http.NewRequestWithContext(b.t.Context(), http.MethodPost, b.url+"/millrace.v1."+method, strings.NewReader(body))
	if err != nil {
		b.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		b.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	m := map[string]any{}
	_ = json.Unmarshal(raw, &m)
	return resp.StatusCode, m, string(raw)
}

func (b *bench) submit(id string) {
	b.t.Helper()
	code, _, raw := b.post("TaskService/Submit", fmt.Sprintf(`{"task":{"id":%q,"name":"n","command":{"argv":["true"]}}}`, id))
	if code != http.StatusOK {
		b.t.Fatalf("submit: %d %s", code, raw)
	}
}

// finish runs a task to its end, without an agent.
func (b *bench) finish(id string, reason millracev1.Reason, code int32) {
	b.t.Helper()
	ctx := b.t.Context()
	if err := b.st.Register(ctx, store.WorkerMeta{ID: "w", Slots: 2, Queues: []string{"default"}, Host: "h"}, time.Hour); err != nil {
		b.t.Fatal(err)
	}
	got, err := b.st.Claim(ctx, store.ClaimFor{Worker: "w", Lanes: []string{"default:normal"}, Want: 1, Lease: time.Minute})
	if err != nil || len(got) != 1 || string(got[0].ID) != id {
		b.t.Fatalf("claim: %v %v", got, err)
	}
	to := task.Succeeded
	if reason != 0 {
		to = task.Failed
	}
	out, err := b.st.Do(ctx, []*store.Change{{
		Move: task.Finish, ID: got[0].ID, Guess: got[0].At, In: task.Input{Attempt: 1, Worker: "w", To: to}, Retention: time.Hour,
		End: &millracev1.AttemptEnd{Attempt: 1, Worker: "w", Reason: reason, ExitCode: code, Message: "so it ended", NoOutput: true},
	}})
	if err != nil || !out[0].Done {
		b.t.Fatalf("finish: %+v %v", out, err)
	}
}

func TestSubmitShowListCancel(t *testing.T) {
	t.Parallel()
	b := setup(t, "")
	b.submit("alpha-1")
	b.submit("alpha-2")
	if code, m, raw := b.post("TaskService/GetTask", `{"id":"alpha-1"}`); code != 200 || m["task"].(map[string]any)["state"] != "queued" {
		t.Errorf("%d %s", code, raw)
	}
	if code, _, raw := b.post("TaskService/GetTask", `{"id":"alpha"}`); code == 200 || !strings.Contains(raw, "alpha-1") {
		t.Errorf("an ambiguous prefix: %d %s", code, raw)
	}
	if code, _, raw := b.post("TaskService/GetTask", `{"id":"nobody"}`); code != 404 {
		t.Errorf("unknown: %d %s", code, raw)
	}
	if code, m, raw := b.post("TaskService/CancelTask", `{"id":"alpha-2"}`); code != 200 || m["state"] != "cancelled" || m["accepted"] != true {
		t.Errorf("cancel: %d %s", code, raw)
	}
	code, m, raw := b.post("TaskService/ListTasks", `{}`)
	if tasks, _ := m["tasks"].([]any); code != 200 || len(tasks) != 2 {
		t.Errorf("list: %d %s", code, raw)
	}
	if code, m, raw := b.post("TaskService/ListTasks", `{"states":["cancelled"]}`); code != 200 || len(m["tasks"].([]any)) != 1 {
		t.Errorf("list cancelled: %d %s", code, raw)
	}
	if code, _, raw := b.post("TaskService/ListTasks", `{"states":["gone"]}`); code != 400 || !strings.Contains(raw, "queued") {
		t.Errorf("a state that is none: %d %s", code, raw)
	}
}

func TestErrorsAreForPeople(t *testing.T) {
	t.Parallel()
	b := setup(t, "")
	for name, c := range map[string]struct {
		body, word string
		code       int
	}{
		"unknown field": {`{"task":{"comand":{}}}`, "comand", 400},
		"wrong type":    {`{"task":{"command":{"argv":"x"}}}`, "list of strings", 400},
		"no work":       {`{"task":{}}`, "command", 400},
		"id taken":      {`{"task":{"id":"taken","command":{"argv":["x"]}}}`, "another task", 409},
		"too large":     {`{"task":{"command":{"argv":["` + strings.Repeat("x", 2<<20) + `"]}}}`, "", 429},
	} {
		code, _, raw := b.post("TaskService/Submit", c.body)
		if code != c.code || !strings.Contains(raw, c.word) {
			t.Errorf("%s: %d %.300s", name, code, raw)
		}
	}
}

func TestToken(t *testing.T) {
	t.Parallel()
	b := setup(t, "secret")
	for header, want := range map[string]int{"": 401, "Bearer wrong": 401, "Bearer secret": 200} {
		if code, _, raw := b.post("FleetService/ListWorkers", `{}`, "Authorization", header); code != want {
			t.Errorf("%q: %d %s", header, code, raw)
		}
	}
}

// Without a token only a local name is answered: a page in a browser must not reach us under a name of its own.
func TestForeignHostIsRefused(t *testing.T) {
	t.Parallel()
	b := setup(t, "")
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, b.url+"/millrace.v1.FleetService/ListWorkers", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	req.Host = "evil.example"
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode == http.StatusOK {
		t.Error("answered")
	}
}

func TestWaitIsWokenByTheResult(t *testing.T) {
	t.Parallel()
	b := setup(t, "")
	b.submit("w1")
	if code, m, raw := b.post("TaskService/WaitTask", `{"id":"w1","timeout":"50ms"}`); code != 200 || m["done"] == true {
		t.Errorf("before the end: %d %s", code, raw)
	}
	got := make(chan string, 1)
	go func() { // ends with the answer
		_, _, raw := b.post("TaskService/WaitTask", `{"id":"w1","timeout":"60s","logs":true}`)
		got <- raw
	}()
	b.finish("w1", millracev1.Reason_REASON_EXIT, 3)
	select {
	case raw := <-got:
		for _, w := range []string{`"done":true`, `"state":"failed"`, `"reason":"exit"`, `"exitCode":3`} {
			if !strings.Contains(raw, w) {
				t.Errorf("no %s in %s", w, raw)
			}
		}
	case <-time.After(30 * time.Second):
		t.Fatal("not woken")
	}
}

func TestWorkersAndQueues(t *testing.T) {
	t.Parallel()
	b := setup(t, "")
	b.submit("q1")
	b.submit("q2")
	b.finish("q1", 0, 0)
	code, m, raw := b.post("FleetService/ListWorkers", `{}`)
	w := m["workers"].([]any)[0].(map[string]any)
	if code != 200 || w["id"] != "w" || w["state"] != "ready" || w["host"] != "h" {
		t.Errorf("%d %s", code, raw)
	}
	if code, _, raw = b.post("FleetService/ListQueues", `{}`); code != 200 || !strings.Contains(raw, `"normal":1`) {
		t.Errorf("%d %s", code, raw)
	}
	if _, err := b.st.Declare(t.Context(), "w", true); err != nil {
		t.Fatal(err)
	}
	if _, _, raw = b.post("FleetService/ListWorkers", `{}`); !strings.Contains(raw, `"state":"dead"`) {
		t.Errorf("%s", raw)
	}
}

func TestDeadLettersAreListed(t *testing.T) {
	t.Parallel()
	b := setup(t, "")
	if err := b.st.AddDead(t.Context(), &millracev1.DeadLetter{Source: "tasks", Code: "bad_task", Reason: "because"}); err != nil {
		t.Fatal(err)
	}
	if code, _, raw := b.post("TaskService/ListDead", `{}`); code != 200 || !strings.Contains(raw, "because") {
		t.Errorf("%d %s", code, raw)
	}
}
