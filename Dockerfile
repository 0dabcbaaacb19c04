# Two images out of one file, in the plain format that the legacy builder understands too:
#   docker build --target millrace -t millrace .        dispatcher, reaper, logsink and the command line
#   docker build --target agent    -t millrace-agent .  the same binary beside python3, where tasks run
# Other tools for your tasks: write a Dockerfile that starts FROM millrace-agent, or copy /usr/local/bin/millrace,
# which is static, into an image of yours.

FROM golang:1.26-bookworm AS build
WORKDIR /src
# The modules first: this layer is built again only when they change.
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=dev
# timetzdata: the time zones of schedules, which slim images do not carry.
# /out is what both images add to their base. The compiler's cache is not kept: it would make this layer huge.
RUN CGO_ENABLED=0 GOCACHE=/tmp/cache go build -trimpath -buildvcs=false -tags timetzdata \
    -ldflags "-s -w -X main.version=${VERSION}" -o /out/usr/local/bin/millrace ./cmd/millrace \
 && install -D -m 0644 /etc/ssl/certs/ca-certificates.crt /out/etc/ssl/certs/ca-certificates.crt \
 && rm -rf /tmp/cache

FROM debian:bookworm-slim AS millrace
# The log directory has its owner before a volume is mounted there, so that a new named volume takes it over.
RUN groupadd --gid 10001 millrace \
 && useradd --uid 10001 --gid 10001 --home-dir /var/lib/millrace --shell /usr/sbin/nologin millrace \
 && install -d -o millrace -g millrace -m 0750 /var/lib/millrace /var/lib/millrace/logs
COPY --from=build /out/ /
ENV MILLRACE_OPS_ADDR=127.0.0.1:9100
WORKDIR /var/lib/millrace
# A number, so that a cluster that forbids root can check it without reading /etc/passwd.
USER 10001:10001
HEALTHCHECK --interval=5s --timeout=5s --start-period=15s --retries=3 CMD ["millrace", "healthcheck"]
ENTRYPOINT ["millrace"]
CMD ["help"]

FROM python:3.11-slim-bookworm AS agent
RUN groupadd --gid 10001 millrace \
 && useradd --uid 10001 --gid 10001 --home-dir /var/lib/millrace --shell /usr/sbin/nologin millrace \
 && install -d -o millrace -g millrace -m 0750 /var/lib/millrace /var/lib/millrace/state
COPY --from=build /out/ /
COPY --chown=10001:10001 examples/qlearning /opt/millrace/examples/qlearning
ENV MILLRACE_OPS_ADDR=127.0.0.1:9100
WORKDIR /var/lib/millrace
USER 10001:10001
HEALTHCHECK --interval=5s --timeout=5s --start-period=15s --retries=3 CMD ["millrace", "healthcheck"]
ENTRYPOINT ["millrace"]
CMD ["agent"]
