#!/usr/bin/env bash
# ik_llama.cpp as ik-llama-cpp-python's source distribution carries it: its own server and tools, compiled for this CPU.
# It reads llama.cpp's models, so set that up too. usage: setup_ikllamacpp.sh [JOBS]
set -euo pipefail
cd "$(dirname "$0")"
jobs=${1:-$(nproc)}
venv=$PWD/.venvs/ikllamacpp
sdist=ik_llama_cpp_python-0.1.5

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
if [ ! -d "$venv/$sdist" ]; then
  "$venv/bin/python" -m pip download -q --no-deps --no-binary ik-llama-cpp-python -d "$venv" ik-llama-cpp-python==0.1.5
  tar -xzf "$venv/$sdist.tar.gz" -C "$venv"
fi
source=$venv/$sdist/vendor/ik_llama.cpp
# The source distribution lacks the script that writes down which build it is.
mkdir -p "$source/common/cmake"
cat >"$source/common/cmake/build-info-gen-cpp.cmake" <<'END'
set(BUILD_NUMBER 0)
set(BUILD_COMMIT sdist)
set(folder "${CMAKE_CURRENT_LIST_DIR}/..")
configure_file("${folder}/build-info.cpp.in" "${folder}/build-info.cpp")
END
cmake -S "$source" -B "$venv/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
  -DGGML_OPENMP=ON -DGGML_IQK_FA_ALL_QUANTS=OFF -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF >/dev/null
cmake --build "$venv/build" -j "$jobs" --target llama-server llama-bench
