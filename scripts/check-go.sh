#!/bin/sh
# Style and mistakes in the Go code: gofmt, go vet, staticcheck.
set -eu
cd "$(dirname "$0")/../executors/go"
unformatted=$(gofmt -l . ../../bench/river)
if [ -n "$unformatted" ]; then
    echo "gofmt would change:" >&2
    echo "$unformatted" >&2
    exit 1
fi
set -x
go vet ./...
go tool staticcheck ./...
cd ../../gen/go
go vet ./...
