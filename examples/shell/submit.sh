#!/bin/sh
# Submit a task to millrace with nothing but redis-cli. The answer is the id of the stream entry; the task's own id is
# derived from it unless the JSON names one ("id": "..."), and `millrace ps` shows it.
#
#   ./submit.sh                                    against 127.0.0.1:6379
#   REDIS_URL=redis://host:6379/0 ./submit.sh      against another Redis
#   docker-compose exec -T redis sh -s < submit.sh inside of docker-compose.yml
set -eu

redis-cli -u "${REDIS_URL:-redis://127.0.0.1:6379/0}" XADD tasks '*' json '{
  "name": "hello from the shell",
  "queue": "default",
  "timeout": "1m",
  "command": {"argv": ["echo", "hello from the shell"]}
}'
