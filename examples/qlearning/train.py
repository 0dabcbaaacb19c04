#!/usr/bin/env python3
"""Tabular Q-learning on a slippery grid world, with checkpoints that survive a kill.

An agent starts in the top left corner of a grid, must not step on a pit, and is
paid when it reaches the bottom right corner. One step in ten the floor is
slippery and it slides sideways, so that a path along the pits is a bad idea and
has to be unlearned. Nothing but the standard library is used, and the same seed
gives the same run, however often it was interrupted in between.

The contract with whoever runs it:

* progress goes to standard output, one line a report, flushed as it is written;
* the checkpoint is one JSON file, replaced atomically, in $MILLRACE_CHECKPOINT_DIR
  (or --checkpoint); a new start continues from it;
* on SIGTERM or SIGINT the checkpoint is saved and the exit code is 128 + signal;
* the exit code is 0 only when the greedy policy, played without exploration,
  reaches the goal often enough; 1 when it did not learn; 2 for a bad argument.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time

ACTIONS = ((-1, 0), (0, 1), (1, 0), (0, -1))  # up, right, down, left
FORMAT = 1  # of the checkpoint file


class GridWorld:
    """A size x size grid. Pits are drawn from the seed, a path around them always exists."""

    def __init__(self, size, seed, slip):
        self.size = size
        self.slip = slip
        self.goal = size * size - 1
        rng = random.Random("pits-%d-%d" % (size, seed))
        while True:
            self.pits = {
                s for s in range(1, self.goal)
                if rng.random() < 0.10 and not self._near_corner(s)
            }
            if self._solvable():
                break
        self.moves = [[self._move(s, a) for a in range(4)] for s in range(size * size)]

    def _near_corner(self, state):
        row, col = divmod(state, self.size)
        return row + col < 3 or row + col > 2 * self.size - 5

    def _move(self, state, action):
        row, col = divmod(state, self.size)
        row = min(max(row + ACTIONS[action][0], 0), self.size - 1)
        col = min(max(col + ACTIONS[action][1], 0), self.size - 1)
        return row * self.size + col

    def _solvable(self):
        seen, todo = {0}, [0]
        while todo:
            state = todo.pop()
            for action in range(4):
                nxt = self._move(state, action)
                if nxt not in seen and nxt not in self.pits:
                    seen.add(nxt)
                    todo.append(nxt)
        return self.goal in seen

    def step(self, state, action, rng):
        """Return (next state, reward, whether the episode is over)."""
        chance = rng.random()
        if chance < self.slip:  # slide to one side or the other
            action = (action + (1 if chance < self.slip / 2 else 3)) % 4
        nxt = self.moves[state][action]
        if nxt == self.goal:
            return nxt, 20.0, True
        if nxt in self.pits:
            return nxt, -10.0, True
        return nxt, -0.1, False


class Trainer:
    """The table, and everything else that a checkpoint has to carry."""

    def __init__(self, args):
        self.args = args
        self.world = GridWorld(args.size, args.seed, args.slip)
        self.rng = random.Random(args.seed)
        self.table = [[0.0] * 4 for _ in range(args.size * args.size)]
        self.episode = 0
        self.recent = []  # reward of the episodes since the last report
        self.spent = 0.0  # seconds of training, over all starts
        self.max_steps = 12 * args.size

    def run_episode(self):
        """Play one episode, learning from every step."""
        args, rng, table, step = self.args, self.rng, self.table, self.world.step
        # Exploration falls to its floor over the first half of the episodes.
        epsilon = max(0.02, 1.0 - self.episode / (0.5 * args.episodes))
        alpha = max(0.05, 0.5 * (1.0 - self.episode / args.episodes))
        # Every second episode starts anywhere, or some grids would take ages to find the goal even once.
        state, total = self.start(), 0.0
        for _ in range(self.max_steps):
            row = table[state]
            if rng.random() < epsilon:
                action = rng.randrange(4)
            else:
                action = row.index(max(row))
            nxt, reward, over = step(state, action, rng)
            target = reward if over else reward + args.gamma * max(table[nxt])
            row[action] += alpha * (target - row[action])
            total += reward
            state = nxt
            if over:
                break
        if self.episode % 2 == 0:  # only those from the corner can be compared
            self.recent.append(total)
        self.episode += 1

    def start(self):
        if self.episode % 2 == 0:
            return 0
        while True:
            state = self.rng.randrange(self.world.goal)
            if state not in self.world.pits:
                return state

    def evaluate(self, games):
        """Play the greedy policy without exploring; return (share of goals reached, mean reward)."""
        rng = random.Random("evaluation-%d" % self.args.seed)
        won, total = 0, 0.0
        for _ in range(games):
            state = 0
            for _ in range(self.max_steps):
                row = self.table[state]
                state, reward, over = self.world.step(state, row.index(max(row)), rng)
                total += reward
                if over:
                    won += state == self.world.goal
                    break
        return won / games, total / games

    def identity(self):
        """What must be equal for a checkpoint to belong to this training."""
        a = self.args
        return {"seed": a.seed, "size": a.size, "slip": a.slip, "gamma": a.gamma, "episodes": a.episodes}

    def save(self, path):
        """Write the checkpoint beside its place and rename it there: never half a file."""
        version, internal, gauss = self.rng.getstate()
        state = {
            "format": FORMAT, "training": self.identity(), "episode": self.episode,
            "spent": self.spent, "table": self.table, "recent": self.recent,
            "rng": [version, list(internal), gauss],
        }
        folder = os.path.dirname(os.path.abspath(path))
        os.makedirs(folder, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".checkpoint-", dir=folder)
        try:
            with os.fdopen(handle, "w") as out:
                json.dump(state, out)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    def load(self, path):
        """Continue from the checkpoint if there is one for this training. Say which."""
        try:
            with open(path) as source:
                state = json.load(source)
            if state["format"] != FORMAT or state["training"] != self.identity():
                say("checkpoint %s is of another training: starting anew", path)
                return False
            version, internal, gauss = state["rng"]
            self.rng.setstate((version, tuple(internal), gauss))
            self.table, self.recent = state["table"], state["recent"]
            self.episode, self.spent = state["episode"], state["spent"]
        except FileNotFoundError:
            return False
        except (ValueError, KeyError, TypeError) as problem:
            say("checkpoint %s cannot be read (%s): starting anew", path, problem)
            return False
        say("resumed from %s at episode %d of %d", path, self.episode, self.args.episodes)
        return True


class Stop:
    """Remembers the first signal that asked us to stop; the loop looks after every episode."""

    def __init__(self):
        self.signal = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number, _frame):
        self.signal = self.signal or number


def say(text, *values):
    print(text % values, flush=True)


def train(trainer, stop, path):
    """Run the episodes; return False when a signal or --seconds ended them early."""
    args = trainer.args
    started, before = time.monotonic(), trainer.spent
    saved = started
    while trainer.episode < args.episodes:
        trainer.run_episode()
        now = time.monotonic()
        trainer.spent = before + now - started
        if trainer.episode % args.report == 0 or trainer.episode == args.episodes:
            mean = sum(trainer.recent) / max(1, len(trainer.recent))
            say("episode %6d/%d  reward %8.2f  %6.1fs", trainer.episode, args.episodes, mean, trainer.spent)
            trainer.recent = []
        if stop.signal or (args.seconds and now - started >= args.seconds):
            return False
        if now - saved >= args.save_every:
            trainer.save(path)
            saved = now
    return True


def arguments():
    parser = argparse.ArgumentParser(description="Tabular Q-learning on a slippery grid world.")
    parser.add_argument("--episodes", type=int, default=600000, help="length of the training (default %(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="the same seed gives the same run (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=0,
                        help="save and stop after this long, exit 0; a new start continues (default: no limit)")
    parser.add_argument("--size", type=int, default=16, help="edge of the grid (default %(default)s)")
    parser.add_argument("--slip", type=float, default=0.1, help="chance to slide sideways (default %(default)s)")
    parser.add_argument("--gamma", type=float, default=0.98, help="discount of later rewards (default %(default)s)")
    parser.add_argument("--report", type=int, default=10000, help="episodes between two lines (default %(default)s)")
    parser.add_argument("--save-every", type=float, default=2.0,
                        help="seconds between two checkpoints (default %(default)s)")
    parser.add_argument("--threshold", type=float, default=0.7,
                        help="share of greedy games that must reach the goal (default %(default)s)")
    parser.add_argument("--checkpoint", help="checkpoint file, continued from if there (default: checkpoint.json in "
                        "$MILLRACE_CHECKPOINT_DIR, else a new file in the temporary directory)")
    args = parser.parse_args()
    if args.size < 4 or args.episodes < 1 or args.report < 1:
        parser.error("--size must be at least 4, --episodes and --report at least 1")
    if not 0 <= args.slip <= 0.5 or not 0 < args.gamma < 1:
        parser.error("--slip must be between 0 and 0.5, --gamma between 0 and 1")
    return args


def checkpoint_path(args):
    """Where the checkpoint is. Runs that were given no place get a new one each, so that two never share it."""
    if args.checkpoint:
        return args.checkpoint
    folder = os.environ.get("MILLRACE_CHECKPOINT_DIR")
    return os.path.join(folder or tempfile.mkdtemp(prefix="qlearning-"), "checkpoint.json")


def main():
    args = arguments()
    stop = Stop()
    path = checkpoint_path(args)
    trainer = Trainer(args)
    say("q-learning: %dx%d grid, %d pits, %d episodes, seed %d",
        args.size, args.size, len(trainer.world.pits), args.episodes, args.seed)
    trainer.load(path)
    done = train(trainer, stop, path)
    trainer.save(path)
    if stop.signal:
        say("%s: saved %s at episode %d", signal.Signals(stop.signal).name, path, trainer.episode)
        return 128 + stop.signal
    if not done:
        say("time is up: saved %s at episode %d", path, trainer.episode)
        return 0
    share, reward = trainer.evaluate(500)
    say("greedy policy: goal reached in %.1f %% of 500 games, mean reward %.2f", 100 * share, reward)
    say("checkpoint: %s", path)
    if share < args.threshold:
        say("did not learn: %.1f %% is under the threshold of %.1f %%", 100 * share, 100 * args.threshold)
        return 1
    say("learned.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
