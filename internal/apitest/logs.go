package apitest

import (
	"bytes"
	"context"
	"sync"

	"github.com/millrace/millrace/internal/api"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// Logs is a log reader over texts in memory.
type Logs struct {
	mu    sync.Mutex
	texts map[string]*text
	fail  error
}

// text is the output of one attempt.
type text struct {
	data    []byte
	ended   bool
	changed chan struct{} // closed and replaced when data or ended change
}

func (l *Logs) text(id task.ID, attempt uint32) *text {
	t := l.texts[key(id, attempt)]
	if t == nil {
		t = &text{changed: make(chan struct{})}
		l.texts[key(id, attempt)] = t
	}
	return t
}

func (l *Logs) change(id task.ID, attempt uint32, how func(*text)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.text(id, attempt)
	how(t)
	close(t.changed)
	t.changed = make(chan struct{})
}

// Write adds to the output of an attempt.
func (l *Logs) Write(id task.ID, attempt uint32, data string) {
	l.change(id, attempt, func(t *text) { t.data = append(t.data, data...) })
}

// End completes the output of an attempt.
func (l *Logs) End(id task.ID, attempt uint32) {
	l.change(id, attempt, func(t *text) { t.ended = true })
}

// Fail makes every later reading fail.
func (l *Logs) Fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fail = err
}

func (l *Logs) look(q api.LogQuery) (data []byte, ended bool, changed <-chan struct{}, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.text(q.Task, q.Attempt)
	return t.data, t.ended, t.changed, l.fail
}

// ReadLog implements api.LogReader.
func (l *Logs) ReadLog(ctx context.Context, q api.LogQuery, piece func(api.LogPiece) error) (api.LogStatus, error) {
	at := q.Offset
	for first := true; ; first = false {
		data, ended, changed, err := l.look(q)
		if err != nil {
			return api.LogStatus{}, err
		}
		if first && q.Tail != nil {
			at = max(at, tailAt(data, *q.Tail))
		}
		if at < uint64(len(data)) {
			if err := piece(api.LogPiece{Offset: at, Data: data[at:]}); err != nil {
				return api.LogStatus{}, err
			}
			at = uint64(len(data))
		}
		view := &millracev1.LogView{Complete: ended, Bytes: uint64(len(data))}
		if ended || !q.Follow {
			return api.LogStatus{Ended: ended, View: view}, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return api.LogStatus{View: view}, nil
		}
	}
}

// tailAt is where the last n lines begin.
func tailAt(data []byte, n uint64) uint64 {
	end := len(data)
	if end > 0 && data[end-1] == '\n' {
		end--
	}
	for ; n > 0 && end >= 0; n-- {
		end = bytes.LastIndexByte(data[:max(end, 0)], '\n')
	}
	return uint64(end + 1)
}
