package config

import (
	"crypto/subtle"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"regexp"
)

// Secret is a string that prints as "[redacted]" however it is formatted,
// logged or encoded. [Secret.Reveal] gives the value.
type Secret string

const redacted = "[redacted]"

// Reveal returns the value.
func (s Secret) Reveal() string { return string(s) }

// Equal compares with a value from outside in constant time. It is false when
// the secret is empty, so that no token set never means any token will do.
func (s Secret) Equal(given string) bool {
	return s != "" && subtle.ConstantTimeCompare([]byte(s), []byte(given)) == 1
}

// String returns a placeholder, or nothing for an empty secret.
func (s Secret) String() string {
	if s == "" {
		return ""
	}
	return redacted
}

// Format keeps the value out of %q, %x and %#v too.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(s.String())) }

// LogValue keeps the value out of logs.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// MarshalText keeps the value out of JSON.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// passwordInURL reaches to the last @, because a mistyped password may hold
// any character: showing too little does no harm.
var passwordInURL = regexp.MustCompile(`(?s)(://[^/?#:@]*):.*@`)

// RedactURL returns raw with the password, if it holds one, replaced by xxxxx.
// It works on every string, so that a mistyped URL can be shown too.
func RedactURL(raw string) string {
	if u, err := url.Parse(raw); err == nil && u.User != nil {
		if _, has := u.User.Password(); !has {
			return raw
		}
	}
	return passwordInURL.ReplaceAllString(raw, "$1:xxxxx@")
}

// CheckListen refuses a listen address that other machines can reach when
// there is no token. Name is the variable that holds addr, for the message. An
// empty addr means "do not listen" and is fine.
//
// Loopback means an address in 127.0.0.0/8 or ::1, or the name localhost. Any
// other name is taken to be reachable, because what it resolves to can change.
func CheckListen(name, addr string, token Secret) error {
	if addr == "" {
		return nil
	}
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("%s=%s: not a listen address; write 127.0.0.1:8080, or :8080 for all interfaces", name, addr)
	}
	if token != "" || isLoopback(host) {
		return nil
	}
	return fmt.Errorf("%s=%s: other machines can reach this address, and there is no token; set %sTOKEN, or listen on 127.0.0.1",
		name, addr, Prefix)
}

func isLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}
