package spec

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// What is allowed. Durations and counts far beyond any use are refused, because they are typing errors or attacks.
const (
	maxTitleBytes      = 256
	maxLabels          = 64
	maxLabelKeyBytes   = 128
	maxLabelValueBytes = 1 << 10
	maxHandlerBytes    = 128
	maxSpan            = 3650 * day // timeout, retention
	maxGrace           = day
	maxPause           = 30 * day
	maxRetries         = 1000
	maxFactor          = 100
	maxSlots           = 1024
	maxLogBytes        = 1 << 40
	firstYear          = 2000
	lastYear           = 2200
	day                = 24 * time.Hour
)

// Validate checks everything about a task that needs no look into Redis. The error lists every problem, a line each:
// the field, the value, what is allowed and what to do.
//
// A not_before in the past is fine, the task starts at once; an expires_at in the past is fine, the task ends as
// expired.
func Validate(t *millracev1.Task, lim Limits) error {
	if size, most := proto.Size(t), lim.taskBytes(); size > most {
		// Nothing else is worth reading in a task that size, and listing it could take long.
		return tooLarge(size, most)
	}
	v := &validator{}
	v.unknownFields(t.ProtoReflect(), "")
	v.identity(t)
	v.labels(t.GetLabels())
	v.work(t)
	v.times(t)
	v.retry(t.GetRetry())
	v.rest(t)
	for _, u := range unsupported {
		if u.asked(t) {
			v.add(u.path, "not supported by this version: %s", u.remedy)
		}
	}
	return errors.Join(v.problems...)
}

// validator collects problems.
type validator struct{ problems []error }

func (v *validator) add(path, format string, args ...any) {
	v.problems = append(v.problems, fmt.Errorf("%s: "+format, append([]any{path}, args...)...))
}

func (v *validator) identity(t *millracev1.Task) {
	if id := t.GetId(); id != "" && !ValidID(id) {
		v.add("id", "%s is not allowed: use 1 to 128 of A-Z a-z 0-9 . _ -, not starting with a dot, "+
			"or leave it out to get one", shorten(id))
	}
	if g := t.GetGroup(); g != "" && !ValidID(g) {
		v.add("group", "%s is not allowed: use 1 to 128 of A-Z a-z 0-9 . _ -, not starting with a dot", shorten(g))
	}
	if n := t.GetName(); len(n) > maxTitleBytes {
		v.add("name", "%s is too long: use at most %d bytes", shorten(n), maxTitleBytes)
	} else if hasControl(n) {
		v.add("name", "%s has a control character: use one line of plain text", shorten(n))
	}
	if q := t.GetQueue(); q != "" && !ValidQueue(q) {
		hint := "use 1 to 64 of a-z 0-9 _ -"
		if lower := strings.ToLower(q); ValidQueue(lower) {
			hint += fmt.Sprintf("; did you mean %q?", lower)
		}
		v.add("queue", "%s is not allowed: %s", shorten(q), hint)
	}
	switch t.GetPriority() {
	case "", PriorityHigh, PriorityNormal, PriorityLow:
	default:
		v.add("priority", "%s is unknown: use high, normal or low", shorten(t.GetPriority()))
	}
	if p := t.GetTraceparent(); p != "" && !validTraceparent(p) {
		v.add("traceparent", "%s is not a W3C trace context: want 00-<32 hex digits>-<16 hex digits>-<2 hex digits>, "+
			"or leave it out", shorten(p))
	}
}

func (v *validator) labels(labels map[string]string) {
	if len(labels) > maxLabels {
		v.add("labels", "%d labels are too many: use at most %d", len(labels), maxLabels)
		return
	}
	for _, k := range sortedKeys(labels) {
		value := labels[k]
		switch {
		case k == "":
			v.add("labels", "a label has no name: give it one or remove it")
		case len(k) > maxLabelKeyBytes:
			v.add("labels", "the name %s is too long: use at most %d bytes", shorten(k), maxLabelKeyBytes)
		case hasControl(k):
			v.add("labels", "the name %s has a control character: use plain text", shorten(k))
		case len(value) > maxLabelValueBytes:
			v.add("labels", "the value of %s has %d bytes: use at most %d", shorten(k), len(value), maxLabelValueBytes)
		case strings.ContainsRune(value, 0):
			v.add("labels", "the value of %s has a NUL byte: remove it", shorten(k))
		}
	}
}

func (v *validator) times(t *millracev1.Task) {
	v.duration("timeout", t.GetTimeout(), time.Millisecond, maxSpan, "; leave it out for no timeout")
	v.duration("grace", t.GetGrace(), 0, maxGrace, "")
	v.duration("retention", t.GetRetention(), time.Second, maxSpan, "")
	okBefore := v.moment("notBefore", t.GetNotBefore())
	okExpires := v.moment("expiresAt", t.GetExpiresAt())
	if okBefore && okExpires && !ExpiresAt(t).After(NotBefore(t)) {
		v.add("expiresAt", "%s is not after notBefore (%s): such a task could never start; set it later or leave one out",
			format(ExpiresAt(t)), format(NotBefore(t)))
	}
}

