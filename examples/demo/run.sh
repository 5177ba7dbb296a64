#!/usr/bin/env bash
# The demo from prepared text to a verified export; `make demo` installs first. Run from the root of the repository.
# BIN: where hp and its Python are. STARTED: when it all began, in seconds since 1970.
set -euo pipefail

BIN=${BIN:-.venv/bin}
STARTED=${STARTED:-$(date +%s)}
OUT=outputs/demo
times=()
last=$STARTED

# Ends one part of the demo and begins the next.
lap() {
  local now
  now=$(date +%s)
  times+=("$1=$((now - last))")
  last=$now
}

lap installation
rm -rf "$OUT"

echo "== text, tokenizer, model configuration"
"$BIN/python" examples/demo/prepare.py "$OUT"
lap preparation

echo "== training on 4 processes"
OMP_NUM_THREADS=1 "$BIN/hp" run examples/demo/train.yaml --nproc-per-node 4
lap training

echo "== export to a HuggingFace folder"
checkpoint=$(echo "$OUT"/run/checkpoints/step-*)
"$BIN/hp" export "$checkpoint" "$OUT/export"
lap export

echo "== the export in plain transformers"
"$BIN/python" examples/demo/verify.py examples/demo/train.yaml "$checkpoint" "$OUT/export" "$STARTED" "${times[@]}"
