#!/usr/bin/env python3
"""Submit a task to millrace with nothing but redis-py, then wait for it over the HTTP API.

    pip install redis
    python3 submit.py                       # runs: echo hello from python
    python3 submit.py python3 train.py      # runs what you name

MILLRACE_REDIS_URL (redis://127.0.0.1:6379/0), MILLRACE_SERVER (http://127.0.0.1:8080) and MILLRACE_TOKEN are read from
the environment. Submitting needs Redis alone; the API is only for waiting.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
import uuid

import redis


def submit(connection, argv):
    """Add a task to the public stream and return its id. Every field but the command is optional."""
    task = {
        # An id of our own makes the submit repeatable: the same task added twice runs once.
        "id": "py-%s" % uuid.uuid4(),
        "name": "hello from python",
        "priority": "high",
        "timeout": "10m",
        "retry": {"maxAttempts": 3},
        "command": {"argv": argv},
    }
    connection.xadd("tasks", {"json": json.dumps(task)})
    return task["id"]


def call(method, body):
    """Call the API: a POST of JSON, answered with JSON."""
    request = urllib.request.Request(
        os.environ.get("MILLRACE_SERVER", "http://127.0.0.1:8080") + "/millrace.v1.TaskService/" + method,
        data=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    if os.environ.get("MILLRACE_TOKEN"):
        request.add_header("Authorization", "Bearer " + os.environ["MILLRACE_TOKEN"])
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def wait(task_id):
    """Return the task when it has ended. For a moment after the submit the API may not know it yet."""
    unknown_until = time.monotonic() + 10
    while True:
        try:
            answer = call("WaitTask", {"id": task_id, "timeout": "30s"})
        except urllib.error.HTTPError as problem:
            if problem.code != 404 or time.monotonic() > unknown_until:
                raise
            time.sleep(0.1)
            continue
        if answer.get("done"):
            return answer["task"]


def main():
    argv = sys.argv[1:] or ["echo", "hello from python"]
    connection = redis.Redis.from_url(os.environ.get("MILLRACE_REDIS_URL", "redis://127.0.0.1:6379/0"))
    task_id = submit(connection, argv)
    print("submitted", task_id, flush=True)
    task = wait(task_id)
    print("ended:", task["state"], task.get("message", ""))
    return 0 if task["state"] == "succeeded" else task.get("exitCode") or 1


if __name__ == "__main__":
    sys.exit(main())
