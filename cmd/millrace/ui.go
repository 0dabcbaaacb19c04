package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"google.golang.org/protobuf/proto"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/protojs"
)

// ui is where a command reads and writes.
type ui struct {
	in  io.Reader
	out io.Writer
	err io.Writer
}

// say writes a line for people beside the output.
func (u *ui) say(format string, args ...any) {
	fmt.Fprintf(u.err, "millrace: "+format+"\n", args...)
}

// connect prepares a client as the environment says.
func (u *ui) connect() (*client.Client, error) {
	return client.New(client.Config{
		Server: os.Getenv("MILLRACE_SERVER"),
		Token:  config.Secret(os.Getenv("MILLRACE_TOKEN")),
		Notify: func(line string) { u.say("%s", line) },
	})
}

// json writes one message as one line, with every key present.
func (u *ui) json(m proto.Message) error {
	b, err := protojs.MarshalOptions{Full: true}.Marshal(m)
	if err != nil {
		return err
	}
	_, err = u.out.Write(append(b, '\n'))
	return err
}

// plainJSON writes what is no message as one line.
func (u *ui) plainJSON(v any) error { return json.NewEncoder(u.out).Encode(v) }

// jsonList writes messages as one array, so that an empty list is valid JSON too.
func jsonList[M proto.Message](u *ui, list []M) error {
	var b strings.Builder
	b.WriteString("[")
	for i, m := range list {
		if i > 0 {
			b.WriteString(",")
		}
		one, err := protojs.MarshalOptions{Full: true}.Marshal(m)
		if err != nil {
			return err
		}
		b.WriteString("\n")
		b.Write(one)
	}
	if len(list) > 0 {
		b.WriteString("\n")
	}
	b.WriteString("]\n")
	_, err := io.WriteString(u.out, b.String())
	return err
}

// table writes rows in columns; cells are made harmless for a terminal.
func (u *ui) table(rows [][]string) error {
	w := tabwriter.NewWriter(u.out, 0, 8, 2, ' ', 0)
	for _, row := range rows {
		for i, cell := range row {
			row[i] = printable(cell)
			if row[i] == "" {
				row[i] = "-"
			}
		}
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	return w.Flush()
}

// printable replaces control characters: names and messages come from anybody, and a terminal obeys what it is sent.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || r == unicode.ReplacementChar {
			return '\uFFFD'
		}
		return r
	}, s)
}

// isTerminal reports whether w is a terminal, as far as that can be told without asking it.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	fi, err := f.Stat()
	return err == nil && fi.Mode()&os.ModeCharDevice != 0
}

// ago is a time span in at most two units.
func ago(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	default:
		return fmt.Sprintf("%dd%02dh", int(d.Hours())/24, int(d.Hours())%24)
	}
}
