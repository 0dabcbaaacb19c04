//go:build compose

package e2e_test

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// The fleet of the compose test, and its work.
const (
	composeAgents = 5
	composeShort  = 200 // tasks of a blink
	composeLong   = 30  // tasks that run while things are killed: more than the fleet has slots
	composeTrain  = "compose-train-z"
)

// TestCompose runs the unchanged docker-compose.yml and Dockerfile: a fleet of five agents, real training, 200 short
// tasks added from another container, an agent container killed, Redis restarted, everything down and up again. Every
// task must have ended exactly once, and nothing may be lost.
//
// It is one test and not several because the containers are expensive, and because the order is the point.
func TestCompose(t *testing.T) {
	p := newComposeProject(t)

	p.step("base images", func() { p.must(t.Context(), "scripts/images.sh", "--pull") })
	p.step("build and up", func() {
		p.compose("up", "-d", "--build")
		p.waitHealthy(5)
	})
	// A group of our own on the results keeps them all, to be counted at the end.
	p.redis("XGROUP", "CREATE", "results", "compose-test", "0", "MKSTREAM")

	p.step("scale to five agents", func() {
		p.compose("up", "-d", "--scale", fmt.Sprintf("agent=%d", composeAgents))
		p.waitHealthy(4 + composeAgents)
		p.eventually(time.Minute, "five ready workers", func() error { return p.readyWorkers(composeAgents) })
	})
	var ids []string
	p.step("submit", func() {
		p.submit(composeTrain, "python3", "/opt/millrace/examples/qlearning/train.py")
		ids = append(p.addFromAnotherContainer(), composeTrain)
	})
	p.step("kill an agent, restart Redis", func() {
		victim := p.busyWorker()
		p.must(t.Context(), "docker", "kill", "-s", "KILL", victim)
		p.compose("restart", "redis")
	})
	p.step("every task ends", func() { p.allSucceeded(3*time.Minute, ids) })
	p.step("each ended once", func() {
		p.eachEndedOnce(ids)
		if lost := p.lostAttempts(ids); lost == 0 {
			t.Error("no task lost its worker: the killed agent ran nothing, so its recovery was not tried")
		}
		p.training()
	})
	p.step("down and up again", func() {
		p.compose("down")
		p.compose("up", "-d")
		p.waitHealthy(5)
		p.allSucceeded(time.Minute, ids)
		p.training()
		p.submit("compose-after-z", "true")
		p.allSucceeded(time.Minute, []string{"compose-after-z"})
	})
	p.step("down with volumes", func() {
		p.compose("down", "-v")
		p.nothingLeft()
	})
}

// addFromAnotherContainer adds the tasks with redis-cli from a container that is neither agent nor dispatcher, the way
// any program of the network does, and returns their ids.
func (p *composeProject) addFromAnotherContainer() []string {
	var commands strings.Builder
	var ids []string
	for i := range composeShort + composeLong {
		script := "echo done"
		if i >= composeShort {
			script = "sleep 6; echo done"
		}
		id := fmt.Sprintf("compose-%03d-z", i)
		ids = append(ids, id)
		fmt.Fprintf(&commands, `XADD tasks * json '{"id":"%s","command":{"argv":["sh","-c","%s"]}}'`+"\n", id, script)
	}
	out := p.composeInput(commands.String(), "run", "--rm", "--no-deps", "-T", "redis", "redis-cli", "-h", "redis")
	if strings.Contains(out, "ERR") {
		p.t.Fatalf("redis-cli refused an XADD:\n%s", out)
	}
	return ids
}

// allSucceeded waits until every task is there and has succeeded.
func (p *composeProject) allSucceeded(within time.Duration, ids []string) {
	p.t.Helper()
	done := make(map[string]bool, len(ids))
	p.eventually(within, fmt.Sprintf("%d tasks succeeded", len(ids)), func() error {
		var open []string
		for _, id := range ids {
			if done[id] {
				continue
			}
			task, err := p.task(id)
			switch {
			case err != nil:
				return err
			case task.State == "succeeded":
				done[id] = true
			case task.State == "failed", task.State == "cancelled", task.State == "expired":
				p.t.Fatalf("task %s: %s (%s: %s)", id, task.State, task.Reason, task.Message)
			default:
				open = append(open, id+" "+task.State)
			}
		}
		if len(open) > 0 {
			return fmt.Errorf("%d not ended, such as %s", len(open), open[0])
		}
		return nil
	})
}

// eachEndedOnce counts the results of every task since the start. The results stream has one for each final state.
func (p *composeProject) eachEndedOnce(ids []string) {
	p.t.Helper()
	count := p.results()
	for _, id := range ids {
		if count[id] != 1 {
			p.t.Errorf("task %s has %d results, want 1", id, count[id])
		}
	}
	if len(count) != len(ids) {
		p.t.Errorf("%d tasks have results, %d were submitted", len(count), len(ids))
	}
	if pending := p.redis("XPENDING", "dispatch:default:normal", "agents"); !strings.HasPrefix(pending, "1) (integer) 0\n") {
		p.t.Errorf("entries are still pending:\n%s", pending)
	}
}

// lostAttempts counts the attempts that ended with the death of their worker.
func (p *composeProject) lostAttempts(ids []string) int {
	p.t.Helper()
	lost := 0
	for _, id := range ids {
		task, err := p.task(id)
		if err != nil {
			p.t.Fatalf("task %s: %v", id, err)
		}
		lost += task.Lost
	}
	return lost
}

// training checks the training's outcome and output with the command line, from outside of the containers.
func (p *composeProject) training() {
	p.t.Helper()
	p.must(p.t.Context(), p.millrace, "wait", composeTrain)
	log := p.must(p.t.Context(), p.millrace, "logs", composeTrain)
	for _, want := range []string{"episode", "learned."} {
		if !strings.Contains(log, want) {
			p.t.Errorf("the log of the training does not have %q:\n%s", want, log)
		}
	}
}
