# The Go executor: a static program, and nothing else.
#
#     docker build -f deploy/go-executor.Dockerfile -t rara-go-executor .
#
# An executor of your own is built the same way, from its own `main`.

FROM golang:1.26-bookworm AS build
ENV CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS=-mod=readonly
WORKDIR /source/executors/go
COPY gen/go ../../gen/go
COPY executors/go .
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    go build -trimpath -ldflags="-s -w" -o /image/bin/rara-go-executor ./cmd/rara-go-executor \
    && install -d /image/etc/ssl/certs /image/var/lib/rara/executor \
    && cp /etc/ssl/certs/ca-certificates.crt /image/etc/ssl/certs/ \
    && chown 10001:10001 /image/var/lib/rara/executor

FROM scratch AS executor
COPY --from=build /image /
ENV RARA_EXECUTOR_DIR=/var/lib/rara/executor
USER 10001:10001
STOPSIGNAL SIGTERM
CMD ["/bin/rara-go-executor"]
