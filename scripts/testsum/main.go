// Command testsum makes the output of go test -json readable and counts it.
//
//	go test -json ./... | go run ./scripts/testsum -counts FILE
//
// It prints a line per package and, of tests that failed, the output. Lines
// that are not JSON pass through. With -counts it appends "passed failed
// skipped" as a line to FILE. It exits 1 when anything failed.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
)

func main() {
	counts := flag.String("counts", "", "append the numbers of passed, failed and skipped tests to this file")
	flag.Parse()
	total, err := summarize(os.Stdin, os.Stdout)
	if err == nil && *counts != "" {
		err = appendLine(*counts, fmt.Sprintln(total.passed, total.failed, total.skipped))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
		os.Exit(2)
	}
	if total.failed > 0 {
		os.Exit(1)
	}
}

// event is a line of go test -json; see go doc test2json.
type event struct {
	Action     string
	Package    string
	ImportPath string
	Test       string
	Elapsed    float64
	Output     string
}

type totals struct{ passed, failed, skipped int }

// packageRun is what is known of a package whose tests are running.
type packageRun struct {
	totals

	output  map[string]*strings.Builder // by test, "" for the package's own
	running []string                    // tests that have not ended, in order
}

// summarize reads events until the end of r and writes the readable form to w.
func summarize(r io.Reader, w io.Writer) (totals, error) {
	var total totals
	runs := make(map[string]*packageRun)
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			var e event
			if json.Unmarshal([]byte(line), &e) != nil || e.Action == "" {
				fmt.Fprint(w, line)
			} else {
				handle(e, runs, &total, w)
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return total, err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(runs)) {
		run := runs[name]
		for _, test := range run.running {
			run.print(test, w)
		}
		fmt.Fprintf(w, "FAIL\t%s\tno result: go test was stopped\n", name)
		total.passed += run.passed
		total.failed += run.failed + max(1, len(run.running))
		total.skipped += run.skipped
	}
	fmt.Fprintf(w, "tests: %d passed, %d failed, %d skipped\n", total.passed, total.failed, total.skipped)
	return total, nil
}

func handle(e event, runs map[string]*packageRun, total *totals, w io.Writer) {
	if e.Action == "build-output" {
		fmt.Fprint(w, e.Output)
	}
	if e.Package == "" {
		return
	}
	run := runs[e.Package]
	if run == nil {
		run = &packageRun{output: make(map[string]*strings.Builder)}
		runs[e.Package] = run
	}
	if e.Test != "" {
		run.test(e, w)
		return
	}
	switch e.Action {
	case "output":
		run.write("", e.Output)
	case "pass", "fail", "skip":
		run.end(e, w)
		total.passed += run.passed
		total.failed += run.failed
		total.skipped += run.skipped
		delete(runs, e.Package)
	}
}

// test handles an event of a single test.
func (p *packageRun) test(e event, w io.Writer) {
	switch e.Action {
	case "run":
		p.running = append(p.running, e.Test)
	case "output":
		p.write(e.Test, e.Output)
	case "pass", "skip", "fail":
		p.running = slices.DeleteFunc(p.running, func(name string) bool { return name == e.Test })
		switch e.Action {
		case "pass":
			p.passed++
		case "skip":
			p.skipped++
		default:
			p.failed++
			p.print(e.Test, w)
		}
		delete(p.output, e.Test)
	}
}

// end handles the end of a package.
func (p *packageRun) end(e event, w io.Writer) {
	if e.Action != "fail" {
		if e.Action == "pass" {
			fmt.Fprintf(w, "ok\t%s\t%.1fs\n", e.Package, e.Elapsed)
		}
		return
	}
	for _, name := range p.running { // a panic or the time limit ended them
		p.print(name, w)
	}
	p.failed += len(p.running)
	p.print("", w)
	if p.failed == 0 { // a build failure, or TestMain
		p.failed = 1
	}
	fmt.Fprintf(w, "FAIL\t%s\t%.1fs\n", e.Package, e.Elapsed)
}

func (p *packageRun) write(test, output string) {
	b := p.output[test]
	if b == nil {
		b = &strings.Builder{}
		p.output[test] = b
	}
	b.WriteString(output)
}

func (p *packageRun) print(test string, w io.Writer) {
	if b := p.output[test]; b != nil {
		fmt.Fprint(w, b.String())
	}
}

func appendLine(path, line string) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	if _, err := f.WriteString(line); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}
