#!/bin/sh
# Play the contract against each of our executors, dialling and dialled. Ends with 0 when every rule is kept.
set -u
cd "$(dirname "$0")/.."
status=0

verify() {
    echo "=== $*"
    .venv/bin/rara executor verify "$@" || status=1
}

python="$PWD/.venv/bin/rara-executor --module rara_testing.probes"
verify --command "$python"
verify --command "$python" --direct
if command -v go >/dev/null; then
    probe=$(mktemp -d)
    trap 'rm -rf "$probe"' EXIT
    if (cd executors/go && go build -o "$probe/rara-go-probe" ./cmd/rara-go-probe); then
        verify --command "$probe/rara-go-probe"
        verify --command "$probe/rara-go-probe" --direct
    else
        status=1
    fi
else
    echo "left out: the Go executor: there is no \`go\` on the PATH"
fi
exit $status
