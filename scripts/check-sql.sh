#!/bin/sh
# Look for statements in the migrations that would lock, rewrite or lose what a running system uses.
#
# Left out: lock and statement timeouts, which the runner sets; int columns, which count attempts and steps.
set -eu
cd "$(dirname "$0")/.."
for file in db/migrations/*.sql; do
    transaction=--assume-in-transaction
    if grep -q '^-- migrate:up.*transaction:false' "$file"; then
        transaction=
    fi
    # shellcheck disable=SC2086 # nothing at all where it is empty
    sed '/^-- migrate:down/,$d' "$file" | .venv/bin/squawk $transaction --pg-version 15 --reporter gcc \
        --exclude require-lock-timeout,require-statement-timeout,prefer-bigint-over-int --stdin-filepath "$file"
done
