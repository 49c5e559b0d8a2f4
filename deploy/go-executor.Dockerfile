# The Go executor: a static program, and nothing else.
#
#     docker build -f deploy/go-executor.Dockerfile -t rara-go-executor .
#
# An executor of your own is built the same way, from its own `main`.

# By release here; `--build-arg GO=golang@sha256:...` pins it to the byte.
ARG GO=golang:1.26-bookworm

FROM ${GO} AS build
ENV CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS=-mod=readonly
WORKDIR /source/executors/go
# Modules are a layer of their own: a change of our code fetches none of them again.
COPY gen/go/go.mod gen/go/go.sum ../../gen/go/
COPY executors/go/go.mod executors/go/go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download
COPY gen/go ../../gen/go
COPY executors/go .
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    go build -trimpath -ldflags="-s -w" -o /image/bin/rara-go-executor ./cmd/rara-go-executor \
    && install -d /image/etc/ssl/certs /image/var/lib/rara/executor \
    && install -d -m 1777 /image/tmp \
    && cp /etc/ssl/certs/ca-certificates.crt /image/etc/ssl/certs/ \
    && chown 10001:10001 /image/var/lib/rara/executor

FROM scratch AS executor
COPY --from=build /image /
ENV RARA_EXECUTOR_DIR=/var/lib/rara/executor RARA_EXECUTOR_READY_FILE=/tmp/rara-executor-ready
USER 10001:10001
STOPSIGNAL SIGTERM
# There is no shell: the program itself looks.
HEALTHCHECK --interval=10s --timeout=10s --start-period=120s --start-interval=1s \
    CMD ["/bin/rara-go-executor", "ready"]
CMD ["/bin/rara-go-executor"]
