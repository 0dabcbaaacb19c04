package api_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/millrace/millrace/internal/apitest"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// listed seeds tasks in every part of a listing and returns their ids in the order in which they have to come.
func listed(t *testing.T, f *apitest.Fleet) (running, queued, delayed, done []string) {
	t.Helper()
	for i := range 7 {
		id := fmt.Sprintf("done-%d", i)
		f.Submit(apitest.Command(id))
		f.Claim(lane, 1)
		f.Finish(f.Claimed(id), nil)
		done = append(done, id)
	}
	for i := range 5 {
		id := fmt.Sprintf("run-%d", i)
		f.Submit(apitest.Command(id))
		f.Claim(lane, 1)
		running = append(running, id)
	}
	for i := range 9 {
		c := apitest.Command(fmt.Sprintf("wait-%d", i))
		c.Priority = []string{"high", "normal", "low"}[i%3]
		f.Submit(c)
		queued = append(queued, c.GetId())
	}
	for i := range 4 {
		c := apitest.Command(fmt.Sprintf("later-%d", i))
		c.NotBefore = timestamppb.New(time.Now().Add(time.Duration(i+1) * time.Hour))
		f.Submit(c)
		delayed = append(delayed, c.GetId())
	}
	for _, l := range [][]string{running, delayed, done} {
		slices.Reverse(l)
	}
	byEntry(t, f, queued)
	return running, queued, delayed, done
}

// byEntry sorts ids of queued tasks, the newest first. Entries of the same millisecond in different streams have the same
// id; those are ordered by stream.
func byEntry(t *testing.T, f *apitest.Fleet, ids []string) {
	t.Helper()
	at := map[string]string{}
	for _, id := range ids {
		r, err := f.Store.Record(t.Context(), task.ID(id))
		if err != nil {
			t.Fatal(err)
		}
		at[id] = r.Entry + " " + r.Lane
	}
	slices.SortFunc(ids, func(a, b string) int { return strings.Compare(at[b], at[a]) })
}

func pages(t *testing.T, f *apitest.Fleet, req *millracev1.ListTasksRequest) []string {
	t.Helper()
	c := tasks(t, f)
	var ids []string
	for range 1000 {
		resp, err := c.ListTasks(t.Context(), connect.NewRequest(req))
		if err != nil {
			t.Fatal(err)
		}
		if n := len(resp.Msg.GetTasks()); req.GetLimit() > 0 && n > int(req.GetLimit()) {
			t.Fatalf("page of %d, limit %d", n, req.GetLimit())
		}
		for _, v := range resp.Msg.GetTasks() {
			ids = append(ids, v.GetId())
		}
		if req.PageToken = resp.Msg.GetNextPageToken(); req.PageToken == "" {
			return ids
		}
	}
	t.Fatal("the listing does not end")
	return nil
}

func TestListInPagesOfAnySize(t *testing.T) {
	t.Parallel()
	f := apitest.Start(t, apitest.Options{})
	running, queued, delayed, done := listed(t, f)
	all := slices.Concat(running, queued, delayed, done)
	for _, limit := range []uint32{0, 1, 2, 3, 7, 1000} {
		if diff := cmp.Diff(all, pages(t, f, &millracev1.ListTasksRequest{Limit: limit})); diff != "" {
			t.Errorf("limit %d (-want +got):\n%s", limit, diff)
		}
	}
	for name, c := range map[string]struct {
		req  *millracev1.ListTasksRequest
		want []string
	}{
		"running":        {&millracev1.ListTasksRequest{States: []millracev1.State{millracev1.State_STATE_RUNNING}}, running},
		"queued":         {&millracev1.ListTasksRequest{States: []millracev1.State{millracev1.State_STATE_QUEUED}}, queued},
		"ended or later": {&millracev1.ListTasksRequest{States: []millracev1.State{millracev1.State_STATE_SUCCEEDED, millracev1.State_STATE_DELAYED}}, slices.Concat(delayed, done)},
		"failed":         {&millracev1.ListTasksRequest{States: []millracev1.State{millracev1.State_STATE_FAILED}}, nil},
		"queue":          {&millracev1.ListTasksRequest{Queue: "default"}, all},
		"other queue":    {&millracev1.ListTasksRequest{Queue: "bulk"}, nil},
	} {
		for _, limit := range []uint32{0, 2} {
			c.req.Limit, c.req.PageToken = limit, ""
			if diff := cmp.Diff(c.want, pages(t, f, c.req)); diff != "" {
				t.Errorf("%s, limit %d (-want +got):\n%s", name, limit, diff)
			}
		}
	}
}

// What ends between two pages is not shown twice, and hides nothing.
func TestListWhileTasksEnd(t *testing.T) {
	t.Parallel()
	f := apitest.Start(t, apitest.Options{})
	running, _, _, done := listed(t, f)
	c := tasks(t, f)
	req := &millracev1.ListTasksRequest{Limit: 2, States: []millracev1.State{millracev1.State_STATE_SUCCEEDED}}
	var got []string
	for i := 0; ; i++ {
		resp, err := c.ListTasks(t.Context(), connect.NewRequest(req))
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range resp.Msg.GetTasks() {
			got = append(got, v.GetId())
		}
		if req.PageToken = resp.Msg.GetNextPageToken(); req.PageToken == "" {
			break
		}
		if i < len(running) {
			f.Finish(f.Claimed(running[i]), nil)
		}
	}
	if diff := cmp.Diff(done, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
