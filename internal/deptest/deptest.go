// Package deptest holds the architecture of the module to account: which
// package may import which, and that each says in a comment what it is for.
// The rules are code here and run as tests of this package over the whole
// tree; nothing else imports it.
package deptest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Module is the path that the module's own packages begin with.
const Module = "github.com/millrace/millrace"

// Package is what the rules need to know of a package.
type Package struct {
	Dir     string   // relative to the module's root, with slashes: internal/store
	Imports []Import // of all its files, tests included
	Doc     string   // the package comment
	Name    string   // from the package clause
	Checked bool     // false when it has only generated or test files, which need no package comment
}

// Import is one import of one file.
type Import struct {
	File string // base name
	Path string
}

// Test says whether a test file imports it.
func (i Import) Test() bool { return strings.HasSuffix(i.File, "_test.go") }

// Load reads the packages of the module at root. It skips what the go command
// skips, and modules inside the module.
func Load(root string) ([]Package, error) {
	byDir := make(map[string]*Package)
	var order []string
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if file != root && skipped(file, d.Name()) {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(file, ".go") || strings.HasPrefix(d.Name(), "_") || strings.HasPrefix(d.Name(), ".") {
			return nil
		}
		rel, err := filepath.Rel(root, filepath.Dir(file))
		if err != nil {
			return err
		}
		dir := filepath.ToSlash(rel)
		p := byDir[dir]
		if p == nil {
			p = &Package{Dir: dir}
			byDir[dir] = p
			order = append(order, dir)
		}
		return p.add(file)
	})
	if err != nil {
		return nil, err
	}
	packages := make([]Package, 0, len(order))
	for _, dir := range order {
		packages = append(packages, *byDir[dir])
	}
	return packages, nil
}

func skipped(dir, name string) bool {
	if strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_") || name == "testdata" || name == "vendor" {
		return true
	}
	_, err := os.Stat(filepath.Join(dir, "go.mod"))
	return err == nil
}

// add reads one file into p.
func (p *Package) add(file string) error {
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly|parser.ParseComments)
	if err != nil {
		return err
	}
	name := filepath.Base(file)
	for _, spec := range f.Imports {
		imported, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return fmt.Errorf("%s: import %s: %w", file, spec.Path.Value, err)
		}
		p.Imports = append(p.Imports, Import{File: name, Path: imported})
	}
	if strings.HasSuffix(name, "_test.go") || ast.IsGenerated(f) {
		return nil
	}
	p.Checked, p.Name = true, f.Name.Name
	if f.Doc != nil {
		p.Doc += f.Doc.Text()
	}
	return nil
}

// services are the four that meet in Redis and in proto only.
var services = []string{"dispatcher", "agent", "reaper", "logsink"}

// CheckImports returns a line for every import that breaks a rule.
func CheckImports(packages []Package) []string {
	var problems []string
	for _, p := range packages {
		for _, i := range p.Imports {
			for _, why := range forbidden(p.Dir, i) {
				problems = append(problems, fmt.Sprintf("%s imports %s: %s", path.Join(p.Dir, i.File), i.Path, why))
			}
		}
	}
	return problems
}

// forbidden returns why the package in dir must not have an import, if so.
func forbidden(dir string, i Import) []string {
	if target, ours := strings.CutPrefix(i.Path, Module+"/"); ours {
		return forbiddenOwn(dir, target, i.Test())
	}
	var why []string
	if strings.HasPrefix(i.Path, "github.com/redis/go-redis/") && !mayUseRedis(dir, i.Test()) {
		why = append(why, "only internal/store talks to Redis, so that every key, script and retry is in one place")
	}
	if within(dir, "internal/task") && !i.Test() && hasEffects(i.Path) {
		why = append(why, "internal/task is the domain alone, without I/O, so that models can run it")
	}
	return why
}

func mayUseRedis(dir string, test bool) bool {
	return test || within(dir, "internal/store") || testSupport(dir) ||
		within(dir, "examples") || within(dir, "bench") || within(dir, "internal/e2e")
}

func hasEffects(imported string) bool {
	return within(imported, "os") || within(imported, "net") || imported == "syscall"
}

// forbiddenOwn judges an import of a package of ours, given by its directory.
func forbiddenOwn(dir, target string, test bool) []string {
	var why []string
	from, to := layer(dir), layer(target)
	switch {
	case within(target, "cmd") && !within(dir, "cmd"):
		why = append(why, "cmd holds nothing that another package could want; move what is shared to internal")
	case from == "proto" && to != "proto":
		why = append(why, "proto is at the bottom and imports nothing of ours")
	case from == "internal" && to == "service" && !within(dir, "internal/e2e"):
		why = append(why, "imports point one way: cmd, then the services, then internal, then proto")
	case from == "service" && to == "service" && first(dir) != first(target):
		why = append(why, "the services never import each other; they meet in Redis and in proto")
	case from == "service" && to == "program", from == "internal" && to == "program":
		why = append(why, "examples, bench and scripts use the product, not the other way round")
	}
	if testSupport(target) && !test && !testSupport(dir) && !within(dir, "internal/e2e") && !within(dir, "bench") {
		why = append(why, first(strings.TrimPrefix(target, "internal/"))+" is for tests only")
	}
	return why
}

// testSupport tells the packages that only tests use.
func testSupport(dir string) bool {
	return within(dir, "internal/redistest") || within(dir, "internal/storetest") || within(dir, "internal/apitest")
}

// layer says where a directory stands.
func layer(dir string) string {
	switch top := first(dir); {
	case top == "proto", top == "internal":
		return top
	case slices.Contains(services, top):
		return "service"
	default: // cmd, examples, bench, scripts
		return "program"
	}
}

func first(dir string) string {
	top, _, _ := strings.Cut(dir, "/")
	return top
}

// within says whether a slash-separated path is root or below it.
func within(p, root string) bool {
	return p == root || strings.HasPrefix(p, root+"/")
}

// CheckComments returns a line for every package without a package comment,
// or with one that does not begin in the usual way.
func CheckComments(packages []Package) []string {
	var problems []string
	for _, p := range packages {
		if !p.Checked {
			continue
		}
		want := "Package " + p.Name + " "
		if p.Name == "main" {
			want = "Command "
		}
		switch doc := strings.TrimSpace(p.Doc); {
		case doc == "":
			problems = append(problems, p.Dir+": no package comment: say what it does, who calls it, what it must not do")
		case !strings.HasPrefix(doc, want):
			problems = append(problems, fmt.Sprintf("%s: the package comment must begin with %q", p.Dir, want))
		}
	}
	return problems
}
