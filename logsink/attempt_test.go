package logsink

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// cut makes chunks of text and their end record. sizes says how long they are, and which stream they are of.
func cut(text, sizes []byte) []*millracev1.LogChunk {
	var chunks []*millracev1.LogChunk
	at := timestamppb.New(time.Unix(1700000000, 0))
	offset := 0
	for i := 0; offset < len(text); i++ {
		n := 1
		if len(sizes) > 0 {
			n += int(sizes[i%len(sizes)])
		}
		n = min(n, len(text)-offset)
		chunks = append(chunks, &millracev1.LogChunk{
			Sequence: uint64(i), Offset: uint64(offset), Size: uint64(n), Data: text[offset : offset+n], Stream: uint32(n % 3), At: at,
		})
		offset += n
	}
	end := &millracev1.LogEnd{TotalBytes: uint64(len(text)), Chunks: uint64(len(chunks))}
	return append(chunks, &millracev1.LogChunk{Sequence: end.GetChunks(), Offset: end.GetTotalBytes(), End: end})
}

// FuzzAppend writes chunks in any order, some of them again and again, through two owners of which each may be frozen,
// killed and opened anew at any time. The files must always end up the same.
func FuzzAppend(f *testing.F) {
	f.Add([]byte("one line\nand another\n"), []byte{3, 1, 7}, uint64(1))
	f.Add([]byte("x"), []byte{}, uint64(2))
	f.Add(bytes.Repeat([]byte("0123456789"), 400), []byte{200, 0, 0, 255}, uint64(3))
	f.Fuzz(func(t *testing.T, text, sizes []byte, seed uint64) {
		if len(text) == 0 || len(text) > 1<<14 {
			return
		}
		dir := t.TempDir()
		key := attemptKey{"task", 1}
		open := func() *attemptLog {
			a, err := openAttempt(key, dir, "worker")
			if err != nil {
				t.Fatal(err)
			}
			return a
		}
		random := rand.New(rand.NewPCG(seed, 1))
		chunks := cut(text, sizes)
		todo := append(append([]*millracev1.LogChunk{}, chunks...), chunks[:random.IntN(len(chunks)+1)]...)
		random.Shuffle(len(todo), func(i, j int) { todo[i], todo[j] = todo[j], todo[i] })
		owners := [2]*attemptLog{open(), open()}
		for _, c := range todo {
			k := random.IntN(2)
			if err := owners[k].write(c, c.GetData()); err != nil {
				t.Fatal(err)
			}
			switch random.IntN(8) {
			case 0: // it is killed, and its successor opens what it left
				if err := owners[k].close(); err != nil {
					t.Fatal(err)
				}
				owners[k] = open()
			case 1:
				if err := owners[k].syncDone(owners[k].syncing()); err != nil {
					t.Fatal(err)
				}
			case 2:
				if err := owners[k].refresh(); err != nil {
					t.Fatal(err)
				}
			}
		}
		for k, a := range owners {
			if err := a.refresh(); err != nil {
				t.Fatal(err)
			}
			if v := a.view(); !v.GetComplete() || v.GetBytes() != uint64(len(text)) || !a.finished() {
				t.Errorf("owner %d sees %v, want %d complete bytes", k, v, len(text))
			}
			if err := a.close(); err != nil {
				t.Fatal(err)
			}
		}
		got, err := os.ReadFile(filepath.Join(dir, dataName(1)))
		if err != nil || !bytes.Equal(got, text) {
			t.Errorf("the file has %d bytes, want %d, %v", len(got), len(text), err)
		}
	})
}

func TestIndexOfAnotherVersionIsRefused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, indexName(1)), append([]byte("MLRI\x63"), make([]byte, headerSize)...), 0o600); err != nil {
		t.Fatal(err)
	}
	if a, err := openAttempt(attemptKey{"task", 1}, dir, "worker"); err == nil {
		_ = a.close()
		t.Error("it was opened")
	}
}

// A table keeps few files open, whatever it is asked for.
func TestTableIsBounded(t *testing.T) {
	t.Parallel()
	tab := newTable(t.TempDir(), 8)
	var held []*attemptLog
	for i := range uint32(100) {
		a, err := tab.forWriting(attemptKey{"task", i + 1}, "2026-01-02", "worker")
		if err != nil {
			t.Fatal(err)
		}
		if i < 3 {
			held = append(held, a) // in use, so never closed
			continue
		}
		tab.release(a)
	}
	if n := len(tab.open); n > 8 {
		t.Errorf("%d logs are open, want at most 8", n)
	}
	for _, a := range held {
		if err := a.write(&millracev1.LogChunk{Data: []byte("x"), Size: 1}, []byte("x")); err != nil {
			t.Errorf("a log in use was closed: %v", err)
		}
		tab.release(a)
	}
	if err := tab.closeAll(); err != nil {
		t.Error(err)
	}
}

// Old logs go, then the oldest ended ones while all are too large.
func TestRetention(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	now := time.Now()
	add := func(task string, age time.Duration, size int, ended bool) {
		a, err := openAttempt(attemptKey{task, 1}, attemptKey{task: task}.dir(dir, "2026-01-02"), "worker")
		if err != nil {
			t.Fatal(err)
		}
		data := make([]byte, size)
		if err := a.write(&millracev1.LogChunk{Data: data, Size: uint64(size)}, data); err != nil {
			t.Fatal(err)
		}
		if ended {
			if err := a.write(&millracev1.LogChunk{End: &millracev1.LogEnd{TotalBytes: uint64(size), Chunks: 1}}, nil); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Chtimes(a.data.Name(), now.Add(-age), now.Add(-age)); err != nil {
			t.Fatal(err)
		}
		if err := a.close(); err != nil {
			t.Fatal(err)
		}
	}
	add("ancient", 100*time.Hour, 10, true)
	add("lost", 99*time.Hour, 10, false)
	add("older", 3*time.Hour, 500, true)
	add("running", 2*time.Hour, 500, false)
	add("newer", time.Hour, 500, true)
	s := &Service{cfg: Config{Dir: dir, Retention: 48 * time.Hour, MaxBytes: 1100}, table: newTable(dir, 8), metrics: newMetrics(nil)}
	deleted, err := s.retainOnce(t.Context(), now)
	if err != nil || deleted != 3 {
		t.Errorf("deleted %d, %v, want 3", deleted, err)
	}
	logs, err := s.kept(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, l := range logs {
		got[l.key.task] = true
	}
	if len(got) != 2 || !got["running"] || !got["newer"] {
		t.Errorf("kept %v", got)
	}
	if _, err := os.Stat(filepath.Join(dir, "2026-01-02", "ancient")); !os.IsNotExist(err) {
		t.Errorf("an empty folder was left: %v", err)
	}
}
