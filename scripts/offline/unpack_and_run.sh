#!/bin/sh
# Unpack what pack.py packed and run autotune, with no network and without touching the host's packages.
#
#   sh unpack_and_run.sh [--pack FILE] [--into DIR] [--python PYTHON] [--] AUTOTUNE-ARGUMENTS...
#   sh unpack_and_run.sh -- run --gpu h200 --budget 9m
#
# FILE defaults to pack.tar.xz beside this script, DIR to $TMPDIR/autotune-offline. A pack that is already
# unpacked there is not unpacked again. Without arguments it only unpacks. --python-arguments instead of --
# hands the rest to Python itself, to run a script with the same paths.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
pack=$here/pack.tar.xz
into=${TMPDIR:-/tmp}/autotune-offline
python=python3
mode=autotune
while [ $# -gt 0 ]; do
    case $1 in
    --pack | --into | --python)
        [ $# -ge 2 ] || { echo "unpack_and_run: $1 needs a value" >&2; exit 2; }
        case $1 in --pack) pack=$2 ;; --into) into=$2 ;; --python) python=$2 ;; esac
        shift 2 ;;
    --) shift; break ;;
    --python-arguments) mode=python; shift; break ;;
    *) break ;;
    esac
done
[ -f "$pack" ] || { echo "unpack_and_run: no pack at $pack: give it with --pack" >&2; exit 2; }
command -v "$python" >/dev/null || { echo "unpack_and_run: no $python here: give one with --python" >&2; exit 2; }

mkdir -p "$into"
into=$(CDPATH='' cd -- "$into" && pwd)
# what runs wrote there (a database, tables) survives: a pack without a database goes on with what this host has
mark=$("$python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$pack")
if [ "$(cat "$into/unpacked" 2>/dev/null || true)" != "$mark" ]; then
    rm -rf "$into/unpacked" "$into/fresh" "$into/site" "$into/project" "$into/kernels"
    mkdir "$into/fresh"
    "$python" - "$pack" "$into/fresh" <<'PYTHON'
import sys
import tarfile

try:
    with tarfile.open(sys.argv[1]) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(sys.argv[2])
except (OSError, EOFError, tarfile.TarError) as error:
    sys.exit(f"unpack_and_run: {sys.argv[1]} cannot be unpacked ({error}): copy it again")
PYTHON
    "$python" "$into/fresh/project/scripts/offline/unpack.py" "$into/fresh" "$into"
    rm -rf "$into/fresh"
    echo "$mark" >"$into/unpacked"
fi

PYTHONPATH="$into/project:$into/site${PYTHONPATH:+:$PYTHONPATH}"
# nothing can be fetched here: a library that tries would hang or fail late
FLASHINFER_NO_DOWNLOAD=1
export PYTHONPATH FLASHINFER_NO_DOWNLOAD
if [ $# -eq 0 ]; then
    echo "unpack_and_run: ready in $into; PYTHONPATH=$PYTHONPATH" >&2
    exit 0
fi
[ "$mode" = autotune ] || exec "$python" "$@"
exec "$python" -c 'from autotune.cli.main import main; raise SystemExit(main())' "$@"
