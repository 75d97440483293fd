#!/usr/bin/env bash
# Set up .venv if need be and run the tests; arguments go to pytest (for the slow ones: bash scripts/test.sh -m slow).
# Without arguments a slice of the slow tests follows, another one for each commit: all of them within a dozen.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
# Tests start processes of their own; two threads each on two cores spin against one another and take ten times as long.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
.venv/bin/ruff check mmrl tasks sims tests scripts
.venv/bin/ruff format --check --quiet mmrl tasks sims tests scripts
# mypy does not follow package-dir: it is given the packages as they are installed, as a tree of links.
rm -rf build/types && mkdir -p build/types/mmrl
ln -s "$PWD"/mmrl/* "$PWD/tasks" "$PWD/sims" build/types/mmrl/
.venv/bin/mypy
# Files are taken in the order that tests/conftest.py gives them, the longest first.
pytest=(.venv/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder)
if [ $# -gt 0 ]; then
    exec "${pytest[@]}" "$@"
fi
"${pytest[@]}"
slices=12
commits=$(git rev-list --count HEAD 2>/dev/null || echo 0)  # 0: an archive, without git
slice=$((commits % slices))
echo "slow tests, slice $slice of $slices: bash scripts/test.sh -m slow --slice $slice/$slices"
exec "${pytest[@]}" -m slow --slice "$slice/$slices"
