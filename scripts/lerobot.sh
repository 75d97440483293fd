#!/usr/bin/env bash
# Makes .venv-lerobot, an environment of its own for LeRobot (see lerobot.txt), and runs the tests of its policies there;
# arguments go to pytest. It needs some GB of disk. Exit code 75: uv cannot provide Python 3.12.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
uv=.venv/uv/bin/uv
! command -v uv >/dev/null || uv=uv
environment=${MMRL_LEROBOT:-.venv-lerobot}
stamp=$environment/.mmrl-setup
want=$(cat pyproject.toml constraints.txt scripts/lerobot.txt | sha256sum)
if ! [ -f "$stamp" ] || [ "$(cat "$stamp")" != "$want" ]; then
    made=75
    for python in 3.12 "$HOME"/.pyenv/versions/3.12*/bin/python; do  # uv fetches the first, or knows it already
        ! "$uv" venv --quiet --allow-existing --python "$python" "$environment" || { made=0; break; }
    done
    [ $made = 0 ] || exit $made
    "$uv" pip install --quiet --python "$environment/bin/python" --override scripts/lerobot.txt --constraint constraints.txt \
        --editable '.[dev,mujoco,lerobot]'
    echo "$want" > "$stamp"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
[ $# -gt 0 ] || set -- tests/policies/vla/test_lerobot_*.py
exec "$environment/bin/python" -m pytest -m 'slow or not slow' "$@"
