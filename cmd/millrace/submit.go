package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func submitCmd(u *ui) *cobra.Command {
	var f taskFlags
	var wait, asJSON bool
	cmd := &cobra.Command{
		Use: "submit [flags] -- CMD [ARG…]", GroupID: groupTasks, Short: "Submit a task and print its id",
		Long: `Submit a task and print its id, alone, on standard output. The task is in Redis when the id is printed.
With --wait, wait for its end and exit with its code (see millrace --help).`,
		Example: `  millrace submit -- python3 train.py --seed 7
  millrace submit --retries 2 --timeout 2h --label run=a7 -- ./train.sh
  millrace submit --shell -- 'date; sleep 1; date'
  millrace submit --call resize --payload @picture.json`,
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
			id, created, err := c.Submit(cmd.Context(), t)
			if err != nil {
				return err
			}
			if !created {
				u.say("submit: task %s was there already, it is joined", id)
			}
			if !wait {
				if asJSON {
					return u.json(&millracev1.SubmitResponse{Id: id, Created: created})
				}
				_, err = fmt.Fprintln(u.out, id)
				return err
			}
			if !asJSON {
				fmt.Fprintln(u.out, id)
			}
			return u.waitFor(cmd.Context(), c, []string{id}, asJSON, false)
		},
	}
	f.register(cmd)
	cmd.Flags().BoolVarP(&wait, "wait", "w", false, "wait for the end and exit with the task's code")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object: id and created, or with --wait the whole task")
	return cmd
}

// waiter is what waiting for tasks needs of a client.
type waiter interface {
	Wait(ctx context.Context, id string, logs bool) (*millracev1.TaskView, error)
}

// waitFor waits for every task, says how each ended, and ends with the code of the first, in the order given, that
// did not succeed.
func (u *ui) waitFor(ctx context.Context, c waiter, ids []string, asJSON, quiet bool) error {
	code := 0
	for _, id := range ids {
		t, err := c.Wait(ctx, id, true)
		if err != nil {
			return err
		}
		if asJSON {
			if err := u.json(t); err != nil {
				return err
			}
		} else if !quiet {
			u.say("%s", outcomeLine(t))
		}
		if code == 0 {
			code = exitCode(t)
		}
	}
	if code != 0 {
		return &exitError{code: code}
	}
	return nil
}

func waitCmd(u *ui) *cobra.Command {
	var asJSON, quiet bool
	cmd := &cobra.Command{
		Use: "wait ID…", GroupID: groupTasks, Short: "Wait until tasks have ended",
		Long: `Wait until tasks have ended and their logs are complete. With one id the exit code is the task's own; with
several it is that of the first one given that did not succeed.`,
		Args: needIDs,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := u.connect()
			if err != nil {
				return err
			}
			defer c.Close()
			return u.waitFor(cmd.Context(), c, args, asJSON, quiet)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print each task as one JSON object in a line")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "say nothing, only exit with the code")
	return cmd
}

func needIDs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("the id of a task is missing: `millrace ps` lists them, `%s --help` helps", cmd.CommandPath())
	}
	return nil
}

func needID(cmd *cobra.Command, args []string) error {
	if len(args) > 1 {
		return fmt.Errorf("one id is enough, %d are given: `%s --help` helps", len(args), cmd.CommandPath())
	}
	return needIDs(cmd, args)
}

func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("%q is not understood here: `%s --help` lists the flags", args[0], cmd.CommandPath())
	}
	return nil
}
