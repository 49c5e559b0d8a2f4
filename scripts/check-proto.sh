#!/bin/sh
# Fail when the committed stubs differ from what the contract generates, or when the contract breaks its own rules.
set -eu
cd "$(dirname "$0")/.."
mkdir -p .cache
fresh=$(mktemp -d .cache/proto.XXXXXX)
trap 'rm -rf "$fresh"' EXIT

scripts/proto.sh "$fresh"
status=0
diff -r -q -x __pycache__ -x py.typed "$fresh/python" gen/python || status=1
if command -v go >/dev/null; then
    diff -r -q -x go.mod -x go.sum "$fresh/go" gen/go || status=1
fi
if [ $status -ne 0 ]; then
    echo "check: gen/ is not what api/proto generates: run \`make proto\` and commit the result" >&2
    exit 1
fi

.venv/bin/buf lint
# The last release; before the first one, the parent commit.
base=$(git describe --tags --abbrev=0 2>/dev/null || git rev-parse -q --verify HEAD~1 || true)
if [ -n "$base" ] && git cat-file -e "$base:buf.yaml" 2>/dev/null; then
    before=$fresh/before
    mkdir "$before"
    git archive "$base" buf.yaml api/proto | tar -x -C "$before"
    .venv/bin/buf breaking --against "$before"
else
    echo "check: no earlier contract here to compare with, buf breaking is left out" >&2
fi
