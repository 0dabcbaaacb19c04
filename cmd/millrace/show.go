package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/millrace/millrace/internal/protojs"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func showCmd(u *ui) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "show ID…", GroupID: groupTasks, Short: "Show all about a task",
		Long: `Show all about a task: where it stands, its attempts, its log and what was submitted. With --json, one object in a
line for each id; every key is there, null, "" or [] when it has no value.`,
		Args: needIDs,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := u.connect()
			if err != nil {
				return err
			}
			defer c.Close()
			for i, id := range args {
				t, err := c.Get(cmd.Context(), id)
				if err != nil {
					return err
				}
				switch {
				case asJSON:
					err = u.json(t)
				case i > 0:
					fmt.Fprintln(u.out)
					fallthrough
				default:
					err = u.showTask(t, time.Now())
				}
				if err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object in a line")
	return cmd
}

// showTask writes a task for people.
func (u *ui) showTask(t *millracev1.TaskView, now time.Time) error {
	rows := [][]string{{"id", t.GetId()}}
	add := func(key, value string) {
		if value != "" {
			rows = append(rows, []string{key, value})
		}
	}
	state := stateWord(t.GetState())
	if m := t.GetMessage(); m != "" && m != state {
		state += ": " + m
	}
	if t.GetCancelRequested() && t.GetState() == millracev1.State_STATE_RUNNING {
		state += " (cancel requested)"
	}
	add("name", t.GetName())
	add("state", state)
	add("reason", reasonWord(t.GetReason()))
	if t.ExitCode != nil {
		add("exit code", fmt.Sprint(t.GetExitCode()))
	}
	add("signal", t.GetSignal())
	add("attempt", fmt.Sprintf("%d (%d failed, %d lost)", t.GetAttempt(), t.GetFailures(), t.GetLost()))
	add("worker", t.GetWorker())
	add("queue", t.GetQueue()+", priority "+t.GetPriority())
	add("created", when(t.GetCreatedAt(), now))
	add("started", when(t.GetStartedAt(), now))
	add("ended", when(t.GetEndedAt(), now))
	add("due", when(t.GetDueAt(), now))
	add("took", took(t, now))
	add("log", logWords(t.GetLog()))
	for _, row := range specRows(t.GetSpec()) {
		add(row[0], row[1])
	}
	if err := u.table(rows); err != nil {
		return err
	}
	if len(t.GetAttempts()) == 0 {
		return nil
	}
	fmt.Fprintln(u.out)
	return u.attemptTable(t.GetAttempts())
}

func (u *ui) attemptTable(ends []*millracev1.AttemptEnd) error {
	rows := [][]string{{"ATTEMPT", "WORKER", "REASON", "EXIT", "SIGNAL", "STARTED", "TOOK", "PEAK", "MESSAGE"}}
	for _, e := range ends {
		took := ""
		if e.GetStartedAt() != nil && e.GetEndedAt() != nil {
			took = e.GetEndedAt().AsTime().Sub(e.GetStartedAt().AsTime()).Round(time.Millisecond).String()
		}
		peak := ""
		if n := e.GetUsage().GetMaxRssBytes(); n > 0 {
			peak = fmt.Sprintf("%.1fMiB", float64(n)/(1<<20))
		}
		m := e.GetMessage()
		if e.GetKilled() {
			m = strings.TrimPrefix(m+"; killed after the grace period", "; ")
		}
		if len(e.GetSurvivors()) > 0 {
			m = strings.TrimPrefix(fmt.Sprintf("%s; left over and killed: %s", m, strings.Join(e.GetSurvivors(), ", ")), "; ")
		}
		rows = append(rows, []string{
			fmt.Sprint(e.GetAttempt()), e.GetWorker(), reasonWord(e.GetReason()), exitCell(e),
			e.GetSignal(), e.GetStartedAt().AsTime().Local().Format(time.DateTime), took, peak, m,
		})
	}
	return u.table(rows)
}

func when(t *timestamppb.Timestamp, now time.Time) string {
	if t == nil {
		return ""
	}
	at := t.AsTime()
	if at.After(now) {
		return fmt.Sprintf("%s (in %s)", at.Local().Format(time.DateTime), ago(at.Sub(now)))
	}
	return fmt.Sprintf("%s (%s ago)", at.Local().Format(time.DateTime), ago(now.Sub(at)))
}

func logWords(l *millracev1.LogView) string {
	if l == nil {
		return ""
	}
	words := fmt.Sprintf("%d bytes", l.GetBytes())
	switch {
	case l.GetMissingBytes() > 0:
		words += fmt.Sprintf(", %d missing", l.GetMissingBytes())
	case l.GetPendingBytes() > 0:
		words += fmt.Sprintf(", %d on their way", l.GetPendingBytes())
	case l.GetComplete():
		words += ", complete"
	default:
		words += " so far"
	}
	if l.GetDroppedBytes() > 0 {
		words += fmt.Sprintf(", %d left out by the limit", l.GetDroppedBytes())
	}
	return words
}

// specRows shows what was submitted. Values of the environment may be secrets, so only names are shown.
func specRows(t *millracev1.Task) [][2]string {
	var rows [][2]string
	if c := t.GetCommand(); c != nil {
		rows = append(rows, [2]string{"command", quoteArgs(c)}, [2]string{"dir", c.GetDir()},
			[2]string{"env", strings.Join(slices.Sorted(maps.Keys(c.GetEnv())), " ")})
	}
	if c := t.GetCall(); c != nil {
		rows = append(rows, [2]string{"call", fmt.Sprintf("%s (%d bytes of payload)", c.GetHandler(), len(c.GetPayload()))})
	}
	var labels []string
	for _, k := range slices.Sorted(maps.Keys(t.GetLabels())) {
		labels = append(labels, k+"="+t.GetLabels()[k])
	}
	rows = append(rows, [2]string{"labels", strings.Join(labels, " ")})
	if t.GetTimeout() != nil {
		rows = append(rows, [2]string{"timeout", t.GetTimeout().AsDuration().String()})
	}
	if t.GetRetry() != nil {
		b, err := protojs.Marshal(t.GetRetry())
		if err == nil {
			rows = append(rows, [2]string{"retry", string(b)})
		}
	}
	return rows
}

// quoteArgs shows a command as a shell would take it.
func quoteArgs(c *millracev1.Command) string {
	if c.GetShell() {
		return "sh -c " + quoteArg(strings.Join(c.GetArgv(), " "))
	}
	words := make([]string, len(c.GetArgv()))
	for i, a := range c.GetArgv() {
		words[i] = quoteArg(a)
	}
	return strings.Join(words, " ")
}

func quoteArg(a string) string {
	const safe = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-"
	if a != "" && strings.Trim(a, safe) == "" {
		return a
	}
	return "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
}

// exitCell is the exit code of an attempt, "-" when nobody has seen one.
func exitCell(e *millracev1.AttemptEnd) string {
	switch e.GetReason() {
	case millracev1.Reason_REASON_WORKER_LOST, millracev1.Reason_REASON_NEVER_STARTED:
		return "-"
	default:
		return fmt.Sprint(e.GetExitCode())
	}
}
