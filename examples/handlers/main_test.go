package main

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/protobuf/proto"

	"github.com/millrace/millrace/internal/redistest"
	"github.com/millrace/millrace/internal/store"
	"github.com/millrace/millrace/internal/storetest"
	"github.com/millrace/millrace/internal/task"
	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// The example as a user starts it: with nothing but the environment.
func TestRunsATask(t *testing.T) { //nolint:paralleltest // it sets the environment
	srv := redistest.Shared(t)
	ns := srv.Prefix(t)
	for k, v := range map[string]string{"REDIS_URL": srv.URL(), "NAMESPACE": ns, "STATE_DIR": t.TempDir()} {
		t.Setenv("MILLRACE_"+k, v)
	}
	st := storetest.OpenAt(t, srv.URL(), ns)
	stop := storetest.Run(t, run)
	spec := &millracev1.Task{Queue: "images", Work: &millracev1.Task_Call{Call: &millracev1.Call{Handler: "resize", Payload: []byte(`{"w":300,"h":200}`)}}}
	raw, err := proto.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	out, err := st.Do(t.Context(), []*store.Change{{
		Move: task.Admit, ID: "r", In: task.Input{To: task.Queued}, Spec: spec, SpecBytes: raw,
		Guess: store.Snapshot{Record: task.Record{State: task.None}}, Created: time.Now(),
	}})
	if err != nil || !out[0].Done {
		t.Fatal(out, err)
	}
	storetest.Until(t, "succeeded", func() bool { return storetest.State(t, st, "r") == task.Succeeded })
	r, err := st.Record(t.Context(), "r")
	if err != nil || string(r.Ends[0].GetOutput()) != `{"W":100,"H":66}` {
		t.Errorf("%v %v", r, err)
	}
	stop()
	if n, err := redisCount(st.Client(), st.Keys().Workers()); err != nil || n != 0 {
		t.Errorf("%d workers left behind, %v", n, err)
	}
}

func redisCount(c *redis.Client, key string) (int64, error) {
	return c.ZCard(context.Background(), key).Result()
}
