package logsink_test

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/millrace/millrace/internal/redistest"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/logsink"
)

// helperEnv makes the test binary a logsink: its value is the URL of Redis and the directory.
const helperEnv = "MILLRACE_TEST_LOGSINK"

func TestMain(m *testing.M) {
	if v := os.Getenv(helperEnv); v != "" {
		if err := helper(v); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	redistest.Main(m)
}

// helper runs a logsink until it is killed.
func helper(v string) error {
	url, dir, _ := strings.Cut(v, " ")
	// The test may be killed too.
	go func() { // ends with the process
		_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
		os.Exit(2)
	}()
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	st, err := store.New(store.Options{URL: url, Name: "helper"}, log)
	if err != nil {
		return err
	}
	svc, err := logsink.New(sinkConfig(dir), logsink.Deps{Store: st, Logger: log})
	if err != nil {
		return err
	}
	return svc.Run(context.Background())
}

// startHelper starts a logsink in a process of its own and returns what kills, stops and thaws it.
func (c *chain) startHelper() (signal func(syscall.Signal), wait func()) {
	c.t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), helperEnv+"="+c.redis.URL()+" "+c.dir)
	cmd.Stderr = c.t.Output()
	in, err := cmd.StdinPipe()
	if err != nil {
		c.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	waited := false
	wait = func() {
		if !waited {
			waited = true
			_ = cmd.Wait() // it was killed
		}
	}
	c.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		wait()
		_ = in.Close()
	})
	return func(s syscall.Signal) {
		if err := cmd.Process.Signal(s); err != nil {
			c.t.Errorf("signal the helper: %v", err)
		}
	}, wait
}
