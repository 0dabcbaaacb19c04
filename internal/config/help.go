package config

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strings"
	"text/tabwriter"
)

// Var describes one variable.
type Var struct {
	Name    string // with prefix: MILLRACE_REDIS_URL
	Type    string // for people: text, secret, whole number, duration, ...
	Default string // as it would be written, empty for none
	Help    string // one line on its meaning
	Secret  bool
}

// Vars lists the variables of config structs (or pointers to them), in the
// order of their fields; one that several structs have comes once.
func Vars(cfgs ...any) []Var {
	var vars []Var
	for _, cfg := range cfgs {
		t := reflect.TypeOf(cfg)
		if t.Kind() == reflect.Pointer {
			t = t.Elem()
		}
		vars = appendVars(vars, t, Prefix)
	}
	return vars
}

func appendVars(vars []Var, t reflect.Type, prefix string) []Var {
	for field := range t.Fields() {
		switch {
		case isHidden(field):
		case isGroup(field):
			vars = appendVars(vars, field.Type, prefix+field.Tag.Get("envPrefix"))
		case isVariable(field):
			v := describe(field, prefix)
			if !slices.ContainsFunc(vars, func(known Var) bool { return known.Name == v.Name }) {
				vars = append(vars, v)
			}
		}
	}
	return vars
}

func describe(field reflect.StructField, prefix string) Var {
	name, _, _ := strings.Cut(field.Tag.Get("env"), ",")
	return Var{
		Name:    prefix + name,
		Type:    typeName(field),
		Default: field.Tag.Get("envDefault"),
		Help:    field.Tag.Get("help"),
		Secret:  isSecret(field),
	}
}

func isSecret(field reflect.StructField) bool {
	return field.Tag.Get("secret") == "true" || field.Type == reflect.TypeFor[Secret]()
}

func typeName(field reflect.StructField) string {
	if isSecret(field) {
		return "secret"
	}
	return kindName(field.Type)
}

func kindName(t reflect.Type) string {
	switch {
	case t == durationType:
		return "duration"
	case t.Kind() == reflect.Bool:
		return "true or false"
	case t.PkgPath() == "" && t.Kind() >= reflect.Int && t.Kind() <= reflect.Uint64:
		return "whole number"
	case t.Kind() == reflect.Float32 || t.Kind() == reflect.Float64:
		return "number"
	case t.Kind() == reflect.Slice:
		return "list of " + kindName(t.Elem())
	case t.Kind() == reflect.Pointer:
		return kindName(t.Elem())
	case t.Kind() == reflect.Map:
		return "list of key:value"
	}
	return "text" // strings, and types that read themselves from text
}

// Help writes the table of the variables of cfg (a config struct or a pointer
// to one), as -h shows it.
func Help(w io.Writer, cfg any) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "VARIABLE\tTYPE\tDEFAULT\tMEANING")
	for _, v := range Vars(cfg) {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\n", v.Name, v.Type, cmp.Or(v.Default, "-"), v.Help)
	}
	return tw.Flush()
}

// Markdown writes the same table for documentation, below a heading of level
// two. docs/configuration.md is made of these.
func Markdown(w io.Writer, title string, cfg any) error {
	var b strings.Builder
	fmt.Fprintf(&b, "## %s\n\n| variable | type | default | meaning |\n|---|---|---|---|\n", title)
	for _, v := range Vars(cfg) {
		def := ""
		if v.Default != "" {
			def = "`" + v.Default + "`"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", v.Name, v.Type, def, strings.ReplaceAll(v.Help, "|", `\|`))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// Unknown lists the variables in the environment that begin with the prefix
// but belong to none of the config structs: most often misspelt ones. Services
// that share an environment should pass the structs of all of them.
func Unknown(cfgs ...any) []string { return unknownIn(environ(), cfgs) }

func unknownIn(environment map[string]string, cfgs []any) []string {
	known := make(map[string]bool)
	for _, v := range Vars(cfgs...) {
		known[v.Name] = true
	}
	var unknown []string
	for _, name := range slices.Sorted(maps.Keys(environment)) {
		if strings.HasPrefix(name, Prefix) && !known[name] {
			unknown = append(unknown, name)
		}
	}
	return unknown
}
