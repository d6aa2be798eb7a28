#!/usr/bin/env bash
# Build Horovod 0.28.1 from its PyPI source for the torch of a given Python, and install it; cached wheels are reused.
#
# usage: scripts/install_horovod.sh [PYTHON]     (default: .venv/bin/python)
#
# Requires g++ and make. If Open MPI's compiler is on the PATH (Debian: libopenmpi-dev openmpi-bin), MPI is included beside
# Gloo. The wheel is cached in ${HOROVOD_WHEELS:-~/.cache/runnerkit/horovod}; building takes 6 minutes on 2 idle cores.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(realpath -s "${1:-.venv/bin/python}")
version=0.28.1
torch=$("$python" -c 'import torch; print(torch.__version__)')
tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
compiler=$(g++ -dumpfullversion 2>/dev/null || echo -none)
if command -v mpicxx >/dev/null; then mpi=1 name=mpi; else mpi=0 name=gloo; fi
wheels=${HOROVOD_WHEELS:-${XDG_CACHE_HOME:-$HOME/.cache}/runnerkit/horovod}/torch-$torch-$tag-$name-gcc$compiler

if ! compgen -G "$wheels/*.whl" >/dev/null; then
    for tool in g++ make; do
        command -v $tool >/dev/null || { echo "building Horovod needs $tool; on Debian: apt-get install g++ make" >&2; exit 1; }
    done
    build=$(mktemp -d)
    trap 'rm -rf "$build"' EXIT
    "$python" -m pip install --quiet -c constraints.txt numpy 'setuptools<85' wheel 'cmake<4' packaging psutil cloudpickle pyyaml cffi
    "$python" -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation --dest "$build" "horovod==$version"
    tar -xzf "$build/horovod-$version.tar.gz" -C "$build"
    # Torch's headers are C++17; this Horovod sets 14 in two places, which must agree or linking fails.
    sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' \
        "$build/horovod-$version/CMakeLists.txt" "$build/horovod-$version/horovod/torch/CMakeLists.txt"
    echo "building Horovod $version for torch $torch (with MPI: $mpi); this takes several minutes"
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 \
        HOROVOD_WITH_MPI=$mpi HOROVOD_WITHOUT_MPI=$((1 - mpi)) HOROVOD_CPU_OPERATIONS=GLOO \
        HOROVOD_CMAKE=$(dirname "$python")/cmake MAKEFLAGS=-j$(nproc) \
        "$python" -m pip wheel --no-deps --no-build-isolation --wheel-dir "$build/wheel" "$build/horovod-$version" \
        >"$build/log" 2>&1 || { tail -n 60 "$build/log" >&2; exit 1; }
    mkdir -p "$(dirname "$wheels")"
    beside=$(mktemp -d "$wheels.XXXXXX")
    mv "$build"/wheel/*.whl "$beside"
    mv -T "$beside" "$wheels" || rm -r "$beside"  # atomic: another run may have finished first
fi
"$python" -m pip install --quiet -c constraints.txt cloudpickle psutil pyyaml cffi packaging
"$python" -m pip install --quiet --no-deps --force-reinstall "$wheels"/*.whl
"$python" -c 'import horovod.torch as hvd; print("Horovod is installed; Gloo:", bool(hvd.gloo_built()), "MPI:", bool(hvd.mpi_built()))'
