package protojs_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/millrace/millrace/internal/protojs"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
	"github.com/millrace/millrace/proto/millrace/v1/millracev1connect"
)

// echo shows the task that it was given.
type echo struct {
	millracev1connect.UnimplementedTaskServiceHandler
}

func (echo) GetTask(_ context.Context, r *connect.Request[millracev1.GetTaskRequest]) (*connect.Response[millracev1.GetTaskResponse], error) {
	return connect.NewResponse(&millracev1.GetTaskResponse{Task: &millracev1.TaskView{
		Id: r.Msg.GetId(), State: millracev1.State_STATE_QUEUED,
	}}), nil
}

// TestConnect holds that a Connect server takes this codec for both content types in place of its own.
func TestConnect(t *testing.T) {
	t.Parallel()
	_, handler := millracev1connect.NewTaskServiceHandler(echo{},
		connect.WithCodec(protojs.Codec{}), connect.WithCodec(protojs.Codec{Label: protojs.CodecNameCharset}))
	for _, tc := range []struct {
		content, body string
		status        int
		want          string
	}{
		{"application/json", `{"id":"a"}`, http.StatusOK, `{"task":{"id":"a","state":"queued"}}`},
		{"application/json; charset=utf-8", `{"id":"a"}`, http.StatusOK, `{"task":{"id":"a","state":"queued"}}`},
		{"application/json", `{"ID":"a"}`, http.StatusBadRequest, `unknown field \"ID\": did you mean \"id\"?`},
		{"application/json", ``, http.StatusBadRequest, `empty: want a JSON object`},
	} {
		req := httptest.NewRequestWithContext(t.Context(), http.MethodPost, millracev1connect.TaskServiceGetTaskProcedure, strings.NewReader(tc.body))
		req.Header.Set("Content-Type", tc.content)
		rec := httptest.NewRecorder()
		handler.ServeHTTP(rec, req)
		if rec.Code != tc.status || !strings.Contains(rec.Body.String(), tc.want) {
			t.Errorf("%s %s: %d %s, want %d %s", tc.content, tc.body, rec.Code, rec.Body, tc.status, tc.want)
		}
	}
}
