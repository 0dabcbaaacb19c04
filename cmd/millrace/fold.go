package main

import (
	"bytes"
	"io"
)

// folder leaves out what a line overwrites within one piece: text up to a \r that is covered by the text behind it. A
// terminal would show the same in the end; it only has to be sent less. A line that is overwritten piece by piece is
// seen moving.
type folder struct {
	w   io.Writer
	buf []byte
	// col is where the last piece left the cursor, width how far its line reaches; both in bytes, which is what
	// programs that draw progress count in.
	col, width int
	heldCR     bool // a \r at the end was held back: it may belong to a \r\n
}

func (f *folder) Write(p []byte) (int, error) {
	text := p
	if f.heldCR {
		f.heldCR = false
		text = append([]byte{'\r'}, p...)
	}
	if n := len(text); n > 0 && text[n-1] == '\r' {
		text, f.heldCR = text[:n-1], true
	}
	f.buf = f.buf[:0]
	for len(text) > 0 {
		line, rest, whole := bytes.Cut(text, []byte{'\n'})
		ending := ""
		if whole {
			ending = "\n"
			if cut, ok := bytes.CutSuffix(line, []byte{'\r'}); ok {
				line, ending = cut, "\r\n"
			}
		}
		f.fold(line)
		f.buf = append(f.buf, ending...)
		if whole {
			f.col, f.width = 0, 0
		}
		text = rest
	}
	if _, err := f.w.Write(f.buf); err != nil {
		return 0, err
	}
	return len(p), nil
}

// fold appends a line, or the rest of one, without what it overwrites itself.
func (f *folder) fold(line []byte) {
	segments := bytes.Split(line, []byte{'\r'})
	// Escape sequences move the cursor by more or less than they are long: such lines are left alone.
	plain := bytes.IndexByte(line, 0x1b) < 0
	from := 0
	for i, reach := 0, f.width; i < len(segments); i++ {
		if i > 0 && len(segments[i]) > 0 && len(segments[i]) >= reach && plain {
			from = i
		}
		if i == 0 {
			reach = max(reach, f.col+len(segments[0]))
		} else {
			reach = max(reach, len(segments[i]))
		}
	}
	if from > 0 && f.col > 0 {
		f.buf = append(f.buf, '\r')
	}
	if from > 0 {
		f.col, f.width = 0, 0
	}
	for i, s := range segments[from:] {
		if i > 0 {
			f.buf = append(f.buf, '\r')
			f.col = 0
		}
		f.buf = append(f.buf, s...)
		f.col += len(s)
		f.width = max(f.width, f.col)
	}
}

// flush writes what was held back.
func (f *folder) flush() error {
	if !f.heldCR {
		return nil
	}
	f.heldCR = false
	_, err := f.w.Write([]byte{'\r'})
	return err
}
