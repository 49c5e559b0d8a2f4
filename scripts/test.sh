#!/bin/sh
# Run the tests of every language that is here, and say at the end what was left out.
#
#     scripts/test.sh [PYTEST ARGUMENT...]
set -u
cd "$(dirname "$0")/.."
.venv/bin/python -m pytest "$@"
status=$?

left_out=
if [ -z "$(find executors/go gen/go -name '*_test.go' 2>/dev/null)" ]; then
    left_out="go test: there are no Go tests yet"
elif ! command -v go >/dev/null; then
    left_out="go test: there is no \`go\` on the PATH"
else
    race=
    if command -v cc >/dev/null; then race=-race; fi # the race detector is linked by C's tools
    (cd executors/go && go test $race ./...) || status=1
fi
if [ -n "$left_out" ]; then
    echo "left out: $left_out"
fi
exit $status
