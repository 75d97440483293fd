#!/usr/bin/env bash
# Set up .venv if need be and run the tests; arguments go to pytest (for the long ones: bash scripts/test.sh -m slow).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
.venv/bin/ruff check mmrl tasks sims tests scripts
.venv/bin/ruff format --check --quiet mmrl tasks sims tests scripts
.venv/bin/mypy
exec .venv/bin/python -m pytest "$@"
