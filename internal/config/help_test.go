package config

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestVars(t *testing.T) {
	t.Parallel()
	var names []string
	for _, v := range Vars(service{}, &Redis{}) {
		names = append(names, v.Name)
		if v.Help == "" {
			t.Errorf("%s has no help", v.Name)
		}
	}
	want := []string{
		"MILLRACE_REDIS_URL", "MILLRACE_NAMESPACE", "MILLRACE_WAIT_REDIS", "MILLRACE_STRICT",
		"MILLRACE_HEARTBEAT_INTERVAL", "MILLRACE_HEARTBEAT_TTL", "MILLRACE_LEASE_TTL", "MILLRACE_SCAN_INTERVAL", "MILLRACE_HOLD_LIMIT",
		"MILLRACE_OPS_ADDR", "MILLRACE_TOKEN", "MILLRACE_LOG_LEVEL", "MILLRACE_LOG_FORMAT",
		"MILLRACE_HTTP_ADDR", "MILLRACE_SLOTS", "MILLRACE_QUEUES", "MILLRACE_NAME", "MILLRACE_GRACE", "MILLRACE_OTHER_RATIO",
	}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("Vars (-want +got):\n%s", diff)
	}
}

func TestHelp(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := Help(&out, &service{}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"VARIABLE                     TYPE           DEFAULT                   MEANING\n",
		"MILLRACE_WAIT_REDIS          duration       5m                        how long to wait",
		"MILLRACE_TOKEN               secret         -                         shared token",
		"MILLRACE_LOG_LEVEL           text           info ",
		"MILLRACE_SLOTS               whole number   4 ",
		"MILLRACE_QUEUES              list of text   default ",
		"MILLRACE_OTHER_RATIO         number         0.5 ",
		"MILLRACE_STRICT              true or false  false ",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("help lacks %q:\n%s", want, out.String())
		}
	}
}

func TestMarkdown(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := Markdown(&out, "Service", service{}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"## Service\n\n| variable | type | default | meaning |\n|---|---|---|---|\n| `MILLRACE_REDIS_URL` | text | `redis://127.0.0.1:6379/0` |",
		"| `MILLRACE_NAME` | text |  | name \\| label |\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("markdown lacks %q:\n%s", want, out.String())
		}
	}
}

func TestUnknownFindsMisspeltVariables(t *testing.T) {
	t.Parallel()
	got := unknownIn(map[string]string{
		"MILLRACE_REDIS_URI": "x", "MILLRACE_REDIS_URL": "x", "MILLRACE_NAMESPCE": "x", "PATH": "x",
	}, []any{Redis{}})
	if diff := cmp.Diff([]string{"MILLRACE_NAMESPCE", "MILLRACE_REDIS_URI"}, got); diff != "" {
		t.Errorf("Unknown (-want +got):\n%s", diff)
	}
}
