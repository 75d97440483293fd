#!/usr/bin/env bash
# What setup.sh needs of the system, by apt-get: the libraries that off-screen rendering and opencv load, and the browser
# in which tests open reports. Instant and silent when they are there. Where they cannot be installed it says so in one line
# and goes on: tests that need them say what they skip.
set -euo pipefail

as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo --non-interactive)

# wanted WHO PACKAGE...: apart from one another, so that a browser that a system has not keeps nobody from rendering.
wanted() {
    local who=$1 package why="no root and no sudo" log missing=()
    shift
    for package in "$@"; do
        [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    if command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || sudo --non-interactive true 2>/dev/null; }; then
        log=$(mktemp)
        install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "${missing[@]}")
        if { "${install[@]}" || { "${as_root[@]}" apt-get update && "${install[@]}"; }; } >"$log" 2>&1; then
            rm "$log"
            return 0
        fi
        why="apt-get says $(grep --max-count=1 '^E:' "$log" || echo nothing)"
        rm "$log"
    fi
    echo "$who needs packages that could not be installed ($why): sudo apt-get install ${missing[*]}" >&2
}

wanted Rendering libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6 libgl1
[ -n "$(command -v chromium chromium-browser google-chrome || true)" ] || wanted "The test of reports in a browser" chromium
