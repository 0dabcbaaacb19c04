package api_test

import (
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/millrace/millrace/internal/api"
	"github.com/millrace/millrace/internal/apitest"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
	"github.com/millrace/millrace/proto/millrace/v1/millracev1connect"
)

// post sends a body as curl would and returns the status and the answer.
func post(t *testing.T, url, method, contentType, body string, header ...string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/millrace.v1."+method, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", contentType)
	for i := 0; i < len(header); i += 2 {
		if header[i] == "Host" {
			req.Host = header[i+1]
		}
		req.Header.Set(header[i], header[i+1])
	}
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func TestCurl(t *testing.T) {
	t.Parallel()
	f := apitest.Start(t, apitest.Options{})
	const jsonType = "application/json"
	cases := []struct {
		name, method, contentType, body string
		status                          int
		word                            string
	}{
		{"submit", "TaskService/Submit", jsonType, `{"task":{"id":"t1","timeout":"2m","command":{"argv":["echo","hi"]}}}`, 200, `{"id":"t1","created":true}`},
		{"charset", "TaskService/Submit", "application/json; charset=utf-8", `{"task":{"id":"t2","command":{"argv":["true"]}}}`, 200, `"created":true`},
		{"proto names", "TaskService/Submit", jsonType, `{"task":{"id":"t3","not_before":"2040-01-01T00:00:00Z","command":{"argv":["true"]}}}`, 200, `"created":true`},
		{"show", "TaskService/GetTask", jsonType, `{"id":"t1"}`, 200, `"state":"queued"`},
		{"duration as Go writes it", "TaskService/GetTask", jsonType, `{"id":"t1"}`, 200, `"timeout":"2m"`},
		{"unknown field", "TaskService/Submit", jsonType, `{"task":{"comand":{"argv":["true"]}}}`, 400, "comand"},
		{"wrong type", "TaskService/Submit", jsonType, `{"task":{"command":{"argv":"true"}}}`, 400, "argv"},
		{"broken", "TaskService/Submit", jsonType, `{"task":`, 400, "too early"},
		{"no task", "TaskService/Submit", jsonType, `{}`, 400, "task is missing"},
		{"no work", "TaskService/Submit", jsonType, `{"task":{}}`, 400, "command"},
		{"empty argv", "TaskService/Submit", jsonType, `{"task":{"command":{}}}`, 400, "argv"},
		{"too large a task", "TaskService/Submit", jsonType, `{"task":{"command":{"argv":["` + strings.Repeat("x", 300<<10) + `"]}}}`, 429, "262144"},
		{"too large a request", "TaskService/Submit", jsonType, `{"task":{"command":{"argv":["` + strings.Repeat("x", 3<<20) + `"]}}}`, 429, "resource_exhausted"},
		{"a form of a web page", "TaskService/Submit", "text/plain", `{"task":{"command":{"argv":["true"]}}}`, 415, ""},
		{"not found", "TaskService/GetTask", jsonType, `{"id":"nobody"}`, 404, "millrace ps"},
		{"empty id", "TaskService/GetTask", jsonType, `{}`, 400, "id is empty"},
		{"ambiguous", "TaskService/CancelTask", jsonType, `{"id":"t"}`, 400, "fits several"},
		{"bad page token", "TaskService/ListTasks", jsonType, `{"pageToken":"%%"}`, 400, "page token"},
		{"list", "TaskService/ListTasks", jsonType, `{"states":["delayed"]}`, 200, `"id":"t3"`},
		{"queues", "FleetService/ListQueues", jsonType, `{}`, 200, `"name":"default"`},
		{"workers", "FleetService/ListWorkers", jsonType, `{}`, 200, `"state":"ready"`},
		{"dead", "TaskService/ListDead", jsonType, `{}`, 200, `{}`},
		{"no such method", "TaskService/Destroy", jsonType, `{}`, 404, ""},
	}
	for _, c := range cases { // in order: later ones look at what earlier ones made
		status, body := post(t, f.URL, c.method, c.contentType, c.body)
		if status != c.status || !strings.Contains(body, c.word) {
			t.Errorf("%s: status %d, want %d; body %.300s wants %q", c.name, status, c.status, body, c.word)
		}
	}
}

