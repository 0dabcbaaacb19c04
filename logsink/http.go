package logsink

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protodelim"

	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/spec"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// handler serves two requests:
//
//	GET /v1/logs/{task}                 the attempts that have a log, as JSON
//	GET /v1/logs/{task}/{attempt}       its output, as length-delimited ReadLogsResponse messages
//	    ?offset=N  skip N bytes         ?tail=N    only the last N lines
//	    ?stream=1  only stdout          ?follow=1  to the end of the log, also when it has not begun
func (s *Service) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/logs/{task}", s.serveAttempts)
	mux.HandleFunc("GET /v1/logs/{task}/{attempt}", s.serveLog)
	return s.authorize(mux)
}

func (s *Service) authorize(next http.Handler) http.Handler {
	if s.cfg.Token == "" {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		given, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		if !ok || !s.cfg.Token.Equal(given) {
			http.Error(w, "the token is missing or wrong: services of a namespace need the same MILLRACE_TOKEN", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// Attempt is an element of the list of attempts that have a log.
type Attempt struct {
	Attempt uint32 `json:"attempt"`
	Date    string `json:"date"`
	Worker  string `json:"worker"`
	Bytes   uint64 `json:"bytes"`
	// Ended: nothing more is waited for.
	Ended bool `json:"ended"`
	// Complete: every byte is there.
	Complete bool `json:"complete"`
}

func (s *Service) serveAttempts(w http.ResponseWriter, r *http.Request) {
	task := r.PathValue("task")
	if !spec.ValidID(task) {
		http.Error(w, "not the id of a task", http.StatusBadRequest)
		return
	}
	list, err := s.attempts(task)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(list) // the reader is gone when this fails
}

// attempts lists the logs of a task in order.
func (s *Service) attempts(task string) ([]Attempt, error) {
	dates, err := s.table.dates()
	if err != nil {
		return nil, err
	}
	list := []Attempt{}
	for _, date := range dates {
		entries, err := os.ReadDir(attemptKey{task: task}.dir(s.cfg.Dir, date))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			number, found := strings.CutSuffix(e.Name(), ".idx")
			n, err := strconv.ParseUint(number, 10, 32)
			if !found || err != nil {
				continue
			}
			a, err := s.table.existing(attemptKey{task, uint32(n)}, date)
			if err != nil {
				continue // deleted meanwhile
			}
			v := a.view()
			list = append(list, Attempt{Attempt: uint32(n), Date: date, Worker: a.worker, Bytes: v.GetBytes(), Ended: a.finished(), Complete: v.GetComplete()})
			s.table.release(a)
		}
	}
	slices.SortFunc(list, func(a, b Attempt) int { return int(a.Attempt) - int(b.Attempt) })
	return list, nil
}

// readQuery is the part of a request behind the path.
type readQuery struct {
	offset uint64
	tail   *uint64
	stream uint32
	follow bool
}

func parseQuery(r *http.Request) (q readQuery, err error) {
	number := func(name string, bits int) uint64 {
		text := r.URL.Query().Get(name)
		if text == "" || err != nil {
			return 0
		}
		var n uint64
		if n, err = strconv.ParseUint(text, 10, bits); err != nil {
			err = errors.New(name + " is not a number")
		}
		return n
	}
	q.offset = number("offset", 63)
	q.stream = uint32(number("stream", 2))
	q.follow = r.URL.Query().Get("follow") == "1"
	if r.URL.Query().Has("tail") {
		n := number("tail", 63)
		q.tail = &n
	}
	return q, err
}

func (s *Service) serveLog(w http.ResponseWriter, r *http.Request) {
	task := r.PathValue("task")
	attempt, err := strconv.ParseUint(r.PathValue("attempt"), 10, 32)
	if !spec.ValidID(task) || err != nil || attempt == 0 {
		http.Error(w, "not a task and an attempt", http.StatusBadRequest)
		return
	}
	q, err := parseQuery(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.metrics.readers.Inc()
	defer s.metrics.readers.Dec()
	a, err := s.find(r.Context(), attemptKey{task, uint32(attempt)}, q.follow)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	defer s.table.release(a)
	// Another logsink may have written since it was opened here.
	if err := a.refresh(); err != nil {
		s.fail(w, r, err)
		return
	}
	if err := s.stream(r.Context(), w, a, q); err != nil && r.Context().Err() == nil {
		s.limiter.Warn(r.Context(), "read", "a log could not be read to its end", err, slog.String(logkey.Task, task))
		panic(http.ErrAbortHandler) // the reader must not take this for the end
	}
}

func (s *Service) stream(ctx context.Context, w http.ResponseWriter, a *attemptLog, q readQuery) error {
	rc := http.NewResponseController(w)
	w.Header().Set("Content-Type", "application/x-millrace-log")
	rd := &reading{s: s, a: a, stream: q.stream, follow: q.follow}
	rd.emit = func(piece *millracev1.ReadLogsResponse) error {
		if err := rc.SetWriteDeadline(time.Now().Add(time.Minute)); err != nil {
			return err
		}
		if _, err := protodelim.MarshalTo(w, piece); err != nil {
			return err
		}
		return rc.Flush()
	}
	if q.tail != nil {
		offset, err := rd.tailFrom(*q.tail)
		if err != nil {
			return err
		}
		q.offset = max(q.offset, offset)
	}
	if err := rd.seek(q.offset); err != nil {
		return err
	}
	if err := rc.Flush(); err != nil {
		return err
	}
	return rd.run(ctx)
}

func (s *Service) fail(w http.ResponseWriter, r *http.Request, err error) {
	switch {
	case r.Context().Err() != nil:
	case errors.Is(err, fs.ErrNotExist):
		http.Error(w, "there is no such log", http.StatusNotFound)
	default:
		s.limiter.Error(r.Context(), "open", "a log could not be opened", err)
		http.Error(w, "the log could not be opened: "+err.Error(), http.StatusInternalServerError)
	}
}
