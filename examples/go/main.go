// Command go submits a task to millrace as binary Protobuf, which saves the dispatcher the JSON and the producer every
// misspelt field name. It needs go-redis and the generated messages, and nothing else of millrace.
//
//	go run ./examples/go                    runs: echo hello from go
//	go run ./examples/go python3 train.py   runs what you name
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

func main() {
	argv := os.Args[1:]
	if len(argv) == 0 {
		argv = []string{"echo", "hello from go"}
	}
	entry, err := submit(context.Background(), redisURL(), argv)
	if err != nil {
		fmt.Fprintf(os.Stderr, "submit: %v\n", err)
		os.Exit(1)
	}
	fmt.Println(entry)
}

func redisURL() string {
	if url := os.Getenv("MILLRACE_REDIS_URL"); url != "" {
		return url
	}
	return "redis://127.0.0.1:6379/0"
}

// submit adds one task to the public stream and returns the id of its entry. The task's own id is derived from that
// entry, because the task names none.
func submit(ctx context.Context, url string, argv []string) (string, error) {
	options, err := redis.ParseURL(url)
	if err != nil {
		return "", fmt.Errorf("MILLRACE_REDIS_URL: %w", err)
	}
	// A client that repeats an XADD whose answer was lost submits twice. Repeat yourself, with a task that has an id.
	options.MaxRetries = -1
	client := redis.NewClient(options)
	defer client.Close()

	task, err := proto.Marshal(&millracev1.Task{
		Name:    "hello from go",
		Timeout: durationpb.New(10 * time.Minute),
		Work:    &millracev1.Task_Command{Command: &millracev1.Command{Argv: argv}},
	})
	if err != nil {
		return "", fmt.Errorf("encode task: %w", err)
	}
	return client.XAdd(ctx, &redis.XAddArgs{Stream: "tasks", Values: []any{"task", task}}).Result()
}
