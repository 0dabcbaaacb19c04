package reaper

import (
	"context"
	"time"

	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/task"
)

// audits is where the slow comparisons stand.
type audits struct {
	cursor    uint64          // of the walk over all records
	consumers time.Time       // last look at the consumers of all lanes
	groups    map[string]bool // lanes that had a group
}

// scanPage is how many keys one tick of the walk over all records asks for, unless something is known to be missing.
const scanPage = 500

// auditOnce is one tick of all comparisons.
func (r *Reaper) auditOnce(ctx context.Context) error {
	if err := r.overdue(ctx); err != nil {
		return err
	}
	missing, err := r.lookAtConsumers(ctx)
	if err != nil {
		return err
	}
	for pages := 0; ; pages++ {
		next, err := r.walkRecords(ctx)
		if err != nil {
			return err
		}
		r.audits.cursor = next
		// A stream or group that vanished took entries with it: the whole walk at once.
		if !missing || next == 0 || pages > 10000 {
			return nil
		}
	}
}

// overdue takes running tasks whose lease ended a whole lease ago, though their worker lives: it has lost sight of them.
func (r *Reaper) overdue(ctx context.Context) error {
	ids, err := r.st.Due(ctx, store.IndexRunning, r.cfg.LeaseTTL, page)
	if err != nil || len(ids) == 0 {
		return err
	}
	if r.watch.isPaused() {
		return nil
	}
	snaps, err := r.st.Snapshots(ctx, ids)
	if err != nil {
		return err
	}
	var late, stale []task.ID
	for i, sn := range snaps {
		if sn.State == task.Running {
			late = append(late, ids[i])
		} else {
			stale = append(stale, ids[i])
		}
	}
	if err := r.st.ForgetUnless(ctx, store.IndexRunning, task.Running, stale...); err != nil {
		return err
	}
	var res result
	_, err = r.loseIDs(ctx, late, r.st.Now().Add(-r.cfg.LeaseTTL), &res)
	return err
}

// consumersEvery is how often all consumers are compared with the workers.
const consumersEvery = time.Minute

// lookAtConsumers finds consumers that no worker stands behind, recovers what is pending for them and removes them. It
// reports whether a group that was there has vanished.
func (r *Reaper) lookAtConsumers(ctx context.Context) (missing bool, err error) {
	full := time.Since(r.audits.consumers) >= consumersEvery
	lanes, err := r.st.Lanes(ctx)
	if err != nil {
		return false, err
	}
	if r.audits.groups == nil {
		r.audits.groups = map[string]bool{}
	}
	has, err := r.st.HasGroups(ctx, lanes)
	if err != nil {
		return false, err
	}
	for i, lane := range lanes {
		if r.audits.groups[lane] && !has[i] {
			missing = true
			r.log.Warn("a dispatch stream or its group has vanished; looking for queued tasks without an entry", "lane", lane)
		}
		r.audits.groups[lane] = has[i]
	}
	if !full {
		return missing, nil
	}
	r.audits.consumers = time.Now()
	workers, err := r.st.Workers(ctx)
	if err != nil {
		return missing, err
	}
	known := map[string]bool{r.id: true}
	for _, w := range workers {
		known[string(w.ID)] = true
	}
	orphans := map[task.WorkerID]bool{}
	for _, lane := range lanes {
		cs, err := r.st.Consumers(ctx, lane)
		if err != nil {
			return missing, err
		}
		for name := range cs {
			if !known[name] {
				orphans[task.WorkerID(name)] = true
			}
		}
	}
	var list []task.WorkerID
	for w := range orphans {
		list = append(list, w)
	}
	var res result
	if len(list) > 0 {
		if err := r.recoverAll(ctx, list, &res); err != nil {
			return missing, err
		}
	}
	// A running record of a worker that nobody knows.
	return missing, r.recoverRunning(ctx, func(o task.WorkerID) bool { return !known[string(o)] }, &res)
}

// walkRecords compares one page of records with the indexes and streams that must know them, and repairs. A record
// must be found wrong at two looks: between reading it and reading the index it may just have moved.
func (r *Reaper) walkRecords(ctx context.Context) (next uint64, err error) {
	ids, next, err := r.st.ScanTasks(ctx, r.audits.cursor, scanPage)
	if err != nil || len(ids) == 0 {
		return next, err
	}
	wrong, err := r.misplaced(ctx, ids)
	if err != nil || len(wrong) == 0 {
		return next, err
	}
	if wrong, err = r.misplaced(ctx, wrong); err != nil || len(wrong) == 0 {
		return next, err
	}
	recs, err := r.st.Records(ctx, wrong)
	if err != nil {
		return next, err
	}
	for _, rec := range recs {
		if rec == nil {
			continue
		}
		if err := r.replace(ctx, rec); err != nil {
			return next, err
		}
	}
	return next, nil
}

// misplaced returns those whose record says queued, delayed or running while the stream or index does not know them.
func (r *Reaper) misplaced(ctx context.Context, ids []task.ID) ([]task.ID, error) {
	snaps, err := r.st.Snapshots(ctx, ids)
	if err != nil {
		return nil, err
	}
	placed, err := r.st.Placed(ctx, ids, snaps)
	if err != nil {
		return nil, err
	}
	var out []task.ID
	for i, ok := range placed {
		if !ok {
			out = append(out, ids[i])
		}
	}
	return out, nil
}

func (r *Reaper) replace(ctx context.Context, rec *store.Record) error {
	switch rec.State {
	case task.Queued:
		out, err := r.st.Do(ctx, []*store.Change{{Move: task.Requeue, ID: rec.ID, Guess: rec.Snapshot, In: task.Input{Attempt: rec.Attempt}}})
		if err != nil {
			return err
		}
		if out[0].Done {
			r.met.repaired.Inc()
			r.log.Warn("queued task had no entry in its stream; dispatched again", logkey.Task, rec.ID, logkey.Attempt, rec.Attempt)
		}
	case task.Delayed:
		r.met.repaired.Inc()
		r.log.Warn("delayed task was not in the index; put back", logkey.Task, rec.ID)
		return r.st.Remind(ctx, store.IndexDelayed, rec.ID, rec.Due)
	case task.Running:
		r.met.repaired.Inc()
		r.log.Warn("running task was not in the index; put back", logkey.Task, rec.ID)
		return r.st.Remind(ctx, store.IndexRunning, rec.ID, r.st.Now().Add(r.cfg.LeaseTTL))
	default:
	}
	return nil
}
