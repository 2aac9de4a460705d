#!/usr/bin/env bash
# Capture one quant type.
#
#   shell/run_single_quant_type.sh TYPE [flags of 'qcollect run']
#   shell/run_single_quant_type.sh mxfp8
#   shell/run_single_quant_type.sh hifp8 --recipe tiny --target 100
#
# The captures go to enhanced_tensor_logs/TYPE, or to $TENSOR_SAVE_DIR/TYPE where that is set.
set -euo pipefail
# shellcheck source=_environment
source "$(dirname "${BASH_SOURCE[0]}")/_environment"

case ${1:-} in
-h | --help)
    usage
    exit
    ;;
"" | -*)
    usage >&2
    die 2 "the quant type comes first, like mxfp8, mxfp4, hifp8, bf16 or fp16"
    ;;
esac

find_qcollect
choose_out "${@:2}"
say "Capturing $1 into $out_dir/$1 (qcollect run $*)"
exec "$qcollect" run "$1" "${with_out[@]}" "${@:2}"
