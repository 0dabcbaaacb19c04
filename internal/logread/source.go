package logread

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protodelim"

	"github.com/millrace/millrace/internal/store"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// errNoLog means that a logsink was asked and there is no log of the attempt.
var errNoLog = errors.New("no log")

// source reads the log of one attempt from one logsink after another, always at the place where the last one stopped.
type source struct {
	c       *Client
	task    string
	attempt uint32
	stream  uint32
	offset  uint64
	tail    *uint64
	follow  bool

	body  io.ReadCloser
	in    *bufio.Reader
	last  string    // address asked last
	tries int       // since something was read
	since time.Time // of the first of them
}

func (s *source) close() {
	if s.body != nil {
		_ = s.body.Close()
		s.body = nil
	}
}

// next returns the next piece. After one with Log there is none.
func (s *source) next(ctx context.Context) (*millracev1.ReadLogsResponse, error) {
	for {
		p, err := s.try(ctx)
		if err == nil {
			s.tries = 0
			if n := uint64(len(p.GetData())); n > 0 {
				s.offset, s.tail = p.GetOffset()+n, nil
			}
			return p, nil
		}
		s.close()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if final, ok := errors.AsType[finalError](err); ok {
			return nil, final.error
		}
		if s.tries == 0 {
			s.since = time.Now()
		}
		s.tries++
		if !s.follow && time.Since(s.since) > s.c.cfg.Patience {
			return nil, fmt.Errorf("read the log of task %s: %w", s.task, err)
		}
		if !store.Backoff(ctx, s.tries-1) {
			return nil, ctx.Err()
		}
	}
}

// finalError is an error that asking again will not mend.
type finalError struct{ error }

func (s *source) try(ctx context.Context) (*millracev1.ReadLogsResponse, error) {
	if s.body == nil {
		if err := s.open(ctx); err != nil {
			return nil, err
		}
	}
	p := &millracev1.ReadLogsResponse{}
	if err := (protodelim.UnmarshalOptions{MaxSize: 8 << 20}).UnmarshalFrom(s.in, p); err != nil {
		return nil, fmt.Errorf("logsink %s: %w", s.last, err)
	}
	return p, nil
}

// open asks a logsink.
func (s *source) open(ctx context.Context) error {
	addr, err := s.pick(ctx)
	if err != nil {
		return err
	}
	s.last = addr
	q := url.Values{}
	q.Set("offset", strconv.FormatUint(s.offset, 10))
	q.Set("stream", strconv.FormatUint(uint64(s.stream), 10))
	if s.tail != nil {
		q.Set("tail", strconv.FormatUint(*s.tail, 10))
	}
	if s.follow {
		q.Set("follow", "1")
	}
	u := url.URL{Scheme: "http", Host: addr, Path: fmt.Sprintf("/v1/logs/%s/%d", s.task, s.attempt), RawQuery: q.Encode()}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return finalError{err}
	}
	if t := s.c.cfg.Token.Reveal(); t != "" {
		req.Header.Set("Authorization", "Bearer "+t)
	}
	resp, err := s.c.http.Do(req)
	if err != nil {
		return fmt.Errorf("ask logsink %s: %w", addr, err)
	}
	if resp.StatusCode == http.StatusOK {
		s.body, s.in = resp.Body, bufio.NewReaderSize(resp.Body, 64<<10)
		return nil
	}
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
	_ = resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusNotFound:
		return finalError{errNoLog}
	case http.StatusBadRequest, http.StatusUnauthorized:
		return finalError{fmt.Errorf("logsink %s: %s", addr, strings.TrimSpace(string(text)))}
	default:
		return fmt.Errorf("logsink %s: %s: %s", addr, resp.Status, strings.TrimSpace(string(text)))
	}
}

// pick chooses the logsink that the task's log goes through, because it is woken by new output; any other will do, but
// one that just failed only when there is no other.
func (s *source) pick(ctx context.Context) (string, error) {
	addrs, err := s.c.st.LogsinkAddrs(ctx)
	if err != nil {
		return "", fmt.Errorf("look for logsinks: %w", err)
	}
	if len(addrs) == 0 {
		return "", ErrNoLogsink
	}
	failed := ""
	if s.tries > 0 {
		failed = s.last
	}
	if shards, err := s.c.st.LogShards(ctx); err == nil {
		owner, err := s.c.st.LogShardOwner(ctx, store.LogShard(s.task, shards))
		if addr := addrs[owner]; err == nil && addr != "" && (addr != failed || s.tries%2 == 0) {
			return addr, nil
		}
	}
	var others []string
	for _, addr := range addrs {
		if addr != failed {
			others = append(others, addr)
		}
	}
	if len(others) == 0 {
		return failed, nil
	}
	return others[rand.IntN(len(others))], nil
}