func TestToken(t *testing.T) {
	t.Parallel()
	open := apitest.Start(t, apitest.Options{})
	closed := apitest.Start(t, apitest.Options{Token: "s3cret"})
	for name, c := range map[string]struct {
		url    string
		header []string
		status int
		word   string
	}{
		"no token needed":         {open.URL, nil, 200, ""},
		"localhost":               {open.URL, []string{"Host", "localhost:8080"}, 200, ""},
		"a web page's host":       {open.URL, []string{"Host", "evil.example"}, 403, "MILLRACE_TOKEN"},
		"none":                    {closed.URL, nil, 401, "MILLRACE_TOKEN"},
		"wrong":                   {closed.URL, []string{"Authorization", "Bearer s3cre"}, 401, "not the dispatcher's"},
		"wrong scheme":            {closed.URL, []string{"Authorization", "s3cret"}, 401, "needed"},
		"right":                   {closed.URL, []string{"Authorization", "Bearer s3cret"}, 200, ""},
		"right from another host": {closed.URL, []string{"Authorization", "Bearer s3cret", "Host", "mill.example"}, 200, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			status, body := post(t, c.url, "FleetService/ListQueues", "application/json", "{}", c.header...)
			if status != c.status || !strings.Contains(body, c.word) {
				t.Errorf("status %d, want %d; body %s wants %q", status, c.status, body, c.word)
			}
		})
	}
}

func TestGRPC(t *testing.T) {
	t.Parallel()
	f := apitest.Start(t, apitest.Options{})
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(transport.CloseIdleConnections)
	c := millracev1connect.NewTaskServiceClient(&http.Client{Transport: transport}, f.URL, connect.WithGRPC())
	resp, err := c.Submit(t.Context(), connect.NewRequest(&millracev1.SubmitRequest{Task: apitest.Command("g1")}))
	if err != nil || !resp.Msg.GetCreated() {
		t.Fatalf("submit: %v, %v", resp, err)
	}
	_, err = c.GetTask(t.Context(), connect.NewRequest(&millracev1.GetTaskRequest{Id: "g2"}))
	if connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("get: %v", err)
	}
}

func TestErrorsOfAdmit(t *testing.T) {
	t.Parallel()
	f := apitest.Start(t, apitest.Options{})
	for name, c := range map[string]struct {
		err    error
		status int
		word   string
	}{
		"taken":         {api.Refuse(api.CodeIDTaken, errors.New("use another id")), 409, "use another id"},
		"full":          {api.Refuse(api.CodeFull, errors.New("try later")), 429, "try later"},
		"bad":           {api.Refuse("bad_task", errors.New("no such queue")), 400, "no such queue"},
		"redis is away": {&net.OpError{Op: "dial", Err: errors.New("refused")}, 503, "cannot reach Redis"},
		"out of memory": {errors.New("admit: OOM command not allowed when used memory > 'maxmemory'"), 429, "memory limit"},
	} { // one after the other: they share the fake
		f.RefuseWith(func(*millracev1.Task) error { return c.err })
		status, body := post(t, f.URL, "TaskService/Submit", "application/json", `{"task":{"command":{"argv":["true"]}}}`)
		if status != c.status || !strings.Contains(body, c.word) {
			t.Errorf("%s: status %d, want %d; body %s wants %q", name, status, c.status, body, c.word)
		}
	}
}

func TestPanicIsOneCallsTrouble(t *testing.T) {
	t.Parallel()
	f := apitest.Start(t, apitest.Options{})
	f.RefuseWith(func(*millracev1.Task) error { panic("boom") })
	status, body := post(t, f.URL, "TaskService/Submit", "application/json", `{"task":{"command":{"argv":["true"]}}}`)
	if status != 500 || strings.Contains(body, "boom") {
		t.Errorf("status %d, body %s", status, body)
	}
	f.RefuseWith(nil)
	if status, body = post(t, f.URL, "TaskService/Submit", "application/json", `{"task":{"command":{"argv":["true"]}}}`); status != 200 {
		t.Errorf("after the panic: status %d, body %s", status, body)
	}
	if n := counter(t, f, "millrace_api_panics_total"); n != 1 {
		t.Errorf("%v panics are counted", n)
	}
}

// counter reads a metric without labels.
func counter(t *testing.T, f *apitest.Fleet, name string) float64 {
	t.Helper()
	families, err := f.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() == name {
			return family.GetMetric()[0].GetCounter().GetValue()
		}
	}
	t.Fatalf("there is no metric %s", name)
	return 0
}
