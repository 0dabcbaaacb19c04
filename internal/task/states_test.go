package task

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var askNames = []string{"same attempt", "same owner", "no cancel mark", "cancel mark", "owner dead or lease late", "entry was pending"}

var effectNames = []string{
	"drop entry", "leave `delayed`", "leave `running`", "next attempt", "count failure", "count loss", "take owner",
	"mark cancel", "add entry", "into `delayed`", "into `running`", "add result", "add dead letter", "keep end",
}

func bitNames(bits uint32, names []string) string {
	var out []string
	for i, n := range names {
		if bits&(1<<i) != 0 {
			out = append(out, n)
		}
	}
	return strings.Join(out, ", ")
}

func stateList(s []State) string {
	var out []string
	for _, x := range s {
		out = append(out, x.String())
	}
	return strings.Join(out, ", ")
}

// movesTable is the table of docs/states.md.
func movesTable() string {
	var b strings.Builder
	b.WriteString("| move | from | only if | to | with it |\n|---|---|---|---|---|\n")
	for _, r := range Table {
		to := r.To.String()
		if r.To == ToGiven {
			to = "one of " + stateList(r.Choice)
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", r.Move, stateList(r.From), bitNames(uint32(r.Asks), askNames), to, bitNames(uint32(r.Effects), effectNames))
	}
	return b.String()
}

// TestDocsShowTable holds docs/states.md to the table. When it fails, put what it prints between the two markers.
func TestDocsShowTable(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("../../docs/states.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(raw), "<!-- moves: begin -->\n")
	got, _, ok2 := strings.Cut(rest, "<!-- moves: end -->")
	if !ok || !ok2 {
		t.Fatal("docs/states.md has lost the markers of its table of moves")
	}
	if want := movesTable(); got != want {
		t.Errorf("docs/states.md (-have +want):\n%s\nthe table:\n%s", cmp.Diff(got, want), want)
	}
}

// TestTableKeepsTheBooks holds every row to what no row may break.
func TestTableKeepsTheBooks(t *testing.T) {
	t.Parallel()
	for _, r := range Table {
		name := fmt.Sprintf("%s from %s", r.Move, stateList(r.From))
		targets := []State{r.To}
		if r.To == ToGiven {
			targets = r.Choice
		}
		for _, to := range targets {
			in := Input{To: to}
			if to.Final() != r.Does(AddResult, in) {
				t.Errorf("%s to %s: every final state gets a result, and nothing else does", name, to)
			}
			if (to == Delayed) != r.Does(AddDelayed, in) || (to == Queued) != r.Does(AddEntry, in) || (to == Running && r.Move != Cancel) != r.Does(AddRunning, in) {
				t.Errorf("%s to %s: not put where its state says", name, to)
			}
			for _, from := range r.From {
				switch {
				case from.Final():
					t.Errorf("%s leaves a final state", name)
				case from == Running && to != Running && r.Effects&leave != leave:
					t.Errorf("%s to %s: leaves something of running behind", name, to)
				case from == Running && (to == Delayed || to == Queued) && (r.Asks&NoCancel == 0 || r.Effects&NextAttempt == 0):
					t.Errorf("%s to %s: ignores a cancel mark, or would give an attempt twice", name, to)
				case from == Delayed && to != Delayed && !r.Does(DropDelayed, in):
					t.Errorf("%s to %s: stays in `delayed`", name, to)
				}
			}
		}
		if r.Effects&CountLoss != 0 && r.Effects&CountFailure != 0 {
			t.Errorf("%s: a loss is no failure", name)
		}
	}
}
