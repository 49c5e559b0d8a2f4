#!/bin/sh
# Generate the Python stubs (and, where Go is, the Go ones) from api/proto.
#
#     scripts/proto.sh [OUTPUT]     OUTPUT: the folder that gets python/ and go/, by default gen
#
# Go's generators are those of the tool directives in executors/go/go.mod.
set -eu
cd "$(dirname "$0")/.."
output=${1:-gen}
bin=$PWD/.venv/bin
go_bin=$PWD/.cache/go/bin
export PATH="$bin:$go_bin:$PATH"

set -- --python_out="$output/python" --grpc_python_out="$output/python" \
    --mypy_out=quiet:"$output/python" --mypy_grpc_out=only_async,quiet:"$output/python"
mkdir -p "$output/python" "$output/go"
if command -v go >/dev/null; then
    (cd executors/go && GOBIN=$go_bin GOFLAGS=-mod=readonly go install tool)
    module=github.com/rara-run/rara/gen/go
    set -- "$@" --go_out="$output/go" --go_opt=module=$module \
        --go-grpc_out="$output/go" --go-grpc_opt=module=$module
else
    echo "proto: no go on the PATH, the Go stubs are left as they are" >&2
fi
# shellcheck disable=SC2046 # the names hold no spaces
"$bin/python" -m grpc_tools.protoc -I api/proto "$@" $(cd api/proto && find rara -name '*.proto' | LC_ALL=C sort)
