// Package logkey names the attributes of log lines, so that one thing has one
// name in the output of all services, and holds the limiter for errors that
// repeat ([Limiter]). Every package that logs uses it; it knows nothing of any
// of them.
package logkey

// Keys of slog attributes. A key is chosen for what the value is, not for who
// logs it.
const (
	Component  = "component"  // service or part of one: dispatcher, agent, agent.renew
	Task       = "task"       // task id
	Attempt    = "attempt"    // attempt number, from 1
	Worker     = "worker"     // worker id, one incarnation of an agent
	Dispatcher = "dispatcher" // dispatcher id
	Queue      = "queue"      // queue name
	Priority   = "priority"   // high, normal, low
	State      = "state"      // a task's state
	Reason     = "reason"     // why an attempt did not succeed, or why something was refused
	Lease      = "lease"      // time left on a lease
	Stream     = "stream"     // stream key
	Group      = "group"      // consumer group
	Consumer   = "consumer"   // consumer name in a group
	Entry      = "entry"      // stream entry id
	Shard      = "shard"      // shard number
	Move       = "move"       // name of a move: admit, claim, renew, ...
	Count      = "count"      // how many
	Bytes      = "bytes"      // how many bytes
	Addr       = "addr"       // network address
	Peer       = "peer"       // address of the other side
	Path       = "path"       // file or directory
	PID        = "pid"        // process id
	Signal     = "signal"     // signal name
	ExitCode   = "exit_code"  // exit code of a process
	Took       = "took"       // how long it took
	After      = "after"      // in how long the next try comes
	Try        = "try"        // number of the try, from 1
	Suppressed = "suppressed" // lines left out by a Limiter since the last one
	Version    = "version"    // version of a program or protocol
	Err        = "err"        // an error
)
