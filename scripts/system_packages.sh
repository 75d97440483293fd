#!/usr/bin/env bash
# The system libraries that off-screen rendering and opencv load, by apt-get. Instant and silent when they are there.
# Where they cannot be installed it says so in one line and goes on: tests that need them say what they skip.
set -euo pipefail

packages=(libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6 libgl1)
missing=()
for package in "${packages[@]}"; do
    [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

why="no root and no sudo"
as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo --non-interactive)
if command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || sudo --non-interactive true 2>/dev/null; }; then
    log=$(mktemp)
    install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "${missing[@]}")
    if { "${install[@]}" || { "${as_root[@]}" apt-get update && "${install[@]}"; }; } >"$log" 2>&1; then
        rm "$log"
        exit 0
    fi
    why="apt-get says $(grep --max-count=1 '^E:' "$log")"
    rm "$log"
fi
echo "Rendering needs packages that could not be installed ($why): sudo apt-get install ${missing[*]}" >&2
