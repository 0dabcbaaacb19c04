package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// service is a config struct as a service declares it.
type service struct {
	Redis
	Timing
	Ops
	Auth
	Log
	HTTPAddr string        `env:"HTTP_ADDR" envDefault:"127.0.0.1:8080" help:"address of the API"`
	Slots    int           `env:"SLOTS" envDefault:"4" help:"tasks to run at once"`
	Queues   []string      `env:"QUEUES" envDefault:"default" help:"queues to serve"`
	Name     string        `env:"NAME,required" help:"name | label"`
	Grace    time.Duration `env:"GRACE" help:"how long"`
	Other    nested        `envPrefix:"OTHER_"`
	private  string        // not a setting, and none of Load's business
}

type nested struct {
	Ratio float64 `env:"RATIO" envDefault:"0.5" help:"a ratio"`
}

func (c *service) Validate() error {
	var errs []error
	if c.Slots < 1 {
		errs = append(errs, fmt.Errorf("MILLRACE_SLOTS=%d: must be at least 1", c.Slots))
	}
	errs = append(errs, CheckListen("MILLRACE_HTTP_ADDR", c.HTTPAddr, c.Token))
	return errors.Join(errs...)
}

func TestLoadDefaults(t *testing.T) {
	t.Parallel()
	got := service{private: "kept"}
	if err := loadFrom(&got, map[string]string{"MILLRACE_NAME": "n"}); err != nil {
		t.Fatal(err)
	}
	want := service{
		Redis: Redis{URL: "redis://127.0.0.1:6379/0", WaitRedis: 5 * time.Minute},
		Timing: Timing{
			HeartbeatInterval: 10 * time.Second, HeartbeatTTL: 30 * time.Second, LeaseTTL: 2 * time.Minute,
			ScanInterval: 5 * time.Second, HoldLimit: 2 * time.Minute,
		},
		Log:      Log{Level: slog.LevelInfo, Format: LogText},
		HTTPAddr: "127.0.0.1:8080", Slots: 4, Queues: []string{"default"}, Name: "n",
		Other: nested{Ratio: 0.5}, private: "kept",
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(service{})); diff != "" {
		t.Errorf("defaults (-want +got):\n%s", diff)
	}
}

func TestLoadReadsTheEnvironment(t *testing.T) {
	t.Setenv("MILLRACE_NAME", "n")
	t.Setenv("MILLRACE_REDIS_URL", "rediss://user:pw@redis.example:6380/3")
	t.Setenv("MILLRACE_NAMESPACE", "team-a")
	t.Setenv("MILLRACE_WAIT_REDIS", "0")
	t.Setenv("MILLRACE_STRICT", "true")
	t.Setenv("MILLRACE_HEARTBEAT_INTERVAL", "1s")
	t.Setenv("MILLRACE_HEARTBEAT_TTL", "3s")
	t.Setenv("MILLRACE_LEASE_TTL", "12s")
	t.Setenv("MILLRACE_SCAN_INTERVAL", "") // empty is not set
	t.Setenv("MILLRACE_HOLD_LIMIT", "0")
	t.Setenv("MILLRACE_TOKEN", "s3cret")
	t.Setenv("MILLRACE_HTTP_ADDR", ":8080")
	t.Setenv("MILLRACE_LOG_LEVEL", "debug")
	t.Setenv("MILLRACE_LOG_FORMAT", "json")
	t.Setenv("MILLRACE_OPS_ADDR", "127.0.0.1:0")
	t.Setenv("MILLRACE_QUEUES", "a,b")
	t.Setenv("MILLRACE_OTHER_RATIO", "0.25")
	var got service
	if err := Load(&got); err != nil {
		t.Fatal(err)
	}
	want := service{
		Redis:  Redis{URL: "rediss://user:pw@redis.example:6380/3", Namespace: "team-a", Strict: true},
		Timing: Timing{HeartbeatInterval: time.Second, HeartbeatTTL: 3 * time.Second, LeaseTTL: 12 * time.Second, ScanInterval: 5 * time.Second},
		Ops:    Ops{Addr: "127.0.0.1:0"}, Auth: Auth{Token: "s3cret"},
		Log:      Log{Level: slog.LevelDebug, Format: LogJSON},
		HTTPAddr: ":8080", Slots: 4, Queues: []string{"a", "b"}, Name: "n", Other: nested{Ratio: 0.25},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(service{})); diff != "" {
		t.Errorf("Load (-want +got):\n%s", diff)
	}
}

