package logsink

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/millrace/millrace/internal/logkey"
)

const retainInterval = 10 * time.Minute

// retain deletes logs that are too old or too many. Every logsink of a shared directory does it; deleting twice does no
// harm.
func (s *Service) retain(ctx context.Context) {
	if s.cfg.Retention == 0 && s.cfg.MaxBytes == 0 {
		return
	}
	loop := s.status.Loop("logsink.retain")
	tick := time.NewTicker(retainInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		deleted, err := s.retainOnce(ctx, time.Now())
		if err != nil {
			loop.Failure(err)
			s.limiter.Warn(ctx, "retain", "old logs could not be deleted, trying again", err, slog.Duration(logkey.After, retainInterval))
			continue
		}
		loop.Success(strconv.Itoa(deleted) + " logs deleted")
		if deleted > 0 {
			s.log.Info("deleted old logs", slog.Int(logkey.Count, deleted))
		}
	}
}

// keptLog is the log of an attempt on disk.
type keptLog struct {
	dir     string
	attempt uint32
	key     attemptKey
	bytes   int64
	last    time.Time // of its last write
}

// retainOnce deletes what is older than the retention, then the oldest while the rest is too large.
func (s *Service) retainOnce(ctx context.Context, now time.Time) (deleted int, err error) {
	logs, err := s.kept(ctx)
	if err != nil {
		return 0, err
	}
	slices.SortFunc(logs, func(a, b keptLog) int { return a.last.Compare(b.last) })
	var total int64
	for _, l := range logs {
		total += l.bytes
	}
	var errs []error
	for _, l := range logs {
		old := s.cfg.Retention > 0 && now.Sub(l.last) > s.cfg.Retention
		many := s.cfg.MaxBytes > 0 && total > s.cfg.MaxBytes
		if !old && !many {
			break
		}
		// A log that is not ended is being written, perhaps by another logsink, however long its task is silent.
		if !old && !s.ended(l) {
			continue
		}
		ok, err := s.table.remove(l)
		errs = append(errs, err)
		if ok {
			deleted++
			total -= l.bytes
		}
	}
	s.metrics.deleted.Add(float64(deleted))
	return deleted, errors.Join(errs...)
}

func (s *Service) ended(l keptLog) bool {
	f, err := os.Open(filepath.Join(l.dir, indexName(l.attempt)))
	if err != nil {
		return false
	}
	h, err := readHeader(f)
	_ = f.Close()
	return err == nil && h.end != nil
}

// kept lists all logs on disk.
func (s *Service) kept(ctx context.Context) ([]keptLog, error) {
	var logs []keptLog
	err := filepath.WalkDir(s.cfg.Dir, func(path string, e fs.DirEntry, err error) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // deleted meanwhile
		}
		if err != nil || e.IsDir() {
			return err
		}
		rel, _ := filepath.Rel(s.cfg.Dir, path) // both are below Dir
		parts := strings.Split(rel, string(filepath.Separator))
		number, isLog := strings.CutSuffix(e.Name(), ".log")
		n, err := strconv.ParseUint(number, 10, 32)
		if !isLog || err != nil || len(parts) != 3 || !validDate(parts[0]) {
			return nil // not ours
		}
		info, err := e.Info()
		if err != nil {
			return nil
		}
		logs = append(logs, keptLog{
			dir: filepath.Dir(path), attempt: uint32(n), key: attemptKey{parts[1], uint32(n)}, bytes: info.Size(), last: info.ModTime(),
		})
		return nil
	})
	return logs, err
}

// remove deletes a log that nobody uses here, and the folders that it leaves empty.
func (t *table) remove(l keptLog) (bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if a := t.open[l.key]; a != nil {
		if a.refs > 0 {
			return false, nil
		}
		delete(t.open, l.key)
		_ = a.close()
	}
	var errs []error
	for _, name := range []string{dataName(l.attempt), indexName(l.attempt)} {
		if err := os.Remove(filepath.Join(l.dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	// These fail while something else is in there, which is what we want.
	_ = os.Remove(l.dir)
	_ = os.Remove(filepath.Dir(l.dir))
	return len(errs) == 0, errors.Join(errs...)
}
