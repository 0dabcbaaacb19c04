// Command millrace is everything in one binary: the services (dispatcher, agent, reaper, logsink, and dev, which is
// all of them), and the client verbs that talk to a dispatcher's API.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
)

func main() {
	runGuard() // must stay first: a guard is this binary again, and has to be small and quick
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run executes a command line and returns the exit code.
func run(args []string, in io.Reader, out, errOut io.Writer) int {
	root := rootCmd(&ui{in: in, out: out, err: errOut})
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(errOut)
	cmd, err := root.ExecuteC()
	if err == nil {
		return 0
	}
	exit := &exitError{}
	if !errors.As(err, &exit) {
		exit = &exitError{code: codeFault, err: err}
	}
	if exit.err != nil {
		verb := strings.TrimPrefix(strings.TrimPrefix(cmd.CommandPath(), "millrace"), " ")
		fmt.Fprintln(errOut, complaint(verb, exit.err))
	}
	return exit.code
}

// complaint is an error as a line, "millrace: what: next step"; further lines of it are set in.
func complaint(verb string, err error) string {
	text := strings.ReplaceAll(strings.TrimSpace(err.Error()), "\n", "\n  ")
	if verb == "" {
		return "millrace: " + text
	}
	return "millrace: " + verb + ": " + text
}

// exitError ends the program with a code; a nil err says that all was said.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

func rootCmd(u *ui) *cobra.Command {
	root := &cobra.Command{
		Use:   "millrace",
		Short: "Run commands on a fleet, with nothing to operate but Redis",
		Long: `Run commands and Go handlers on a fleet, with nothing to operate but Redis.

Try it:  millrace dev -- echo hello      everything in one process, one task
         millrace dev                    the same, and stay; then in another terminal:
         millrace run -- echo hello

Client verbs speak to the dispatcher at MILLRACE_SERVER (` + "http://127.0.0.1:8080" + ` unless set) and show it
MILLRACE_TOKEN. Services are configured by MILLRACE_* variables only; their -h lists them.

Exit codes of run, submit --wait and wait: the task's own; 128+n when signal n ended it; 124 when it ran out of
time or expired before it started; 125 when millrace could not do it; 126 or 127 when the command could not be
executed or was not found; 130 when it was cancelled.`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          noSuchVerb,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w: `%s --help` lists the flags", err, cmd.CommandPath())
	})
	root.AddGroup(&cobra.Group{ID: groupTasks, Title: "Tasks:"}, &cobra.Group{ID: groupFleet, Title: "Fleet:"},
		&cobra.Group{ID: groupServices, Title: "Services:"})
	root.AddCommand(submitCmd(u), runCmd(u), waitCmd(u), logsCmd(u), psCmd(u), showCmd(u), cancelCmd(u), deadCmd(u))
	root.AddCommand(workersCmd(u), queuesCmd(u))
	services := []*cobra.Command{dispatcherCmd(), agentCmd(), reaperCmd(), logsinkCmd(), devCmd()}
	for _, c := range services {
		c.GroupID = groupServices
	}
	root.AddCommand(services...)
	root.AddCommand(versionCmd(u), healthcheckCmd(u), benchCmd(u), benchTermCmd())
	return root
}

// Groups of verbs in the help.
const (
	groupTasks    = "tasks"
	groupFleet    = "fleet"
	groupServices = "services"
)

func noSuchVerb(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	hint := "`millrace --help` lists the verbs"
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		hint = "did you mean `millrace " + near[0] + "`?"
	}
	return fmt.Errorf("there is no verb %q: %s", args[0], hint)
}
