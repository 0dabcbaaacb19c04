package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSummarize(t *testing.T) {
	t.Parallel()
	const input = `make: a line of something else
{"Action":"start","Package":"a"}
{"Action":"run","Package":"a","Test":"TestGood"}
{"Action":"output","Package":"a","Test":"TestGood","Output":"good says\n"}
{"Action":"pass","Package":"a","Test":"TestGood","Elapsed":0.1}
{"Action":"run","Package":"a","Test":"TestSkip"}
{"Action":"skip","Package":"a","Test":"TestSkip"}
{"Action":"output","Package":"a","Output":"ok\n"}
{"Action":"pass","Package":"a","Elapsed":0.2}
{"Action":"run","Package":"b","Test":"TestBad"}
{"Action":"run","Package":"b","Test":"TestBad/sub"}
{"Action":"output","Package":"b","Test":"TestBad/sub","Output":"sub says\n"}
{"Action":"fail","Package":"b","Test":"TestBad/sub"}
{"Action":"output","Package":"b","Test":"TestBad","Output":"bad says\n"}
{"Action":"fail","Package":"b","Test":"TestBad"}
{"Action":"fail","Package":"b","Elapsed":0.3}
{"Action":"run","Package":"c","Test":"TestHangs"}
{"Action":"output","Package":"c","Test":"TestHangs","Output":"panic: test timed out\n"}
{"Action":"fail","Package":"c","Elapsed":9}
{"ImportPath":"d","Action":"build-output","Output":"d.go:1: does not compile\n"}
{"ImportPath":"d","Action":"build-fail"}
{"Action":"fail","Package":"d","FailedBuild":"d"}
{"Action":"skip","Package":"e"}
{"Action":"run","Package":"f","Test":"TestDone"}
{"Action":"pass","Package":"f","Test":"TestDone"}
{"Action":"run","Package":"f","Test":"TestStopped"}
`
	var out strings.Builder
	got, err := summarize(strings.NewReader(input), &out)
	if err != nil {
		t.Fatal(err)
	}
	// b: the test and its subtest; c: the one that hung; d: the build; f: no end.
	if want := (totals{passed: 2, failed: 5, skipped: 1}); got != want {
		t.Errorf("totals = %+v, want %+v", got, want)
	}
	for _, want := range []string{
		"make: a line of something else\n", "ok\ta\t0.2s\n", "sub says\n", "bad says\n", "FAIL\tb\t0.3s\n",
		"panic: test timed out\n", "d.go:1: does not compile\n", "FAIL\td", "FAIL\tf\tno result", "tests: 2 passed, 5 failed, 1 skipped\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("output lacks %q:\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "good says") {
		t.Errorf("the output of a good test shows:\n%s", out.String())
	}
}

func TestAppendLine(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "counts")
	for _, line := range []string{"1 2 3\n", "4 5 6\n"} {
		if err := appendLine(path, line); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil || string(got) != "1 2 3\n4 5 6\n" {
		t.Errorf("file = %q, %v", got, err)
	}
}
