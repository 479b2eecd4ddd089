#!/bin/sh
# run.sh PYTHON ARGUMENTS...: runs run.py with that Python; where there is none, ends as a test that
# is skipped (status 77).
python=$1
shift
if ! command -v "$python" >/dev/null 2>&1; then
  echo "parity: skipped: there is no Python at $python to compare with; scripts/bootstrap.sh brings one with torch"
  exit 77
fi
exec "$python" "$(dirname "$0")/run.py" "$@"
