package store

import (
	"hash/fnv"
	"strings"
)

// Priorities in the order in which agents look at them.
var Priorities = []string{"high", "normal", "low"}

// Groups that read our streams.
const (
	GroupDispatcher = "dispatcher"
	GroupAgents     = "agents"
	GroupLogsink    = "logsink"
)

// Keys builds every Redis name: [<namespace>:][{s<k>}:]name. It is the only place that knows them.
type Keys struct{ prefix string }

// NewKeys returns the names of the one shard of a single server or a Sentinel, which has no hash tag.
func NewKeys(namespace string) Keys {
	if namespace == "" {
		return Keys{}
	}
	return Keys{prefix: namespace + ":"}
}

// Prefix is what every name of this shard begins with.
func (k Keys) Prefix() string { return k.prefix }

// Tasks is the stream that producers add to.
func (k Keys) Tasks() string { return k.prefix + "tasks" }

// Results is the stream of final outcomes.
func (k Keys) Results() string { return k.prefix + "results" }

// Dead is the stream of dead letters.
func (k Keys) Dead() string { return k.prefix + "dead" }

// Dispatch is the stream of a lane, "<queue>:<priority>".
func (k Keys) Dispatch(lane string) string { return k.prefix + "dispatch:" + lane }

// Logs is the stream of a log shard.
func (k Keys) Logs(n string) string { return k.prefix + "logs:" + n }

// Task is the record, a hash.
func (k Keys) Task(id string) string { return k.prefix + "task:" + id }

// TaskOf is the prefix of records, for scripts that learn ids while they run.
func (k Keys) TaskOf() string { return k.prefix + "task:" }

// TaskWorker is the view of a task's lease for people.
func (k Keys) TaskWorker(id string) string { return k.prefix + "task:" + id + ":workerId" }

// WorkerBeat is the liveness key of a worker.
func (k Keys) WorkerBeat(w string) string { return k.prefix + "worker:" + w + ":hb" }

// WorkerTasks is the view of what a worker says it runs.
func (k Keys) WorkerTasks(w string) string { return k.prefix + "worker:" + w + ":task" }

// WorkerMeta is the hash that describes a worker and carries its dead mark.
func (k Keys) WorkerMeta(w string) string { return k.prefix + "worker:" + w + ":meta" }

// WorkerMetaParts are the two halves around the id, for scripts that learn ids while they run.
func (k Keys) WorkerMetaParts() (string, string) { return k.prefix + "worker:", ":meta" }

// Dispatcher is the registration of a dispatcher, its address, with a TTL.
func (k Keys) Dispatcher(id string) string { return k.prefix + "dispatcher:" + id }

// Dispatchers is the registry of dispatchers by time of last registration.
func (k Keys) Dispatchers() string { return k.prefix + "dispatchers" }

// Workers is the registry of workers by time of last renewal.
func (k Keys) Workers() string { return k.prefix + "workers" }

// Queues is the registry of queues.
func (k Keys) Queues() string { return k.prefix + "queues" }

// Logsinks is the registry of logsinks.
func (k Keys) Logsinks() string { return k.prefix + "logsinks" }

// Delayed indexes delayed tasks by due time in ms.
func (k Keys) Delayed() string { return k.prefix + "delayed" }

// Running indexes running tasks by the deadline of their lease in ms.
func (k Keys) Running() string { return k.prefix + "running" }

// Done indexes final tasks by their end in ms.
func (k Keys) Done() string { return k.prefix + "done" }

// Expiring indexes tasks that may still expire by that time in ms.
func (k Keys) Expiring() string { return k.prefix + "expiring" }

// Conf holds what is fixed when first written.
func (k Keys) Conf() string { return k.prefix + "conf" }

// Hints is the pub/sub channel on which services tell dispatchers to look now.
func (k Keys) Hints() string { return k.prefix + "hints" }

// Lane is where a task of the queue and priority waits.
func Lane(queue, priority string) string { return queue + ":" + priority }

// SplitLane is the inverse of Lane.
func SplitLane(lane string) (queue, priority string) {
	i := strings.LastIndexByte(lane, ':')
	if i < 0 {
		return lane, ""
	}
	queue, priority = lane[:i], lane[i+1:]
	if j := strings.IndexByte(queue, ':'); j >= 0 {
		queue = queue[:j]
	}
	return queue, priority
}

// Shard is FNV-1a-32 of the id, up to its first dot for tasks that must lie together, modulo n.
func Shard(id string, n int) int {
	if i := strings.IndexByte(id, '.'); i > 0 {
		id = id[:i]
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(id))
	return int(h.Sum32() % uint32(n))
}
