package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestFold(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		pieces []string
		want   string
	}{
		"plain":              {[]string{"a\nb"}, "a\nb"},
		"progress":           {[]string{"1%\r10%\r100%\n"}, "100%\n"},
		"leading":            {[]string{"\r1%\r2%\ndone"}, "2%\ndone"},
		"shorter stays":      {[]string{"long text\rx\n"}, "long text\rx\n"},
		"dos line ends":      {[]string{"a\r\nb\r\n"}, "a\r\nb\r\n"},
		"split line end":     {[]string{"a\r", "\nb"}, "a\r\nb"},
		"split progress":     {[]string{"10%\r", "20%\r30%"}, "10%\r30%"},
		"over what is shown": {[]string{"shown", "more\rnew text!\r"}, "shown\rnew text!\r"},
		"not over it all":    {[]string{"shown", "more\rnew"}, "shownmore\rnew"},
		"escape sequences":   {[]string{"\x1b[1mab\rabcdefghij\n"}, "\x1b[1mab\rabcdefghij\n"},
		"empty":              {[]string{"", "\r", ""}, "\r"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			f := &folder{w: &out}
			for _, p := range c.pieces {
				if n, err := f.Write([]byte(p)); n != len(p) || err != nil {
					t.Fatalf("write: %d, %v", n, err)
				}
			}
			if err := f.flush(); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, out.String()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// screen is what a terminal without a width shows of a text.
func screen(text string) string {
	var lines []string
	line, col := []rune{}, 0
	for _, r := range text {
		switch r {
		case '\n':
			lines = append(lines, string(line))
			line, col = nil, 0
		case '\r':
			col = 0
		default:
			if col < len(line) {
				line[col] = r
			} else {
				line = append(line, r)
			}
			col++
		}
	}
	return strings.Join(append(lines, string(line)), "\n")
}

// However a text is cut into pieces, what is left of it looks the same in the end.
func TestFoldShowsTheSame(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		pieces := rapid.SliceOf(rapid.StringOf(rapid.RuneFrom([]rune("ab\r\n")))).Draw(t, "pieces")
		var out bytes.Buffer
		f := &folder{w: &out}
		for _, p := range pieces {
			if _, err := f.Write([]byte(p)); err != nil {
				t.Fatal(err)
			}
		}
		if err := f.flush(); err != nil {
			t.Fatal(err)
		}
		want, got := screen(strings.Join(pieces, "")), screen(out.String())
		if want != got {
			t.Fatalf("shows %q, want %q; wrote %q", got, want, out.String())
		}
	})
}
