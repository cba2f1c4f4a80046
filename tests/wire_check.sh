#!/usr/bin/env bash
# Runs the wire's tests under each protobuf that people's training environments pin.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
for version in 4.25.8 5.29.5 6.33.0 7.36.2; do
  place=.venv/protobuf-$version
  [ -d "$place" ] || "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$place" "protobuf==$version"
  PYTHONPATH=$place "$python" - "$version" <<'PY'
import sys

import google.protobuf

assert google.protobuf.__version__ == sys.argv[1], google.protobuf.__version__
PY
  echo "protobuf $version"
  PYTHONPATH=$place "$python" -m pytest -q -p no:cacheprovider -n 0 tests/unit/test_wire.py tests/unit/test_ingest.py
done
