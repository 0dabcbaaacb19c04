package main

import (
	"errors"
	"io"

	"github.com/spf13/cobra"

	"github.com/millrace/millrace/internal/client"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

type logFlags struct {
	follow, noFollow  bool
	attempt           uint32
	tail              int64
	stdout, stderr    bool
	raw, asJSON, exit bool
	quiet             bool
}

func logsCmd(u *ui) *cobra.Command {
	var f logFlags
	cmd := &cobra.Command{
		Use: "logs [flags] ID", GroupID: groupTasks, Short: "Show the output of a task",
		Long: `Show the output of a task, byte for byte, as far as it is there. With -f, wait for the task to start if need be, go
on over all its attempts to its end, and say on stderr how it ended. The exit code is 0 unless --exit-code asks for the
task's. On a terminal, what a program overwrites with \r is left out; --raw keeps it.`,
		Args: needID,
		RunE: func(cmd *cobra.Command, args []string) error { return u.logs(cmd, args[0], f) },
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.BoolVarP(&f.follow, "follow", "f", false, "go on to the end of the task")
	fs.BoolVar(&f.noFollow, "no-follow", false, "show what is there and return at once (the default)")
	fs.Uint32Var(&f.attempt, "attempt", 0, "only this attempt (default the newest; with -f all from there on)")
	fs.Int64VarP(&f.tail, "tail", "n", -1, "begin so many lines before the end of what is there")
	fs.BoolVar(&f.stdout, "stdout", false, "only stdout of a task submitted with --split")
	fs.BoolVar(&f.stderr, "stderr", false, "only stderr of a task submitted with --split")
	fs.BoolVar(&f.raw, "raw", false, "pass bytes on to a terminal as they are, with every \\r")
	fs.BoolVar(&f.exit, "exit-code", false, "with -f, exit with the task's code")
	fs.BoolVarP(&f.quiet, "quiet", "q", false, "with -f, do not say how the task ended")
	fs.BoolVar(&f.asJSON, "json", false, "print each piece as one JSON object in a line, its bytes in base64")
	cmd.MarkFlagsMutuallyExclusive("follow", "no-follow")
	cmd.MarkFlagsMutuallyExclusive("stdout", "stderr")
	cmd.MarkFlagsMutuallyExclusive("raw", "json")
	return cmd
}

func (f logFlags) request(id string) *millracev1.ReadLogsRequest {
	req := &millracev1.ReadLogsRequest{Id: id, Attempt: f.attempt}
	if f.tail >= 0 {
		req.TailLines = new(uint64(f.tail))
	}
	switch {
	case f.stdout:
		req.Stream = streamStdout
	case f.stderr:
		req.Stream = streamStderr
	}
	return req
}

// Streams of a piece of output; 0 is both in one.
const (
	streamStdout = 1
	streamStderr = 2
)

func (u *ui) logs(cmd *cobra.Command, id string, f logFlags) error {
	if f.exit && !f.follow {
		return errors.New("--exit-code needs -f: without it the task may not have ended")
	}
	c, err := u.connect()
	if err != nil {
		return err
	}
	defer c.Close()
	show := u.logWriter(f.raw)
	piece := show.piece
	if f.asJSON {
		piece = func(p *millracev1.ReadLogsResponse) error { return u.json(p) }
	}
	if !f.follow {
		err := c.Read(cmd.Context(), f.request(id), piece)
		show.flush()
		return err
	}
	err = c.Follow(cmd.Context(), f.request(id), piece)
	show.flush()
	if err != nil {
		return err
	}
	return u.afterLogs(cmd, c, id, f)
}

// afterLogs says how a task that was followed ended. One attempt of it may be over long before.
func (u *ui) afterLogs(cmd *cobra.Command, c *client.Client, id string, f logFlags) error {
	if f.attempt > 0 && !f.exit {
		t, err := c.Get(cmd.Context(), id)
		if err != nil || !client.Final(t.GetState()) {
			return err
		}
	}
	t, err := c.Wait(cmd.Context(), id, false)
	if err != nil {
		return err
	}
	if !f.quiet {
		u.say("%s", outcomeLine(t))
	}
	if code := exitCode(t); f.exit && code != 0 {
		return &exitError{code: code}
	}
	return nil
}

// logWriter writes output where it belongs.
type logWriter struct {
	out, err io.Writer
}

func (u *ui) logWriter(raw bool) *logWriter {
	w := &logWriter{out: u.out, err: u.err}
	if !raw && isTerminal(u.out) {
		w.out = &folder{w: u.out}
	}
	if !raw && isTerminal(u.err) {
		w.err = &folder{w: u.err}
	}
	return w
}

// piece passes on the bytes of a piece, stderr to stderr.
func (w *logWriter) piece(p *millracev1.ReadLogsResponse) error {
	if len(p.GetData()) == 0 {
		return nil
	}
	to := w.out
	if p.GetStream() == streamStderr {
		to = w.err
	}
	_, err := to.Write(p.GetData())
	return err
}

// flush writes what a folder holds back.
func (w *logWriter) flush() {
	for _, to := range []io.Writer{w.out, w.err} {
		if f, ok := to.(*folder); ok {
			_ = f.flush()
		}
	}
}
