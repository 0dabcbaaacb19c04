package spec

import "testing"

func TestEqual(t *testing.T) {
	t.Parallel()
	const defaults = `{"id":"x","queue":"default","priority":"normal","onIsolation":"kill","grace":"10s","retention":"24h",
	  "resources":{"slots":1},"log":{},"labels":{},"traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
	  "retry":{"maxAttempts":1,"maxLost":3,"retryOn":["timeout","oom","exit","signal","exit"],
	           "backoff":{"initial":"1s","factor":2,"max":"5m","jitter":0.2}},"command":{"argv":["x"]}}`
	for name, tc := range map[string]struct {
		a, b string
		want bool
	}{
		"defaults said":        {`{` + work + `}`, defaults, true},
		"both stdins":          {`{"command":{"argv":["x"],"stdin":"hi"}}`, `{"command":{"argv":["x"],"stdinBytes":"aGk="}}`, true},
		"order of maps":        {`{` + work + `,"labels":{"a":"1","b":"2"}}`, `{` + work + `,"labels":{"b":"2","a":"1"}}`, true},
		"implied longest":      {`{` + work + `,"retry":{"backoff":{"initial":"10m"}}}`, `{` + work + `,"retry":{"backoff":{"initial":"10m","max":"10m"}}}`, true},
		"implied first":        {`{` + work + `,"retry":{"backoff":{"max":"1ms"}}}`, `{` + work + `,"retry":{"backoff":{"initial":"1ms","max":"1ms"}}}`, true},
		"exceptions":           {`{` + work + `,"retry":{"noRetryOn":["oom"]}}`, `{` + work + `,"retry":{"retryOn":["exit","timeout","signal"]}}`, true},
		"needless exception":   {`{` + work + `,"retry":{"noRetryOn":["refused"]}}`, `{` + work + `}`, true},
		"zones":                {`{` + work + `,"notBefore":"2030-01-01T00:00:00Z"}`, `{` + work + `,"notBefore":"2030-01-01T01:00:00+01:00"}`, true},
		"nothing tried again":  {`{` + work + `,"retry":{"noRetryOn":["exit","signal","oom","timeout"]}}`, `{` + work + `}`, false},
		"never lost":           {`{` + work + `,"retry":{"maxLost":0}}`, `{` + work + `}`, false},
		"no jitter":            {`{` + work + `,"retry":{"backoff":{"jitter":0}}}`, `{` + work + `}`, false},
		"kill at once":         {`{` + work + `,"grace":"0s"}`, `{` + work + `}`, false},
		"argv":                 {`{"command":{"argv":["x",""]}}`, `{` + work + `}`, false},
		"shell":                {`{"command":{"argv":["x"],"shell":true}}`, `{` + work + `}`, false},
		"label":                {`{` + work + `,"labels":{"a":""}}`, `{` + work + `}`, false},
		"index 0":              {`{` + work + `,"arrayIndex":0}`, `{` + work + `}`, false},
		"longest pause":        {`{` + work + `,"retry":{"backoff":{"max":"6m"}}}`, `{` + work + `}`, false},
		"name":                 {`{` + work + `,"name":"a"}`, `{` + work + `}`, false},
		"command against call": {`{"call":{"handler":"x"}}`, `{` + work + `}`, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, b := parse(t, tc.a), parse(t, tc.b)
			if err := Validate(a, Limits{}); err != nil {
				t.Fatal(err)
			}
			if err := Validate(b, Limits{}); err != nil {
				t.Fatal(err)
			}
			if Equal(a, b) != tc.want || Equal(b, a) != tc.want || !Equal(a, a) {
				ca, _ := Canonical(a)
				cb, _ := Canonical(b)
				t.Errorf("Equal is not %t:\n%x\n%x", tc.want, ca, cb)
			}
		})
	}
}
