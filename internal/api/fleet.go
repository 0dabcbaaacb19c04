package api

import (
	"cmp"
	"context"
	"slices"

	"connectrpc.com/connect"

	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
	"github.com/millrace/millrace/proto/millrace/v1/millracev1connect"
)

// fleetService implements the service over the API.
type fleetService API

var _ millracev1connect.FleetServiceHandler = (*fleetService)(nil)

// ListWorkers lists the agents by id.
func (s *fleetService) ListWorkers(ctx context.Context, _ *connect.Request[millracev1.ListWorkersRequest]) (*connect.Response[millracev1.ListWorkersResponse], error) {
	metas, err := s.store.Workers(ctx)
	if err != nil {
		return nil, wireError("list workers", err)
	}
	running, err := s.runningByWorker(ctx)
	if err != nil {
		return nil, wireError("list workers", err)
	}
	out := &millracev1.ListWorkersResponse{}
	for _, m := range metas {
		out.Workers = append(out.Workers, &millracev1.WorkerView{
			Id: string(m.ID), Slots: uint32(max(m.Slots, 0)), Running: running[m.ID], Queues: m.Queues, State: workerState(m),
			Host: m.Host, Pid: uint32(max(m.PID, 0)), Version: m.Version, StartedAt: stamp(m.Started),
			Dispatchers: m.Dispatchers, Handlers: m.Handlers,
		})
	}
	slices.SortFunc(out.Workers, func(a, b *millracev1.WorkerView) int { return cmp.Compare(a.GetId(), b.GetId()) })
	return connect.NewResponse(out), nil
}

// workerState is the word for how a worker stands.
func workerState(m store.WorkerMeta) string {
	switch {
	case m.Dead:
		return "dead"
	case !m.Beating:
		return "suspect"
	case m.Draining:
		return "draining"
	default:
		return "ready"
	}
}

// maxRunning is more tasks than any fleet has slots for.
const maxRunning = 1 << 30

// walkPage is how many records one round trip reads.
const walkPage = 1000

// runningByWorker counts by the records, which are the truth; what workers say of themselves is only a view.
func (s *fleetService) runningByWorker(ctx context.Context) (map[task.WorkerID]uint32, error) {
	ids, err := s.store.Listed(ctx, store.IndexRunning, 0, maxRunning, false)
	if err != nil {
		return nil, err
	}
	n := map[task.WorkerID]uint32{}
	for page := range slices.Chunk(ids, walkPage) {
		snaps, err := s.store.Snapshots(ctx, page)
		if err != nil {
			return nil, err
		}
		for _, sn := range snaps {
			if sn.State == task.Running {
				n[sn.Owner]++
			}
		}
	}
	return n, nil
}

// ListQueues lists the queues by name.
func (s *fleetService) ListQueues(ctx context.Context, _ *connect.Request[millracev1.ListQueuesRequest]) (*connect.Response[millracev1.ListQueuesResponse], error) {
	names, err := s.store.QueueNames(ctx)
	if err != nil {
		return nil, wireError("list queues", err)
	}
	metas, err := s.store.Workers(ctx)
	if err != nil {
		return nil, wireError("list queues", err)
	}
	slices.Sort(names)
	var lanes []string
	for _, q := range names {
		for _, p := range store.Priorities {
			lanes = append(lanes, store.Lane(q, p))
		}
	}
	waiting, pending, err := s.store.Backlog(ctx, lanes)
	if err != nil {
		return nil, wireError("list queues", err)
	}
	out := &millracev1.ListQueuesResponse{}
	for i, q := range names {
		v := &millracev1.QueueView{Name: q, Queued: map[string]uint64{}, Workers: serving(metas, q)}
		for j, p := range store.Priorities {
			at := i*len(store.Priorities) + j
			v.Queued[p] = uint64(max(waiting[at], 0))
			v.Running += uint64(max(pending[at], 0))
		}
		out.Queues = append(out.Queues, v)
	}
	return connect.NewResponse(out), nil
}

// serving counts the live workers of a queue.
func serving(metas []store.WorkerMeta, queue string) uint32 {
	var n uint32
	for _, m := range metas {
		if !m.Dead && m.Beating && slices.Contains(m.Queues, queue) {
			n++
		}
	}
	return n
}