// One run shows everything that is wrong, each by its variable.
func TestLoadReportsEveryProblem(t *testing.T) {
	t.Parallel()
	err := loadFrom(&service{}, map[string]string{
		"MILLRACE_REDIS_URL":          "http://:hunter2@h:1/%zz",
		"MILLRACE_NAMESPACE":          "Team A",
		"MILLRACE_WAIT_REDIS":         "5000",
		"MILLRACE_STRICT":             "perhaps",
		"MILLRACE_HEARTBEAT_INTERVAL": "soon",
		"MILLRACE_HEARTBEAT_TTL":      "-1s",
		"MILLRACE_SCAN_INTERVAL":      "10us",
		"MILLRACE_LOG_LEVEL":          "loud",
		"MILLRACE_LOG_FORMAT":         "xml",
		"MILLRACE_HTTP_ADDR":          "0.0.0.0:8080",
		"MILLRACE_SLOTS":              "0",
		"MILLRACE_OTHER_RATIO":        "half",
	})
	if err == nil {
		t.Fatal("no error")
	}
	want := []string{
		"MILLRACE_WAIT_REDIS=5000: the unit is missing; write 5000s for seconds or 5000ms for milliseconds",
		"MILLRACE_STRICT=perhaps: not a yes or no; write true or false",
		"MILLRACE_HEARTBEAT_INTERVAL=soon: not a duration; write for example 500ms, 30s, 2m or 1h30m",
		"MILLRACE_HEARTBEAT_TTL=-1s: is negative",
		"MILLRACE_SCAN_INTERVAL=10us: is less than a millisecond; is the unit right?",
		"MILLRACE_LOG_LEVEL=loud: must be debug, info, warn or error",
		"MILLRACE_LOG_FORMAT=xml: must be text or json",
		"MILLRACE_NAME is not set, and has no default",
		"MILLRACE_OTHER_RATIO=half: not a number",
	}
	if diff := cmp.Diff(want, strings.Split(err.Error(), "\n")); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
}

func TestLoadReportsWhatValidateFinds(t *testing.T) {
	t.Parallel()
	err := loadFrom(&service{}, map[string]string{
		"MILLRACE_NAME":               "n",
		"MILLRACE_REDIS_URL":          "http://:hunter2@h:1/%zz",
		"MILLRACE_NAMESPACE":          "Team A",
		"MILLRACE_HEARTBEAT_INTERVAL": "20s",
		"MILLRACE_LEASE_TTL":          "40s",
		"MILLRACE_HTTP_ADDR":          "0.0.0.0:8080",
		"MILLRACE_SLOTS":              "0",
	})
	if err == nil {
		t.Fatal("no error")
	}
	want := []string{
		"MILLRACE_REDIS_URL=http://:xxxxx@h:1/%zz: not a URL; write redis://host:6379/0",
		`MILLRACE_NAMESPACE="Team A": use 1 to 64 of a-z, 0-9, _ and -`,
		"MILLRACE_HEARTBEAT_TTL=30s: must be at least three times MILLRACE_HEARTBEAT_INTERVAL=20s",
		"MILLRACE_LEASE_TTL=40s: must be at least twice MILLRACE_HEARTBEAT_TTL=30s",
		"MILLRACE_SLOTS=0: must be at least 1",
		"MILLRACE_HTTP_ADDR=0.0.0.0:8080: other machines can reach this address, and there is no token; set MILLRACE_TOKEN, or listen on 127.0.0.1",
	}
	if diff := cmp.Diff(want, strings.Split(err.Error(), "\n")); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
}

// When one struct is embedded, its Validate is also the outer one's.
func TestLoadReportsAProblemOnce(t *testing.T) {
	t.Parallel()
	var cfg struct{ Redis }
	err := loadFrom(&cfg, map[string]string{"MILLRACE_NAMESPACE": "A"})
	if err == nil || strings.Count(err.Error(), "NAMESPACE") != 1 {
		t.Errorf("error = %v, want one line", err)
	}
}

func TestLoadWantsAPointerToAStruct(t *testing.T) {
	t.Parallel()
	n := 1
	if err := Load(&n); err == nil {
		t.Error("Load took an int")
	}
}

func TestSecretFromAFileThatIsMissing(t *testing.T) {
	t.Parallel()
	var cfg struct {
		Key Secret `env:"KEY,file"`
	}
	err := loadFrom(&cfg, map[string]string{"MILLRACE_KEY": "/no/such/hunter2"})
	if err == nil || !strings.Contains(err.Error(), "MILLRACE_KEY") || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("error = %v, want one that names the variable only", err)
	}
}

func TestTimingFromGo(t *testing.T) {
	t.Parallel()
	good := Timing{
		HeartbeatInterval: time.Second, HeartbeatTTL: 3 * time.Second, LeaseTTL: 12 * time.Second,
		ScanInterval: time.Second, HoldLimit: 0,
	}
	if err := good.Validate(); err != nil {
		t.Errorf("good timing refused: %v", err)
	}
	for name, change := range map[string]func(*Timing){
		"HEARTBEAT_INTERVAL": func(t *Timing) { t.HeartbeatInterval = 5000 }, // nanoseconds
		"HEARTBEAT_TTL":      func(t *Timing) { t.HeartbeatTTL = 0 },
		"LEASE_TTL":          func(t *Timing) { t.LeaseTTL = 5 * time.Second },
		"SCAN_INTERVAL":      func(t *Timing) { t.ScanInterval = -time.Second },
		"HOLD_LIMIT":         func(t *Timing) { t.HoldLimit = -time.Second },
	} {
		bad := good
		change(&bad)
		if err := bad.Validate(); err == nil || !strings.Contains(err.Error(), "MILLRACE_"+name) {
			t.Errorf("%s: error = %v, want one that names it", name, err)
		}
	}
}

