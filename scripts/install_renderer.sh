#!/usr/bin/env bash
# A software Vulkan driver for ManiSkill (Mesa's llvmpipe), for machines without a GPU: unpacked into a private folder,
# ${MMRL_VULKAN:-~/.cache/mmrl/vulkan}, which mmrl finds by itself. Nothing is installed, no root is needed. Packages come
# from wherever this machine's apt gets its own; on Debian 12 from its backports, since Mesa 22 is too old for SAPIEN.
set -euo pipefail

target=${MMRL_VULKAN:-${XDG_CACHE_HOME:-$HOME/.cache}/mmrl/vulkan}
[ ! -f "$target/icd.json" ] || exit 0
command -v apt-get >/dev/null || { echo "install_renderer.sh needs apt-get; install Mesa 24 or later with your package manager" >&2; exit 1; }

. /etc/os-release
suite=$VERSION_CODENAME
[ "$VERSION_CODENAME" != bookworm ] || suite=bookworm-backports
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{parts,lists/partial,cache/archives/partial,root,keep}

# The same mirror and key as the release itself, found in apt's own configuration.
mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' \
    | awk -v release="$VERSION_CODENAME" '$2 == release && $3 == "main" { print $1; exit }')
[ -n "$mirror" ] || { echo "apt's sources name no mirror of $VERSION_CODENAME main" >&2; exit 1; }
key=$(find /usr/share/keyrings /etc/apt/keyrings -name "${ID}-archive-keyring.[gp][pg][gp]" 2>/dev/null | head -1)
printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\n%s\n' "$mirror" \
    "$(printf '%s\n' "$VERSION_CODENAME" "$suite" | sort -u | xargs)" "${key:+Signed-By: $key}" > "$work/parts/mirror.sources"

apt=(apt-get --quiet=2 -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$work/parts" -o Dir::State::lists="$work/lists"
    -o Dir::Cache="$work/cache" -o Debug::NoLocking=1 -o APT::Sandbox::User="" -o Acquire::Retries=3)
"${apt[@]}" update
# What would be installed, given what this machine has: the driver and those of its libraries that are missing or too old.
"${apt[@]}" --yes --no-install-recommends --reinstall --download-only install "mesa-vulkan-drivers/$suite"
for package in "$work"/cache/archives/*.deb; do
    dpkg -x "$package" "$work/root"
done
find "$work/root" -name '*.so*' ! -name 'libvulkan*' ! -name 'libVkLayer*' -exec cp --no-dereference {} "$work/keep" \;
find "$work/root" -name 'libvulkan_lvp.so' -exec cp {} "$work/keep" \;
[ -f "$work/keep/libvulkan_lvp.so" ] || { echo "mesa-vulkan-drivers of $suite holds no software driver" >&2; exit 1; }
printf '{"file_format_version": "1.0.0", "ICD": {"library_path": "%s", "api_version": "1.3.0"}}\n' \
    "$target/libvulkan_lvp.so" > "$work/keep/icd.json"
mkdir -p "$(dirname "$target")"
rm -rf "$target"
mv "$work/keep" "$target"
echo "software Vulkan driver in $target ($(du -sh "$target" | cut -f1))"
