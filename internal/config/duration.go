package config

import (
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/caarlos0/env/v11"
)

var durationType = reflect.TypeFor[time.Duration]()

// parsers are ours instead of the env package's.
func parsers() map[reflect.Type]env.ParserFunc {
	return map[reflect.Type]env.ParserFunc{
		durationType: func(s string) (any, error) { return ParseDuration(s) },
	}
}

// ParseDuration reads a duration as settings and flags give it: Go's format,
// with a unit, not negative. "0" needs no unit. A bare number is refused with
// the ways it may have been meant, and so is anything between 0 and a
// millisecond, which no setting of ours can mean.
func ParseDuration(s string) (time.Duration, error) {
	s = strings.TrimSpace(s)
	if s == "0" {
		return 0, nil
	}
	if _, err := strconv.ParseFloat(s, 64); err == nil {
		return 0, fmt.Errorf("the unit is missing; write %[1]ss for seconds or %[1]sms for milliseconds", s)
	}
	d, err := time.ParseDuration(s)
	switch {
	case err != nil:
		return 0, errors.New("not a duration; write for example 500ms, 30s, 2m or 1h30m")
	case d < 0:
		return 0, errors.New("is negative")
	case d > 0 && d < time.Millisecond:
		return 0, errors.New("is less than a millisecond; is the unit right?")
	}
	return d, nil
}

// checkDuration reports a duration that came in from Go code and that
// ParseDuration would have refused, or that is 0 where it must not be.
func checkDuration(name string, d time.Duration, zeroOK bool) error {
	switch {
	case d == 0 && zeroOK:
		return nil
	case d <= 0:
		return fmt.Errorf("%s=%v: must be more than 0", name, d)
	case d < time.Millisecond:
		return fmt.Errorf("%s=%v: is less than a millisecond; a unit seems to be missing", name, d)
	}
	return nil
}
