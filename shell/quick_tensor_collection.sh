#!/usr/bin/env bash
# Capture the recipe's quant types, mxfp8, mxfp4 and hifp8, one after the other.
#
#   shell/quick_tensor_collection.sh [flags of 'qcollect sweep']
#   shell/quick_tensor_collection.sh --recipe tiny
#
# The captures go to enhanced_tensor_logs, or to $TENSOR_SAVE_DIR where that is set; a folder a type.
# Called again, it skips what is complete.
set -euo pipefail
# shellcheck source=_environment
source "$(dirname "${BASH_SOURCE[0]}")/_environment"

case ${1:-} in -h | --help)
    usage
    exit
    ;;
esac

find_qcollect
choose_out "$@"
say "Capturing into $out_dir, a folder a quant type (qcollect sweep --all${*:+ $*})"
exec "$qcollect" sweep --all "${with_out[@]}" "$@"
