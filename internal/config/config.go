// Package config reads the settings of a service from the environment. It
// reports every problem at once, in words for the person who set the variable,
// and prints the table of settings for -h and for docs/configuration.md from
// the same struct tags.
//
// A service declares a struct that embeds the shared parts ([Redis], [Timing],
// [Ops], [Auth], [Log]) beside fields of its own:
//
//	type Config struct {
//		config.Redis
//		config.Timing
//		Slots int `env:"SLOTS" envDefault:"4" help:"tasks to run at once"`
//	}
//
// Tags: env is the variable's name without the prefix MILLRACE_ (with the
// options of caarlos0/env, such as ",file"), envDefault its default, help one
// line on its meaning, secret:"true" keeps its value out of messages.
//
// The package reads nothing but the environment, and knows no service.
package config

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"strings"

	"github.com/caarlos0/env/v11"
)

// Prefix begins the name of every variable.
const Prefix = "MILLRACE_"

// validator is what a config struct, or a struct inside one, may have.
type validator interface{ Validate() error }

// Load fills cfg, which must point to a struct, from the environment and its
// defaults. It then calls Validate on every struct inside cfg that has such a
// method, and on cfg itself.
//
// All problems come back as one error (errors.Join), each naming its variable.
// A variable that is set but empty counts as not set. A value that cannot be
// read is replaced by its default while the rest is checked.
func Load[T any](cfg *T) error { return loadFrom(cfg, environ()) }

func environ() map[string]string { return env.ToMap(os.Environ()) }

func loadFrom(cfg any, environment map[string]string) error {
	root := reflect.ValueOf(cfg)
	if root.Kind() != reflect.Pointer || root.Elem().Kind() != reflect.Struct {
		return fmt.Errorf("config.Load needs a pointer to a struct, got %T", cfg)
	}
	l := loader{environment: environment}
	l.load(root.Elem(), Prefix)
	return errors.Join(l.problems...)
}

// loader collects the problems of one Load.
type loader struct {
	environment map[string]string
	problems    []error
}

// load reads the fields of struct v, depth first, and validates it.
func (l *loader) load(v reflect.Value, prefix string) {
	unread := false
	for i := range v.NumField() {
		field, value := v.Type().Field(i), v.Field(i)
		switch {
		case isHidden(field):
		case isGroup(field):
			l.load(value, prefix+field.Tag.Get("envPrefix"))
		case isVariable(field):
			if err := l.read(value, field, prefix); err != nil {
				l.add(err)
				unread = true
			}
		}
	}
	if unread {
		return // its checks would blame the default
	}
	if !v.Addr().CanInterface() {
		return // an embedded struct of an unexported type: its owner checks it
	}
	if val, ok := reflect.TypeAssert[validator](v.Addr()); ok {
		l.add(val.Validate())
	}
}

// add appends err, taken apart when it joins several. A problem that is known
// already is dropped: the method of an embedded struct is also a method of the
// struct around it, so Validate may run twice.
func (l *loader) add(err error) {
	if err == nil {
		return
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, e := range joined.Unwrap() {
			l.add(e)
		}
		return
	}
	for _, known := range l.problems {
		if known.Error() == err.Error() {
			return
		}
	}
	l.problems = append(l.problems, err)
}

// read sets one field. Each is handed to the env package alone, in a struct
// made for it, because the errors of that package name the Go field and not
// the variable.
func (l *loader) read(value reflect.Value, field reflect.StructField, prefix string) error {
	err := parseField(value, field, prefix, l.environment)
	if err == nil {
		return nil
	}
	name, _, _ := strings.Cut(field.Tag.Get("env"), ",")
	name = prefix + name
	if parseField(value, field, prefix, map[string]string{}) != nil {
		value.SetZero() // required, and so without a default
	}
	return explain(name, l.environment[name], isSecret(field), err)
}

func parseField(value reflect.Value, field reflect.StructField, prefix string, environment map[string]string) error {
	single := reflect.New(reflect.StructOf([]reflect.StructField{{
		Name: field.Name, Type: field.Type, Tag: field.Tag,
	}}))
	single.Elem().Field(0).Set(value)
	err := env.ParseWithOptions(single.Interface(), env.Options{
		Prefix: prefix, Environment: environment, FuncMap: parsers(),
	})
	if err != nil {
		return err
	}
	value.Set(single.Elem().Field(0))
	return nil
}

// explain turns the error of the env package into one for the person who set
// the variable.
func explain(name, value string, secret bool, err error) error {
	_, unset := errors.AsType[env.VarIsNotSetError](err)
	_, empty := errors.AsType[env.EmptyVarError](err)
	if unset || empty {
		return fmt.Errorf("%s is not set, and has no default", name)
	}
	if secret {
		return fmt.Errorf("%s cannot be read (its value is a secret and not shown)", name)
	}
	if parse, ok := errors.AsType[env.ParseError](err); ok {
		return fmt.Errorf("%s=%s: %w", name, RedactURL(value), plain(parse.Type, parse.Err))
	}
	if aggregate, ok := errors.AsType[env.AggregateError](err); ok && len(aggregate.Errors) == 1 {
		err = aggregate.Errors[0]
	}
	return fmt.Errorf("%s: %w", name, err)
}

// plain replaces the wording of strconv.
func plain(t reflect.Type, err error) error {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch {
	case t == durationType:
		return err // from ParseDuration, made for people
	case t == reflect.TypeFor[slog.Level]():
		return errors.New("must be debug, info, warn or error")
	case t.Kind() == reflect.Bool:
		return errors.New("not a yes or no; write true or false")
	case t.Kind() >= reflect.Int && t.Kind() <= reflect.Uint64:
		return errors.New("not a whole number, or out of range")
	case t.Kind() == reflect.Float32 || t.Kind() == reflect.Float64:
		return errors.New("not a number")
	}
	return err
}

// isHidden says whether reflection cannot set the field. The fields of an
// embedded struct it can set, even when the struct's type is unexported.
func isHidden(field reflect.StructField) bool { return !field.IsExported() && !field.Anonymous }

// isGroup says whether a field is a struct whose fields are variables.
func isGroup(field reflect.StructField) bool {
	return field.Type.Kind() == reflect.Struct && field.Tag.Get("env") == ""
}

func isVariable(field reflect.StructField) bool {
	name, _, _ := strings.Cut(field.Tag.Get("env"), ",")
	return name != "" && name != "-"
}
