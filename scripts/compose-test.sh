#!/bin/sh
# The shipped images and compose file on a container engine: build, up, the example to its end, stops, kills, pauses,
# cut networks, a rolling restart, down.
#
#     scripts/compose-test.sh [PYTEST ARGUMENT...]
set -eu
cd "$(dirname "$0")/.."
if ! docker info >/dev/null 2>&1; then
    echo "compose-test: no container engine answers \`docker info\`" >&2
    exit 1
fi
if ! docker compose version >/dev/null 2>&1; then
    echo "compose-test: \`docker compose\` is missing: install Docker's compose plugin" >&2
    exit 1
fi
exec .venv/bin/python -m pytest tests/containers "$@"
