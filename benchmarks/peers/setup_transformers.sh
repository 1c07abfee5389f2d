#!/usr/bin/env bash
# transformers on torch for CPUs.
set -euo pipefail
cd "$(dirname "$0")"
venv=.venvs/transformers
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install -q torch==2.13.0 transformers==5.23.0
