#!/bin/sh
# The long repeats: the tests marked `soak` once, then every fault test of docs/evidence.md again and again.
#
#     scripts/soak.sh ROUNDS [PYTEST ARGUMENT...]
#
# Ends at the first failure, and says in which round it was.
set -eu
cd "$(dirname "$0")/.."
rounds=$1
shift
started=$(date +%s)

echo "=== the long tests"
.venv/bin/python -m pytest -m soak "$@"

round=0
while [ "$round" -lt "$rounds" ]; do
    round=$((round + 1))
    echo "=== fault tests, round $round of $rounds, $(($(date +%s) - started)) s so far"
    .venv/bin/python -m pytest -q -m "case and not soak" "$@" || {
        status=$?
        echo "soak: failed in round $round of $rounds" >&2
        exit $status
    }
done
echo "soak: $rounds rounds without a failure in $(($(date +%s) - started)) s"
