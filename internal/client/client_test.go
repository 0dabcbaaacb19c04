package client_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/client"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
	"github.com/millrace/millrace/proto/millrace/v1/millracev1connect"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// server answers the nth call of each method as the test says, and can drop the connection instead.
type server struct {
	millracev1connect.UnimplementedTaskServiceHandler

	mu      sync.Mutex
	calls   []string
	submit  func(n int, t *millracev1.Task) (created bool, err error)
	wait    func(n int) (*millracev1.WaitTaskResponse, error)
	get     func() *millracev1.TaskView
	read    func(n int, req *millracev1.ReadLogsRequest, send func(*millracev1.ReadLogsResponse)) error
	counted map[string]int
}

// errDrop cuts the connection without an answer.
var errDrop = errors.New("drop")

func (s *server) count(method, detail string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counted[method]++
	s.calls = append(s.calls, strings.TrimSpace(method+" "+detail))
	return s.counted[method]
}

func dropped(err error) error {
	if errors.Is(err, errDrop) {
		panic(http.ErrAbortHandler)
	}
	return err
}

func (s *server) Submit(_ context.Context, req *connect.Request[millracev1.SubmitRequest]) (*connect.Response[millracev1.SubmitResponse], error) {
	created, err := s.submit(s.count("submit", req.Msg.GetTask().GetId()), req.Msg.GetTask())
	if err != nil {
		return nil, dropped(err)
	}
	return connect.NewResponse(&millracev1.SubmitResponse{Id: req.Msg.GetTask().GetId(), Created: created}), nil
}

func (s *server) WaitTask(context.Context, *connect.Request[millracev1.WaitTaskRequest]) (*connect.Response[millracev1.WaitTaskResponse], error) {
	resp, err := s.wait(s.count("wait", ""))
	if err != nil {
		return nil, dropped(err)
	}
	return connect.NewResponse(resp), nil
}

func (s *server) GetTask(context.Context, *connect.Request[millracev1.GetTaskRequest]) (*connect.Response[millracev1.GetTaskResponse], error) {
	s.count("get", "")
	return connect.NewResponse(&millracev1.GetTaskResponse{Task: s.get()}), nil
}

func (s *server) ReadLogs(_ context.Context, req *connect.Request[millracev1.ReadLogsRequest], out *connect.ServerStream[millracev1.ReadLogsResponse]) error {
	n := s.count("read", fmt.Sprintf("%d@%d", req.Msg.GetAttempt(), req.Msg.GetOffset()))
	return dropped(s.read(n, req.Msg, func(p *millracev1.ReadLogsResponse) { _ = out.Send(p) }))
}

type notes struct {
	mu    sync.Mutex
	lines []string
}

func (n *notes) add(line string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lines = append(n.lines, line)
}

func start(t *testing.T, s *server) (*client.Client, *notes) {
	t.Helper()
	s.counted = map[string]int{}
	mux := http.NewServeMux()
	mux.Handle(millracev1connect.NewTaskServiceHandler(s))
	srv := httptest.NewServer(mux)
	n := &notes{}
	c, err := client.New(client.Config{Server: srv.URL, Patience: 10 * time.Second, Notify: n.add})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); srv.Close() })
	return c, n
}

func TestSubmitAgainAfterALostAnswer(t *testing.T) {
	t.Parallel()
	s := &server{submit: func(n int, _ *millracev1.Task) (bool, error) {
		if n == 1 {
			return false, errDrop
		}
		return false, nil // the first one came through
	}}
	c, _ := start(t, s)
	id, created, err := c.Submit(t.Context(), &millracev1.Task{})
	if err != nil || id == "" || !created {
		t.Fatalf("%q, %v, %v", id, created, err)
	}
	if diff := cmp.Diff([]string{"submit " + id, "submit " + id}, s.calls); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}

func TestSubmitIsNotRepeatedWhenRefused(t *testing.T) {
	t.Parallel()
	s := &server{submit: func(int, *millracev1.Task) (bool, error) {
		return false, connect.NewError(connect.CodeAlreadyExists, errors.New("use another id"))
	}}
	c, _ := start(t, s)
	if _, _, err := c.Submit(t.Context(), &millracev1.Task{Id: "x"}); err == nil || err.Error() != "use another id" || len(s.calls) != 1 {
		t.Errorf("%v after %v", err, s.calls)
	}
}

