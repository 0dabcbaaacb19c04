package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func psCmd(u *ui) *cobra.Command {
	var states []string
	var queue string
	var limit int
	var asJSON, quiet, all bool
	cmd := &cobra.Command{
		Use: "ps [flags]", GroupID: groupTasks, Short: "List tasks",
		Long: `List tasks: those that run, then those that wait, then those that ended, each the newest first.`,
		Example: `  millrace ps --state running,queued
  millrace ps --quiet --state failed | xargs millrace show`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			req := &millracev1.ListTasksRequest{Queue: queue}
			var err error
			if req.States, err = parseStates(states); err != nil {
				return err
			}
			if limit < 0 {
				return fmt.Errorf("--limit %d: use 1 or more, or 0 for all", limit)
			}
			if all {
				limit = 0
			}
			c, err := u.connect()
			if err != nil {
				return err
			}
			defer c.Close()
			var list []*millracev1.TaskView
			err = c.Page(cmd.Context(), req, limit, func(t *millracev1.TaskView) bool {
				list = append(list, t)
				return true
			})
			switch {
			case err != nil:
				return err
			case asJSON:
				return jsonList(u, list)
			case quiet:
				for _, t := range list {
					if _, err := fmt.Fprintln(u.out, t.GetId()); err != nil {
						return err
					}
				}
				return nil
			default:
				return u.taskTable(list, time.Now())
			}
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.StringSliceVarP(&states, "state", "s", nil, "only these states: "+strings.Join(stateWords(), ", "))
	fs.StringVarP(&queue, "queue", "q", "", "only this queue")
	fs.IntVarP(&limit, "limit", "n", 50, "at most so many; 0 for all")
	fs.BoolVarP(&all, "all", "a", false, "all of them, the same as --limit 0")
	fs.BoolVar(&quiet, "quiet", false, "print only ids")
	fs.BoolVar(&asJSON, "json", false, "print one JSON array")
	cmd.MarkFlagsMutuallyExclusive("json", "quiet")
	cmd.MarkFlagsMutuallyExclusive("all", "limit")
	_ = cmd.RegisterFlagCompletionFunc("state", cobra.FixedCompletions(stateWords(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// stateWords lists the states in the order of a task's life.
func stateWords() []string {
	var words []string
	for n := range millracev1.State_name {
		if n > 0 {
			words = append(words, stateWord(millracev1.State(n)))
		}
	}
	slices.SortFunc(words, func(a, b string) int { return int(stateOf(a)) - int(stateOf(b)) })
	return words
}

// stateOf is unspecified for a word that is no state.
func stateOf(word string) millracev1.State {
	return millracev1.State(millracev1.State_value["STATE_"+strings.ToUpper(word)])
}

func parseStates(words []string) ([]millracev1.State, error) {
	var out []millracev1.State
	for _, w := range words {
		s := stateOf(strings.TrimSpace(w))
		if s == millracev1.State_STATE_UNSPECIFIED {
			return nil, fmt.Errorf("--state %q is not a state: use %s", w, strings.Join(stateWords(), ", "))
		}
		out = append(out, s)
	}
	return out, nil
}

func (u *ui) taskTable(list []*millracev1.TaskView, now time.Time) error {
	rows := [][]string{{"ID", "NAME", "STATE", "ATT", "QUEUE", "WORKER", "AGE", "TOOK", "MESSAGE"}}
	for _, t := range list {
		lane := t.GetQueue()
		if p := t.GetPriority(); p != "" && p != "normal" {
			lane += ":" + p
		}
		rows = append(rows, []string{
			t.GetId(), clip(t.GetName(), 24), stateWord(t.GetState()), fmt.Sprint(t.GetAttempt()), lane,
			t.GetWorker(), ago(now.Sub(t.GetCreatedAt().AsTime())), took(t, now), clip(listMessage(t, now), 60),
		})
	}
	return u.table(rows)
}

// listMessage is what a list has room for.
func listMessage(t *millracev1.TaskView, now time.Time) string {
	m := t.GetMessage()
	switch {
	case t.GetCancelRequested() && t.GetState() == millracev1.State_STATE_RUNNING:
		return "cancel requested"
	case t.GetDueAt() != nil:
		due := "due"
		if d := t.GetDueAt().AsTime().Sub(now); d > 0 {
			due = "due in " + ago(d)
		}
		return strings.TrimSuffix(due+"; "+m, "; ")
	default:
		return m
	}
}

// took is how long the present or last attempt has run.
func took(t *millracev1.TaskView, now time.Time) string {
	switch {
	case t.GetStartedAt() == nil:
		return ""
	case t.GetState() == millracev1.State_STATE_RUNNING:
		return ago(now.Sub(t.GetStartedAt().AsTime()))
	case t.GetEndedAt() != nil:
		return ago(t.GetEndedAt().AsTime().Sub(t.GetStartedAt().AsTime()))
	default:
		return ""
	}
}

// clip cuts a text to n characters.
func clip(s string, n int) string {
	r := []rune(s)
	if len(r) <= n {
		return s
	}
	return string(r[:n-1]) + "…"
}
