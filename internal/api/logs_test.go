package api_test

import (
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/millrace/millrace/internal/apitest"
	"github.com/millrace/millrace/internal/storetest"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// read collects a whole stream: the text, and the attempts that were closed.
func read(t *testing.T, f *apitest.Fleet, req *millracev1.ReadLogsRequest) (text string, ended []uint32, err error) {
	t.Helper()
	s, err := tasks(t, f).ReadLogs(t.Context(), connect.NewRequest(req))
	if err != nil {
		return "", nil, err
	}
	defer func() { _ = s.Close() }()
	var b strings.Builder
	for s.Receive() {
		b.Write(s.Msg().GetData())
		if s.Msg().GetEnd() {
			ended = append(ended, s.Msg().GetAttempt())
		}
	}
	return b.String(), ended, s.Err()
}

// follower is a stream that is read in the background.
type follower struct {
	done chan struct{}

	mu    sync.Mutex
	text  strings.Builder
	ended []uint32
	err   error
}

func follow(t *testing.T, f *apitest.Fleet, req *millracev1.ReadLogsRequest) *follower {
	t.Helper()
	req.Follow = true
	w := &follower{done: make(chan struct{})}
	c := tasks(t, f)
	go func() { // ends with the stream
		defer close(w.done)
		s, err := c.ReadLogs(t.Context(), connect.NewRequest(req))
		if err != nil {
			w.err = err
			return
		}
		defer func() { _ = s.Close() }()
		for s.Receive() {
			w.mu.Lock()
			w.text.Write(s.Msg().GetData())
			if s.Msg().GetEnd() {
				w.ended = append(w.ended, s.Msg().GetAttempt())
			}
			w.mu.Unlock()
		}
		w.err = s.Err()
	}()
	return w
}

// sees waits until the follower has received a text.
func (w *follower) sees(t *testing.T, text string) {
	t.Helper()
	storetest.Until(t, "follower sees "+text, func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return strings.Contains(w.text.String(), text)
	})
}

// must waits for the end of the stream and compares.
func (w *follower) must(t *testing.T, text string, ended ...uint32) {
	t.Helper()
	<-w.done
	if w.err != nil || w.text.String() != text || !slices.Equal(w.ended, ended) {
		t.Errorf("got %q, ended %v, %v; want %q, %v", w.text.String(), w.ended, w.err, text, ended)
	}
}

func TestR17FollowFromTheQueueOn(t *testing.T) {
	t.Parallel()
	f := apitest.Start(t, apitest.Options{})
	f.Submit(apitest.Command("q"))
	if text, ended, err := read(t, f, &millracev1.ReadLogsRequest{Id: "q"}); text != "" || ended != nil || err != nil {
		t.Errorf("without follow: %q, %v, %v", text, ended, err)
	}
	got := follow(t, f, &millracev1.ReadLogsRequest{Id: "q"})
	f.Claim(lane, 1)
	f.Logs.Write("q", 1, "first\n")
	got.sees(t, "first")
	f.Retry("q", &millracev1.AttemptEnd{Reason: millracev1.Reason_REASON_EXIT, ExitCode: 4}, 0)
	f.Logs.End("q", 1)
	f.Promote("q")
	f.Claim(lane, 1)
	f.Logs.Write("q", 2, "second\n")
	f.Finish("q", nil)
	f.Logs.Write("q", 2, "late\n")
	f.Logs.End("q", 2)
	got.must(t, "first\nsecond\nlate\n", 1, 2)
}

func TestFollowEndsWhenTheTaskNeverRuns(t *testing.T) {
	t.Parallel()
	f := apitest.Start(t, apitest.Options{})
	f.Submit(apitest.Command("q"))
	got := follow(t, f, &millracev1.ReadLogsRequest{Id: "q"})
	if _, err := f.Cancel(t.Context(), "q"); err != nil {
		t.Fatal(err)
	}
	got.must(t, "")
}

func TestFollowDoesNotWaitForEverForTheEnd(t *testing.T) {
	t.Parallel()
	f := apitest.Start(t, apitest.Options{LogPatience: 300 * time.Millisecond})
	f.Submit(apitest.Command("q"))
	f.Claim(lane, 1)
	f.Logs.Write("q", 1, "text")
	got := follow(t, f, &millracev1.ReadLogsRequest{Id: "q"})
	f.Finish("q", nil)
	got.must(t, "text", 1)
}

func TestReadOneAttempt(t *testing.T) {
	t.Parallel()
	f := apitest.Start(t, apitest.Options{})
	f.Submit(apitest.Command("q"))
	f.Claim(lane, 1)
	f.Logs.Write("q", 1, "one\ntwo\nthree\n")
	f.Logs.End("q", 1)
	f.Retry("q", &millracev1.AttemptEnd{Reason: millracev1.Reason_REASON_EXIT, ExitCode: 1}, time.Hour)
	tail := uint64(2)
	for name, c := range map[string]struct {
		req  *millracev1.ReadLogsRequest
		want string
		code connect.Code
	}{
		"newest":            {&millracev1.ReadLogsRequest{Id: "q"}, "one\ntwo\nthree\n", 0},
		"by number":         {&millracev1.ReadLogsRequest{Id: "q", Attempt: 1}, "one\ntwo\nthree\n", 0},
		"from an offset":    {&millracev1.ReadLogsRequest{Id: "q", Offset: 4}, "two\nthree\n", 0},
		"tail":              {&millracev1.ReadLogsRequest{Id: "q", TailLines: &tail}, "two\nthree\n", 0},
		"follow, over":      {&millracev1.ReadLogsRequest{Id: "q", Attempt: 1, Follow: true}, "one\ntwo\nthree\n", 0},
		"not made yet":      {&millracev1.ReadLogsRequest{Id: "q", Attempt: 2}, "", connect.CodeNotFound},
		"no such stream":    {&millracev1.ReadLogsRequest{Id: "q", Stream: 3}, "", connect.CodeInvalidArgument},
		"no such task":      {&millracev1.ReadLogsRequest{Id: "x", Follow: true}, "", connect.CodeNotFound},
		"offset at the end": {&millracev1.ReadLogsRequest{Id: "q", Offset: 14}, "", 0},
	} {
		text, _, err := read(t, f, c.req)
		if text != c.want || (err != nil) != (c.code != 0) || err != nil && connect.CodeOf(err) != c.code {
			t.Errorf("%s: %q, %v; want %q, %v", name, text, err, c.want, c.code)
		}
	}
}

func TestBigPiecesAreSplit(t *testing.T) {
	t.Parallel()
	f := apitest.Start(t, apitest.Options{})
	f.Submit(apitest.Command("q"))
	f.Claim(lane, 1)
	want := strings.Repeat("0123456789abcde\n", 100_000)
	f.Logs.Write("q", 1, want)
	f.Logs.End("q", 1)
	if text, _, err := read(t, f, &millracev1.ReadLogsRequest{Id: "q"}); err != nil || text != want {
		t.Errorf("%d bytes, %v", len(text), err)
	}
}

func TestUnreadableLogIsToldAsSuch(t *testing.T) {
	t.Parallel()
	f := apitest.Start(t, apitest.Options{})
	f.Submit(apitest.Command("q"))
	f.Claim(lane, 1)
	f.Logs.Fail(apitest.ErrUnknown)
	if _, _, err := read(t, f, &millracev1.ReadLogsRequest{Id: "q"}); connect.CodeOf(err) != connect.CodeDataLoss {
		t.Errorf("%v", err)
	}
}