func TestWaitGoesOnAfterAnOutage(t *testing.T) {
	t.Parallel()
	s := &server{wait: func(n int) (*millracev1.WaitTaskResponse, error) {
		switch n {
		case 1:
			return &millracev1.WaitTaskResponse{}, nil
		case 2, 3:
			return nil, errDrop
		case 4:
			return nil, connect.NewError(connect.CodeUnavailable, errors.New("stopping"))
		default:
			return &millracev1.WaitTaskResponse{Done: true, Task: &millracev1.TaskView{Id: "w"}}, nil
		}
	}}
	c, n := start(t, s)
	v, err := c.Wait(t.Context(), "w", true)
	if err != nil || v.GetId() != "w" {
		t.Fatalf("%v, %v", v, err)
	}
	if len(n.lines) != 2 || !strings.Contains(n.lines[0], "lost contact") || !strings.Contains(n.lines[1], "in contact again") {
		t.Errorf("notes: %q", n.lines)
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	t.Parallel()
	begun := make(chan struct{})
	s := &server{wait: func(int) (*millracev1.WaitTaskResponse, error) {
		close(begun)
		time.Sleep(200 * time.Millisecond) // a server that is slow
		return &millracev1.WaitTaskResponse{}, nil
	}}
	c, _ := start(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-begun; cancel() }()
	if _, err := c.Wait(ctx, "w", false); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func piece(attempt uint32, offset uint64, text string) *millracev1.ReadLogsResponse {
	return &millracev1.ReadLogsResponse{Attempt: attempt, Offset: offset, Data: []byte(text)}
}

func follow(t *testing.T, c *client.Client, req *millracev1.ReadLogsRequest) (string, error) {
	t.Helper()
	var b strings.Builder
	err := c.Follow(t.Context(), req, func(p *millracev1.ReadLogsResponse) error {
		b.Write(p.GetData())
		return nil
	})
	return b.String(), err
}

// A break neither loses nor repeats a byte, and attempts after the one that was cut are shown too.
func TestFollowResumes(t *testing.T) {
	t.Parallel()
	tail := uint64(3)
	s := &server{
		get: func() *millracev1.TaskView {
			return &millracev1.TaskView{State: millracev1.State_STATE_SUCCEEDED, Attempt: 3}
		},
		read: func(n int, req *millracev1.ReadLogsRequest, send func(*millracev1.ReadLogsResponse)) error {
			switch n {
			case 1:
				if req.TailLines == nil {
					return connect.NewError(connect.CodeInvalidArgument, errors.New("tail is missing"))
				}
				send(piece(1, 100, "one "))
				return errDrop
			case 2:
				if req.TailLines != nil {
					return connect.NewError(connect.CodeInvalidArgument, errors.New("tail is there again"))
				}
				send(piece(1, 104, "two "))
				send(&millracev1.ReadLogsResponse{Attempt: 1, Offset: 108, End: true})
				return nil
			case 3:
				return errDrop // before attempt 2 said anything
			case 4:
				send(piece(2, 0, "three "))
				return nil
			default:
				send(piece(3, 0, "four"))
				return nil
			}
		},
	}
	c, _ := start(t, s)
	text, err := follow(t, c, &millracev1.ReadLogsRequest{Id: "x", TailLines: &tail})
	if err != nil || text != "one two three four" {
		t.Errorf("%q, %v", text, err)
	}
	want := []string{"read 0@0", "read 1@104", "get", "read 2@0", "read 2@0", "get", "read 3@0", "get"}
	if diff := cmp.Diff(want, s.calls); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}

func TestFollowEndsWithItsPiece(t *testing.T) {
	t.Parallel()
	s := &server{read: func(_ int, _ *millracev1.ReadLogsRequest, send func(*millracev1.ReadLogsResponse)) error {
		send(piece(1, 0, "x"))
		return nil
	}}
	c, _ := start(t, s)
	full := errors.New("disk full")
	if err := c.Follow(t.Context(), &millracev1.ReadLogsRequest{Id: "x"}, func(*millracev1.ReadLogsResponse) error { return full }); !errors.Is(err, full) {
		t.Errorf("%v", err)
	}
}

func TestLogTroubleIsNotRepeated(t *testing.T) {
	t.Parallel()
	s := &server{read: func(int, *millracev1.ReadLogsRequest, func(*millracev1.ReadLogsResponse)) error {
		return connect.NewError(connect.CodeDataLoss, errors.New("the log was deleted"))
	}}
	c, _ := start(t, s)
	if _, err := follow(t, c, &millracev1.ReadLogsRequest{Id: "x"}); !client.IsLogTrouble(err) || len(s.calls) != 1 {
		t.Errorf("%v after %v", err, s.calls)
	}
}

func TestPatienceIsBounded(t *testing.T) {
	t.Parallel()
	s := &server{counted: map[string]int{}, wait: func(n int) (*millracev1.WaitTaskResponse, error) {
		if n == 1 {
			return &millracev1.WaitTaskResponse{}, nil
		}
		return nil, errDrop
	}}
	mux := http.NewServeMux()
	mux.Handle(millracev1connect.NewTaskServiceHandler(s))
	srv := httptest.NewServer(mux)
	c, err := client.New(client.Config{Server: srv.URL, Patience: 300 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); srv.Close() })
	if _, err := c.Wait(t.Context(), "w", false); err == nil || !strings.Contains(err.Error(), "tried for 300ms") {
		t.Errorf("%v", err)
	}
}

func TestWordsForWhatIsWrong(t *testing.T) {
	t.Parallel()
	page := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(page.Close)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := ln.Addr().String()
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ server, word string }{
		"nobody there": {"http://" + nobody, "millrace dev"},
		"web server":   {page.URL, "does not answer like a dispatcher"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cl, err := client.New(client.Config{Server: c.server})
			if err != nil {
				t.Fatal(err)
			}
			defer cl.Close()
			if _, err := cl.Wait(t.Context(), "x", false); err == nil || !strings.Contains(err.Error(), c.word) || !strings.Contains(err.Error(), "MILLRACE_SERVER") {
				t.Errorf("%v", err)
			}
		})
	}
	for _, bad := range []string{"localhost:8080", "ftp://x", "http://", "::"} {
		if _, err := client.New(client.Config{Server: bad}); err == nil || !strings.Contains(err.Error(), "MILLRACE_SERVER") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
