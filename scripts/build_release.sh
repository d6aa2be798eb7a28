#!/usr/bin/env bash
# Build the sdist and the wheel of a tag in dist/, with the repository's address in their metadata, and check them as PyPI does.
#   scripts/build_release.sh PYTHON URL TAG   (a Python with the `dev` extra; URL of the repository; TAG such as v0.2.0)
# The files come from the commit, not from the working tree, which does not change.
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
url=$2 tag=$3
cd "$(dirname "$0")/.."

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' runnerkit/version.py)
[ "$tag" = "v$version" ] || { echo "the tag is $tag, but runnerkit/version.py has $version" >&2; exit 1; }
grep -q "^## \[$version\] - " CHANGELOG.md || { echo "CHANGELOG.md lacks a section [$version] with a date" >&2; exit 1; }

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git archive HEAD | tar -x -C "$folder"
"$python" scripts/name_repository.py "$folder" "$url" "$tag"
rm -rf dist
"$python" -m build --no-isolation --outdir dist "$folder" >"$folder/build.log" 2>&1 || { cat "$folder/build.log" >&2; exit 1; }
"$python" -m twine check --strict dist/*
