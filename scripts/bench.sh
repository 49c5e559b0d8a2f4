#!/bin/sh
# Measure the product, the physical limit and peers in turn; the arguments are those of `python -m rara_bench`.
#
# In an environment of its own, .venv-bench: peers are no part of the product, and one of them needs Python 3.12.
set -eu
cd "$(dirname "$0")/.."
venv=.venv-bench

# The newest Python that is here; pyenv may have one that is not on the PATH.
newest_python() {
    for version in 3.14 3.13 3.12; do
        for candidate in "python$version" "$(pyenv root 2>/dev/null || true)"/versions/"$version".*/bin/python3; do
            if "$candidate" -c 'import venv' 2>/dev/null; then
                echo "$candidate"
                return
            fi
        done
    done
    echo python3
}

if ! [ "$venv/.bench" -nt requirements/bench.lock ]; then
    PYTHON=${PYTHON:-$(newest_python)} scripts/setup.sh bench "$venv"
fi
PYTHONPATH=$PWD/bench${PYTHONPATH:+:$PYTHONPATH} exec "$venv/bin/python" -m rara_bench "$@"