// duration checks a duration that may be absent.
func (v *validator) duration(path string, d *durationpb.Duration, least, most time.Duration, hint string) {
	if d == nil {
		return
	}
	if !d.IsValid() {
		v.add(path, "%d s and %d ns is not a duration: want %s to %s%s", d.GetSeconds(), d.GetNanos(), span(least), span(most), hint)
		return
	}
	if got := d.AsDuration(); got < least || got > most {
		v.add(path, "%s is out of range: want %s to %s%s", got, span(least), span(most), hint)
	}
}

// moment checks a time and tells whether it is there and right.
func (v *validator) moment(path string, ts *timestamppb.Timestamp) bool {
	if ts == nil {
		return false
	}
	if !ts.IsValid() {
		v.add(path, "%d s and %d ns since 1970 is not a time: want the years %d to %d", ts.GetSeconds(), ts.GetNanos(), firstYear, lastYear)
		return false
	}
	if year := ts.AsTime().Year(); year < firstYear || year > lastYear {
		v.add(path, "%s is out of range: want the years %d to %d", format(ts.AsTime()), firstYear, lastYear)
		return false
	}
	return true
}

func (v *validator) retry(r *millracev1.Retry) {
	if n := r.GetMaxAttempts(); n > maxRetries {
		v.add("retry.maxAttempts", "%d is too many: want 1 to %d", n, maxRetries)
	}
	if n := r.GetMaxLost(); n > maxRetries {
		v.add("retry.maxLost", "%d is too many: want 0 to %d", n, maxRetries)
	}
	b := r.GetBackoff()
	v.duration("retry.backoff.initial", b.GetInitial(), 0, maxPause, "")
	v.duration("retry.backoff.max", b.GetMax(), 0, maxPause, "")
	if b.GetInitial() != nil && b.GetMax() != nil && b.GetInitial().AsDuration() > b.GetMax().AsDuration() {
		v.add("retry.backoff.max", "%s is less than initial (%s): make it longer or leave it out",
			b.GetMax().AsDuration(), b.GetInitial().AsDuration())
	}
	if f := b.GetFactor(); math.IsNaN(f) || f != 0 && (f < 1 || f > maxFactor) {
		v.add("retry.backoff.factor", "%v is out of range: want 1 to %d", f, maxFactor)
	}
	if j := b.GetJitter(); math.IsNaN(j) || j < 0 || j > 1 {
		v.add("retry.backoff.jitter", "%v is out of range: want 0 to 1", j)
	}
	v.reasons("retry.retryOn", r.GetRetryOn())
	v.reasons("retry.noRetryOn", r.GetNoRetryOn())
}

// reasons allows only those that max_attempts can decide on. The others have rules of their own, and to take them
// here and not follow them would be a lie.
func (v *validator) reasons(path string, reasons []millracev1.Reason) {
	const allowed = "use exit, signal, oom, timeout, refused or internal"
	seen := map[millracev1.Reason]bool{}
	for _, r := range reasons {
		if seen[r] {
			continue
		}
		seen[r] = true
		switch r {
		case millracev1.Reason_REASON_EXIT, millracev1.Reason_REASON_SIGNAL, millracev1.Reason_REASON_OOM,
			millracev1.Reason_REASON_TIMEOUT, millracev1.Reason_REASON_REFUSED, millracev1.Reason_REASON_INTERNAL:
		case millracev1.Reason_REASON_WORKER_LOST:
			v.add(path, "worker_lost is decided by retry.maxLost (0 means never again): %s", allowed)
		case millracev1.Reason_REASON_PREEMPTED, millracev1.Reason_REASON_NEVER_STARTED:
			v.add(path, "%s is always followed by another attempt: %s", reasonWord(r), allowed)
		case millracev1.Reason_REASON_CANCELLED, millracev1.Reason_REASON_DEPENDENCY:
			v.add(path, "%s is never followed by another attempt: %s", reasonWord(r), allowed)
		default:
			v.add(path, "%s is no reason: %s", reasonWord(r), allowed)
		}
	}
}

func (v *validator) rest(t *millracev1.Task) {
	if n := t.GetResources().GetSlots(); n > maxSlots {
		v.add("resources.slots", "%d is too many: want 1 to %d", n, maxSlots)
	}
	if n := t.GetLog().GetLimitBytes(); n > maxLogBytes {
		v.add("log.limitBytes", "%d is too large: want at most %d, or leave it out for the agent's own limit", n, int64(maxLogBytes))
	}
	switch t.GetOnIsolation() {
	case "", IsolationKill, IsolationKeep:
	default:
		v.add("onIsolation", "%s is unknown: use kill or keep", shorten(t.GetOnIsolation()))
	}
}