func TestRedisURLs(t *testing.T) {
	t.Parallel()
	for url, ok := range map[string]bool{
		"redis://h": true, "redis://h:6379/1": true, "rediss://u:p@h:1": true, "unix:///run/r.sock?db=1": true, "redis://[::1]:6379": true,
		"": false, "localhost:6379": false, "redis://": false, "redis:///0": false, "unix://": false, "http://h": false,
	} {
		if err := (Redis{URL: url}).Validate(); (err == nil) != ok {
			t.Errorf("URL %q: error = %v, want ok = %v", url, err, ok)
		}
	}
}

func TestCheckListen(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		addr  string
		token Secret
		ok    bool
	}{
		{"", "", true},
		{"127.0.0.1:8080", "", true},
		{"127.8.8.8:0", "", true},
		{"[::1]:8080", "", true},
		{"[::ffff:127.0.0.1]:8080", "", true},
		{"localhost:8080", "", true},
		{":8080", "", false},
		{"0.0.0.0:8080", "", false},
		{"[::]:8080", "", false},
		{"10.0.0.1:8080", "", false},
		{"localhost.example:8080", "", false},
		{"0.0.0.0:8080", "t", true},
		{":8080", "t", true},
		{"8080", "t", false},
		{"8080", "", false},
	} {
		err := CheckListen("MILLRACE_X", tt.addr, tt.token)
		if (err == nil) != tt.ok {
			t.Errorf("CheckListen(%q, token %q) = %v, want ok = %v", tt.addr, tt.token.Reveal(), err, tt.ok)
		}
		if err != nil && !strings.Contains(err.Error(), "MILLRACE_X") {
			t.Errorf("error %q does not name the variable", err)
		}
	}
}

func TestSecretIsNeverPrinted(t *testing.T) {
	t.Parallel()
	cfg := Auth{Token: "hunter2"}
	var out strings.Builder
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		fmt.Fprintf(&out, verb+" "+verb+"\n", cfg, cfg.Token)
	}
	slog.New(slog.NewTextHandler(&out, nil)).Info("m", "cfg", cfg, "token", cfg.Token)
	slog.New(slog.NewJSONHandler(&out, nil)).Info("m", "cfg", cfg, "token", cfg.Token)
	if err := json.NewEncoder(&out).Encode(cfg); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(out.String(), "hunter2") || strings.Contains(out.String(), fmt.Sprintf("%x", "hunter2")) {
		t.Errorf("the secret shows:\n%s", out.String())
	}
	if cfg.Token.Reveal() != "hunter2" || Secret("").String() != "" {
		t.Error("Reveal or String is wrong")
	}
	if !cfg.Token.Equal("hunter2") || cfg.Token.Equal("hunter3") || Secret("").Equal("") {
		t.Error("Equal is wrong")
	}
}

func TestRedactURL(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"redis://h:6379/0":          "redis://h:6379/0",
		"redis://u@h":               "redis://u@h",
		"redis://u:pw@h:6379/0?x=1": "redis://u:xxxxx@h:6379/0?x=1",
		"redis://:pw@h":             "redis://:xxxxx@h",
		"redis://u:p%zzw@h":         "redis://u:xxxxx@h",
		"redis://u:a:b@h/p":         "redis://u:xxxxx@h/p",
		"redis://u:a/b@h":           "redis://u:xxxxx@h",
		"redis://u:1/b@h":           "redis://u:xxxxx@h",
		"redis://u:a@b@h":           "redis://u:xxxxx@h",
		"redis://u:pw@h:bad port/0": "redis://u:xxxxx@h:bad port/0",
		"127.0.0.1:6379":            "127.0.0.1:6379",
		"":                          "",
	} {
		if got := RedactURL(in); got != want {
			t.Errorf("RedactURL(%q) = %q, want %q", in, got, want)
		}
	}
}

// Whatever is given as a Redis URL, its password is not in what is shown.
func FuzzRedactURL(f *testing.F) {
	for _, seed := range []string{"pw", "a@b", "a/b", "p%zz", "a:b", "?", "#"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, password string) {
		const mark = "hunter2"
		got := RedactURL("redis://user:" + password + mark + password + "@host:6379/0")
		if strings.Contains(got, mark) {
			t.Errorf("password %q shows in %q", password+mark+password, got)
		}
	})
}
