package protojs

import (
	"encoding/base64"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/durationpb"
)

// formatDuration writes a valid duration as Go does, without the parts that are zero at the end: "2m", not "2m0s".
// What does not fit Go's range of 292 years is written in seconds.
func formatDuration(d *durationpb.Duration) string {
	if s := d.GetSeconds(); s > maxDurationSeconds || s < -maxDurationSeconds {
		sign, nanos := "", int64(d.GetNanos())
		if s < 0 {
			sign, s, nanos = "-", -s, -nanos
		}
		if nanos == 0 {
			return fmt.Sprintf("%s%ds", sign, s)
		}
		return strings.TrimRight(fmt.Sprintf("%s%d.%09d", sign, s, nanos), "0") + "s"
	}
	s := d.AsDuration().String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// maxDurationSeconds keeps a safe distance to the range of time.Duration.
const maxDurationSeconds = math.MaxInt64/int64(time.Second) - 1

// parseDuration reads Go's form, and plain seconds beyond Go's range.
func parseDuration(s string) (*durationpb.Duration, bool) {
	if d, err := time.ParseDuration(s); err == nil {
		return durationpb.New(d), true
	}
	num, ok := strings.CutSuffix(s, "s")
	if !ok {
		return nil, false
	}
	num, negative := strings.CutPrefix(num, "-")
	whole, fraction, _ := strings.Cut(num, ".")
	secs, err := strconv.ParseUint(whole, 10, 40)
	if err != nil || len(fraction) > 9 {
		return nil, false
	}
	nanos, err := strconv.ParseUint(fraction+strings.Repeat("0", 9-len(fraction)), 10, 32)
	if err != nil {
		return nil, false
	}
	d := &durationpb.Duration{Seconds: int64(secs), Nanos: int32(nanos)} //nolint:gosec // 40 bits and nine digits fit
	if negative {
		d.Seconds, d.Nanos = -d.Seconds, -d.Nanos
	}
	return d, d.IsValid()
}

// decodeBase64 reads the standard and the URL alphabet, with or without padding.
func decodeBase64(s string) ([]byte, bool) {
	s = strings.TrimRight(s, "=")
	s = strings.NewReplacer("-", "+", "_", "/").Replace(s)
	b, err := base64.RawStdEncoding.DecodeString(s)
	return b, err == nil
}

// loneSurrogate finds an escape like \ud800 without its other half, which the standard decoder would turn into U+FFFD
// without a word. It returns the offset, or -1. The text must be valid JSON.
func loneSurrogate(data []byte) int {
	for i := 0; i < len(data); i++ {
		if data[i] != '\\' {
			continue
		}
		unit, ok := unicodeEscape(data[i:])
		switch {
		case !ok:
			i++ // a short escape; its second byte may be a backslash
		case unit < 0xd800 || unit > 0xdfff:
			i += 5
		case unit > 0xdbff:
			return i
		default:
			low, ok := unicodeEscape(data[i+6:])
			if !ok || low < 0xdc00 || low > 0xdfff {
				return i
			}
			i += 11
		}
	}
	return -1
}

// unicodeEscape reads \uXXXX at the start of b.
func unicodeEscape(b []byte) (uint64, bool) {
	if len(b) < 6 || b[0] != '\\' || b[1] != 'u' {
		return 0, false
	}
	n, err := strconv.ParseUint(string(b[2:6]), 16, 16)
	return n, err == nil
}

// shorten cuts a value for a message between two characters.
func shorten(s string) string {
	const most = 40
	if len(s) <= most {
		return s
	}
	cut := most
	for cut > most-utf8.UTFMax && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + "…"
}

// plainName is true for what can stand in a path without quotes.
func plainName(s string) bool {
	return s != "" && len(s) <= 40 && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") == ""
}
