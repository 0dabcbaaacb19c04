//go:build compose

package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// composeProject is docker-compose.yml under a name of its own, with ports and image tags that touch nothing else.
type composeProject struct {
	t        *testing.T
	name     string
	root     string   // of the repository
	command  []string // docker-compose, or docker compose
	env      []string
	server   string // of the API
	token    string
	millrace string // a binary built here, to speak with the fleet from outside
	start    time.Time
}

// composeTask is what the test reads of a task.
type composeTask struct {
	State, Reason, Message string
	Attempt, Lost          int
}

// newComposeProject finds Docker and Compose, builds the command line, and takes care of the end.
func newComposeProject(t *testing.T) *composeProject {
	t.Helper()
	requireDocker(t)
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("millrace-test-%d", os.Getpid())
	httpPort, controlPort := freePort(t), freePort(t)
	p := &composeProject{
		t: t, name: name, root: root, command: composeCommand(t), start: time.Now(),
		server: "http://127.0.0.1:" + httpPort, token: "compose-test-token",
		millrace: filepath.Join(t.TempDir(), "millrace"),
	}
	p.env = append(os.Environ(),
		"MILLRACE_TAG="+name, "MILLRACE_HTTP_PORT="+httpPort, "MILLRACE_CONTROL_PORT="+controlPort,
		"MILLRACE_TOKEN="+p.token, "MILLRACE_SERVER="+p.server, "COMPOSE_PROJECT_NAME="+name, "MILLRACE_SLOTS=4",
		"DOCKER_CLI_HINTS=false")
	p.must(t.Context(), "go", "build", "-o", p.millrace, "./cmd/millrace")
	t.Cleanup(p.cleanup)
	return p
}

// requireDocker skips the test where no Docker engine answers, and only there.
func requireDocker(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if out, err := exec.CommandContext(ctx, "docker", "version").CombinedOutput(); err != nil {
		t.Skipf("no Docker engine answers, so docker-compose.yml cannot be tried (docker version: %v): %s", err, out)
	}
}

func composeCommand(t *testing.T) []string {
	t.Helper()
	if exec.CommandContext(t.Context(), "docker", "compose", "version").Run() == nil {
		return []string{"docker", "compose"}
	}
	if path, err := exec.LookPath("docker-compose"); err == nil {
		return []string{path}
	}
	t.Fatal("a Docker engine is here and Compose is not: install docker-compose (1.29) or the compose plugin (v2)")
	return nil
}

func freePort(t *testing.T) string {
	t.Helper()
	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// step runs one part of the test and says how long it took.
func (p *composeProject) step(name string, run func()) {
	p.t.Helper()
	began := time.Now()
	run()
	p.t.Logf("%6.1fs  %s: %.1fs", time.Since(p.start).Seconds(), name, time.Since(began).Seconds())
}

// run executes a command in the repository's root and returns its standard output.
func (p *composeProject) run(ctx context.Context, stdin string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir, cmd.Env = p.root, p.env
	cmd.Stdin = strings.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s: %w\n%s%s", strings.Join(args, " "), err, tail(stdout.Bytes()), tail(stderr.Bytes()))
	}
	return stdout.String(), nil
}

// tail keeps the end of an output: the reason is there, and a build prints thousands of lines.
func tail(out []byte) []byte { return out[max(0, len(out)-4000):] }

func (p *composeProject) must(ctx context.Context, args ...string) string {
	p.t.Helper()
	out, err := p.run(ctx, "", args...)
	if err != nil {
		p.t.Fatal(err)
	}
	return out
}

func (p *composeProject) compose(args ...string) string {
	p.t.Helper()
	return p.composeInput("", args...)
}

func (p *composeProject) composeInput(stdin string, args ...string) string {
	p.t.Helper()
	out, err := p.run(p.t.Context(), stdin, append(slices.Clip(p.command), args...)...)
	if err != nil {
		p.t.Fatal(err)
	}
	return out
}

func (p *composeProject) redis(args ...string) string {
	p.t.Helper()
	return p.compose(append([]string{"exec", "-T", "redis", "redis-cli", "--no-raw"}, args...)...)
}

// cleanup removes containers, network, volumes and images of the project, and shows the logs when the test failed.
func (p *composeProject) cleanup() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(p.t.Context()), 2*time.Minute)
	defer cancel()
	if p.t.Failed() {
		if logs, err := p.run(ctx, "", append(slices.Clip(p.command), "logs", "--no-color", "--tail", "60")...); err == nil {
			p.t.Logf("the containers' last words:\n%s", logs)
		}
	}
	if _, err := p.run(ctx, "", append(slices.Clip(p.command), "down", "-v", "--remove-orphans", "--timeout", "5")...); err != nil {
		p.t.Errorf("clean up: %v", err)
	}
	// The tags go, the layers stay as the cache of the next build.
	if _, err := p.run(ctx, "", "docker", "image", "rm", "--no-prune", "millrace:"+p.name, "millrace-agent:"+p.name); err != nil {
		p.t.Logf("clean up: %v", err)
	}
}

