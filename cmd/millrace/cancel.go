package main

import (
	"errors"

	"github.com/spf13/cobra"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func cancelCmd(u *ui) *cobra.Command {
	var asJSON, wait bool
	cmd := &cobra.Command{
		Use: "cancel ID…", GroupID: groupTasks, Short: "Cancel tasks",
		Long: `Cancel tasks. One that waits ends at once; one that runs gets SIGTERM, and SIGKILL after its grace period. To cancel
a task that has ended is an error only in so far as the exit code is 1.`,
		Args: needIDs,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := u.connect()
			if err != nil {
				return err
			}
			defer c.Close()
			var errs []error
			late := false
			for _, id := range args {
				r, err := c.Cancel(cmd.Context(), id)
				if err != nil {
					errs = append(errs, err) // the others are cancelled all the same
					continue
				}
				if wait && r.GetAccepted() {
					t, err := c.Wait(cmd.Context(), r.GetId(), false)
					if err != nil {
						errs = append(errs, err)
						continue
					}
					r.State = t.GetState()
				}
				late = late || !r.GetAccepted()
				if asJSON {
					errs = append(errs, u.json(r))
				} else {
					u.sayCancelled(r)
				}
			}
			if err := errors.Join(errs...); err != nil {
				return err
			}
			if late {
				return &exitError{code: 1}
			}
			return nil
		},
	}
	cmd.Flags().BoolVarP(&wait, "wait", "w", false, "wait until they have ended")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object in a line for each")
	return cmd
}

func (u *ui) sayCancelled(r *millracev1.CancelTaskResponse) {
	switch {
	case !r.GetAccepted():
		u.say("task %s had ended before: %s", r.GetId(), stateWord(r.GetState()))
	case r.GetState() == millracev1.State_STATE_RUNNING:
		u.say("task %s is being stopped", r.GetId())
	default:
		u.say("task %s %s", r.GetId(), stateWord(r.GetState()))
	}
}
