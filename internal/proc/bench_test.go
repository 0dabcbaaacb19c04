package proc_test

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"testing"

	"github.com/millrace/millrace/internal/proc"
)

// BenchmarkSpawn compares an attempt of /bin/true with the least that os/exec needs for the same: one pipe per stream,
// copied to a writer.
func BenchmarkSpawn(b *testing.B) {
	env := []string{"PATH=" + os.Getenv("PATH")}
	for _, how := range []struct {
		name string
		run  func(b *testing.B)
	}{
		{"exec", func(b *testing.B) {
			b.Helper()
			cmd := exec.Command("/bin/true")
			cmd.Env, cmd.Stdout, cmd.Stderr = env, new(bytes.Buffer), new(bytes.Buffer)
			if err := cmd.Run(); err != nil {
				b.Error(err)
			}
		}},
		{"proc", func(b *testing.B) {
			b.Helper()
			p, err := proc.Start(proc.Spec{Argv: []string{"/bin/true"}, Env: env, Stdout: io.Discard, Marker: marker()})
			if err != nil {
				b.Error(err)
				return
			}
			if out := p.Wait(); out.ExitCode != 0 || len(out.Survivors) > 0 {
				b.Errorf("%+v", out)
			}
		}},
	} {
		for _, parallel := range []int{1, 4} {
			name := how.name
			if parallel > 1 {
				name += "/parallel"
			}
			b.Run(name, func(b *testing.B) {
				b.SetParallelism(parallel)
				if parallel == 1 {
					for b.Loop() {
						how.run(b)
					}
					return
				}
				b.RunParallel(func(pb *testing.PB) {
					for pb.Next() {
						how.run(b)
					}
				})
			})
		}
	}
}
