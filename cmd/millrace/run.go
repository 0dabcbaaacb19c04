package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/millrace/millrace/internal/client"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func runCmd(u *ui) *cobra.Command {
	var f taskFlags
	var raw, detach bool
	cmd := &cobra.Command{
		Use: "run [flags] -- CMD [ARG…]", GroupID: groupTasks, Short: "Run a task, show its output, exit with its code",
		Long: `Run a task somewhere in the fleet, show its output as it is written, and exit with its code (see millrace
--help). With --split the task's stderr comes out on stderr. Ctrl-C cancels the task and shows the rest of its output; a
second one leaves at once.`,
		Example: `  millrace run -- python3 train.py --seed 7`,
		RunE: func(cmd *cobra.Command, args []string) error {
			t, err := f.task(cmd, args, u.in, time.Now())
			if err != nil {
				return err
			}
			c, err := u.connect()
			if err != nil {
				return err
			}
			defer c.Close()
			return u.runTask(cmd.Context(), c, t, raw, detach)
		},
	}
	f.register(cmd)
	cmd.Flags().BoolVar(&raw, "raw", false, "pass bytes on to a terminal as they are, with every \\r")
	cmd.Flags().BoolVar(&detach, "detach-on-interrupt", false, "Ctrl-C leaves at once and lets the task run on")
	return cmd
}

// errLeft ends a run whose user does not want to wait any longer.
var errLeft = errors.New("left")

// runTask submits a task, shows its output until it has ended, and returns its code as an *exitError. It is also
// what `millrace dev -- CMD` does.
func (u *ui) runTask(ctx context.Context, c *client.Client, t *millracev1.Task, raw, detach bool) error {
	// From here on a signal is for the task, also while it is being submitted.
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)

	id, _, err := c.Submit(ctx, t)
	if err != nil {
		return err
	}
	ctx, leave := context.WithCancelCause(ctx)
	defer leave(nil)
	watched := make(chan struct{})
	go func() { // ends with ctx
		defer close(watched)
		u.interrupts(ctx, c, id, signals, detach, leave)
	}()
	defer func() { leave(nil); <-watched }()

	show := u.logWriter(raw)
	err = c.Follow(ctx, &millracev1.ReadLogsRequest{Id: id}, show.piece)
	show.flush()
	var done *millracev1.TaskView
	if err == nil || client.IsLogTrouble(err) {
		if err != nil {
			u.say("run: %v", err)
		}
		done, err = c.Wait(ctx, id, true)
	}
	switch {
	case errors.Is(context.Cause(ctx), errLeft):
		u.say("run: left; `millrace logs -f %s` shows the task again, `millrace cancel %s` ends it", id, id)
		return &exitError{code: codeCancelled}
	case err != nil:
		u.say("run: task %s: `millrace wait %s` asks for its outcome", id, id)
		return err
	}
	if code := exitCode(done); code != 0 {
		u.say("%s", outcomeLine(done))
		return &exitError{code: code}
	}
	return nil
}

// interrupts cancels the task at the first signal and leaves at the second.
func (u *ui) interrupts(ctx context.Context, c *client.Client, id string, signals <-chan os.Signal, detach bool, leave context.CancelCauseFunc) {
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-signals:
		}
		if n > 0 || detach {
			leave(errLeft)
			return
		}
		u.say("run: cancelling task %s; once more leaves at once", id)
		if _, err := c.Cancel(ctx, id); err != nil && ctx.Err() == nil {
			u.say("run: cancel: %v", err)
		}
	}
}
