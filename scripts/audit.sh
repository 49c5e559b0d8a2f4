#!/bin/sh
# Known vulnerabilities in what we depend on: Python's by the lock files, Go's by the functions that are really called.
#
# A finding fails. Where a database of advisories cannot be reached, or a tool is missing, that half is left out, and
# said. (The code itself is looked at by ruff's rules S, by go vet and by staticcheck.)
set -u
cd "$(dirname "$0")/.."
seconds=120

# Runs a tool; what it prints when it cannot reach its database is among $1.
audit() {
    unreachable=$1
    shift
    output=$(timeout "$seconds" "$@" 2>&1)
    status=$?
    if [ "$status" -eq 0 ] && unknown=$(echo "$output" | grep -c "could not be audited"); then
        echo "left out: audit by $(basename "$1") of $unknown packages of ${lock:-}, which its source does not know"
    elif [ "$status" -eq 0 ]; then
        echo "$output" | tail -n 1
    elif [ "$status" -eq 3 ] || echo "$output" | grep -qE '^Found [0-9]+ known vulnerabilit'; then # of either tool
        echo "$output" >&2
        return 1
    elif [ "$status" -eq 124 ] || echo "$output" | grep -qE "$unreachable"; then
        echo "left out: audit by $*: its advisories cannot be reached"
    else
        echo "$output" >&2
        return 1
    fi
}

failed=0
for lock in requirements/installer.lock requirements/runtime.lock requirements/dev.lock; do
    # --disable-pip: what is locked, hashes and all, is the whole of it.
    audit 'ConnectionError|ConnectTimeout|MaxRetryError|ServiceError|HTTP error|404 Client Error|Could not connect' \
        .venv/bin/pip-audit --progress-spinner off --timeout 10 --require-hashes --disable-pip -r "$lock" || failed=1
done
lock=
if command -v go >/dev/null; then
    cd executors/go
    audit 'dial tcp|no such host|lookup .*:|i/o timeout|proxyconnect|x509' go tool govulncheck ./... || failed=1
else
    echo "left out: audit by govulncheck: there is no \`go\` on the PATH"
fi
exit "$failed"
