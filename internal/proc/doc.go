// Package proc runs one attempt of a task as a tree of Linux processes: it starts the main process, copies its output,
// passes signals on, and ends only when nothing of the tree is left. The agent calls it for attempts, the guard calls
// its sweeps. It knows nothing of Redis, tasks or retries, and never logs a command, its arguments or its environment.
//
// What belongs to an attempt is found without scanning /proc in the usual case. The agent makes itself the subreaper
// (BecomeSubreaper), so every process a task ever forked is either below the attempt's main process or, once its own
// parent has died, below a direct child of the agent. Three things tell whose such an orphan is: its session (each
// attempt gets one of its own), the marker in its environment, and the time it was started.
//
// Rules that hold everywhere in the package:
//   - A process is never signalled by a bare pid that could have been re-used: the main process is signalled only
//     while it has not been reaped, every other one through a pidfd whose start time was compared.
//   - No wait for "any child" is ever made. Main processes are waited for by pid, orphans too, after /proc said that they
//     are zombies, ours, and in a session that is not the agent's. Other users of os/exec in the same program are safe as
//     long as they do not start sessions of their own.
package proc