// eventually asks until the answer is nil. Only a command or a request can tell how far containers are.
func (p *composeProject) eventually(within time.Duration, what string, ask func() error) {
	p.t.Helper()
	deadline := time.Now().Add(within)
	for {
		err := ask()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			p.t.Fatalf("not within %s: %s: %v", within, what, err)
		}
		time.Sleep(300 * time.Millisecond)
	}
}

// waitHealthy waits until the project has want containers and all are healthy.
func (p *composeProject) waitHealthy(want int) {
	p.t.Helper()
	p.eventually(2*time.Minute, fmt.Sprintf("%d healthy containers", want), func() error {
		out, err := p.run(p.t.Context(), "", "docker", "ps", "-a", "--filter", "label=com.docker.compose.project="+p.name,
			"--format", "{{.Names}}: {{.Status}}")
		if err != nil {
			return err
		}
		lines := strings.Split(strings.TrimSpace(out), "\n")
		for _, line := range lines {
			if !strings.Contains(line, "(healthy)") {
				return errors.New(line)
			}
		}
		if len(lines) != want {
			return fmt.Errorf("%d containers are there", len(lines))
		}
		return nil
	})
}

// call asks the API the way curl does: a POST of JSON.
func (p *composeProject) call(method string, request, response any) error {
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(p.t.Context(), 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.server+"/millrace.v1."+method, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+p.token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", method, resp.Status, answer)
	}
	return json.Unmarshal(answer, response)
}

// submit adds a task through the API.
func (p *composeProject) submit(id string, argv ...string) {
	p.t.Helper()
	request := map[string]any{"task": map[string]any{"id": id, "command": map[string]any{"argv": argv}}}
	var response struct{ ID string }
	if err := p.call("TaskService/Submit", request, &response); err != nil {
		p.t.Fatal(err)
	}
	if response.ID != id {
		p.t.Fatalf("submit answers id %q, want %q", response.ID, id)
	}
}

func (p *composeProject) task(id string) (composeTask, error) {
	var response struct{ Task composeTask }
	err := p.call("TaskService/GetTask", map[string]any{"id": id}, &response)
	return response.Task, err
}

// composeWorker is what the test reads of a worker.
type composeWorker struct {
	ID, State, Host string
	Running         int
}

func (p *composeProject) workers() ([]composeWorker, error) {
	var response struct{ Workers []composeWorker }
	err := p.call("FleetService/ListWorkers", map[string]any{}, &response)
	return response.Workers, err
}

// readyWorkers is nil when exactly want workers are ready.
func (p *composeProject) readyWorkers(want int) error {
	workers, err := p.workers()
	if err != nil {
		return err
	}
	ready := 0
	for _, w := range workers {
		if w.State == "ready" {
			ready++
		}
	}
	if ready != want {
		return fmt.Errorf("%d of %d workers are ready", ready, len(workers))
	}
	return nil
}

// busyWorker waits until the long tasks run and returns the container of a worker whose slots are full of them.
func (p *composeProject) busyWorker() string {
	p.t.Helper()
	var host string
	p.eventually(time.Minute, "a worker that runs long tasks", func() error {
		last, err := p.task(fmt.Sprintf("compose-%03d-z", composeShort-1))
		if err != nil {
			return err
		}
		if last.State != "succeeded" {
			return fmt.Errorf("the short tasks are not through: %s", last.State)
		}
		workers, err := p.workers()
		if err != nil {
			return err
		}
		for _, w := range workers {
			if w.State == "ready" && w.Running >= 2 {
				host = w.Host
				return nil
			}
		}
		return fmt.Errorf("none of %d workers runs two tasks", len(workers))
	})
	return host
}

// resultID finds the id of a task in a result that redis-cli printed with its escapes.
var resultID = regexp.MustCompile(`compose-(?:[0-9]{3}|train)-z`)

// results counts the results of each task. Every entry of the answer has its message on one line.
func (p *composeProject) results() map[string]int {
	p.t.Helper()
	out := p.redis("XREADGROUP", "GROUP", "compose-test", "one", "COUNT", "10000", "STREAMS", "results", ">")
	p.redis("XGROUP", "DESTROY", "results", "compose-test")
	count := make(map[string]int)
	for line := range strings.Lines(out) {
		if id := resultID.FindString(line); id != "" {
			count[id]++
		}
	}
	return count
}

// nothingLeft checks that down -v removed all that up made.
func (p *composeProject) nothingLeft() {
	p.t.Helper()
	filter := "label=com.docker.compose.project=" + p.name
	for _, list := range [][]string{{"ps", "-aq"}, {"volume", "ls", "-q"}, {"network", "ls", "-q"}} {
		args := append(append([]string{"docker"}, list...), "--filter", filter)
		if out := p.must(p.t.Context(), args...); strings.TrimSpace(out) != "" {
			p.t.Errorf("%s after down -v: %s", strings.Join(list, " "), out)
		}
	}
}
