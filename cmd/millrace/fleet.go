package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

func workersCmd(u *ui) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "workers", GroupID: groupFleet, Short: "List the workers",
		Long: `List the workers: ready, draining (takes no new task), suspect (its heartbeat is gone) or dead (its tasks go to others).`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := u.connect()
			if err != nil {
				return err
			}
			defer c.Close()
			list, err := c.Workers(cmd.Context())
			if err != nil {
				return err
			}
			if asJSON {
				return jsonList(u, list)
			}
			rows := [][]string{{"ID", "STATE", "RUNNING", "SLOTS", "QUEUES", "HOST", "PID", "UP", "VERSION", "HANDLERS"}}
			for _, w := range list {
				rows = append(rows, []string{
					w.GetId(), w.GetState(), fmt.Sprint(w.GetRunning()), fmt.Sprint(w.GetSlots()),
					strings.Join(w.GetQueues(), ","), w.GetHost(), fmt.Sprint(w.GetPid()), ago(time.Since(w.GetStartedAt().AsTime())),
					w.GetVersion(), strings.Join(w.GetHandlers(), ","),
				})
			}
			return u.table(rows)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON array")
	return cmd
}

func queuesCmd(u *ui) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "queues", GroupID: groupFleet, Short: "List the queues and what waits in them",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := u.connect()
			if err != nil {
				return err
			}
			defer c.Close()
			list, err := c.Queues(cmd.Context())
			if err != nil {
				return err
			}
			if asJSON {
				return jsonList(u, list)
			}
			rows := [][]string{{"QUEUE", "HIGH", "NORMAL", "LOW", "RUNNING", "WORKERS"}}
			for _, q := range list {
				n := q.GetQueued()
				rows = append(rows, []string{
					q.GetName(), fmt.Sprint(n["high"]), fmt.Sprint(n["normal"]), fmt.Sprint(n["low"]),
					fmt.Sprint(q.GetRunning()), fmt.Sprint(q.GetWorkers()),
				})
			}
			return u.table(rows)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON array")
	return cmd
}

func deadCmd(u *ui) *cobra.Command {
	var asJSON bool
	var limit int
	cmd := &cobra.Command{
		Use: "dead", GroupID: groupTasks, Short: "List the dead letters: what could not be processed, and why",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if limit < 1 || limit > 1000 {
				return fmt.Errorf("--limit %d: use 1 to 1000", limit)
			}
			c, err := u.connect()
			if err != nil {
				return err
			}
			defer c.Close()
			list, err := c.Dead(cmd.Context(), limit)
			if err != nil {
				return err
			}
			if asJSON {
				return jsonList(u, list)
			}
			rows := [][]string{{"ENTRY", "AT", "CODE", "FROM", "TASK", "REASON"}}
			for _, d := range list {
				l := d.GetLetter()
				at := ""
				if l.GetAt() != nil {
					at = l.GetAt().AsTime().Local().Format(time.DateTime)
				}
				from := strings.TrimSpace(l.GetSource() + " " + l.GetEntry())
				rows = append(rows, []string{d.GetEntry(), at, l.GetCode(), from, l.GetTask(), strings.ReplaceAll(l.GetReason(), "\n", "; ")})
			}
			return u.table(rows)
		},
	}
	cmd.Flags().IntVarP(&limit, "limit", "n", 50, "at most so many, the newest first")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON array")
	return cmd
}
