package embedded

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/store"
)

// Both kinds of server start, expire keys by themselves, and are gone after Stop.
func TestServers(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]Options{"in memory": {InMemory: true}, "real": {Persist: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o.Dir = t.TempDir()
			s, err := Start(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			st, err := store.New(store.Options{URL: s.URL, Embedded: s.InMemory}, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = st.Close() }()
			if err := st.Wait(t.Context(), 5*time.Second); err != nil {
				t.Fatal(err)
			}
			if err := st.RegisterDispatcher(t.Context(), "d", "addr", 300*time.Millisecond); err != nil {
				t.Fatal(err)
			}
			for {
				m, err := st.DispatcherAddrs(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if len(m) == 0 {
					break
				}
			}
			if !s.InMemory {
				if found, _ := filepath.Glob(filepath.Join(o.Dir, "appendonlydir", "*")); len(found) == 0 {
					t.Error("nothing is kept")
				}
			}
			s.Stop()
			if st.Ping(t.Context()) == nil {
				t.Error("answers after Stop")
			}
		})
	}
}

// Without a program on PATH the server is in memory.
func TestFallsBackToMemory(t *testing.T) {
	t.Setenv("PATH", os.DevNull)
	s, err := Start(t.Context(), Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Stop()
	if !s.InMemory {
		t.Errorf("%+v", s)
	}
}
