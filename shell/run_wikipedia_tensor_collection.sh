#!/usr/bin/env bash
# The whole collection on Wikipedia: look whether model, data and disk are ready, capture bf16 and the recipe's
# quant types, show what is there.
#
#   shell/run_wikipedia_tensor_collection.sh [flags of 'qcollect sweep']
#   shell/run_wikipedia_tensor_collection.sh --recipe smollm2_135m_wikipedia
#
# Model and data are looked for where the recipe says, from the current directory: model/llama3.2-1b and
# dataset/wikipedia_processed/wikipedia_processed_text_document. The captures go to enhanced_tensor_logs, or to
# $TENSOR_SAVE_DIR where that is set; a folder a type. Called again, it skips what is complete.
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

say "1 of 3: looking for model and data, planning (qcollect sweep --all --baseline --dry-run${*:+ $*})"
plan=$("$qcollect" sweep --all --baseline --dry-run "${with_out[@]}" "$@")
printf '%s\n' "${plan##*$'\n'}" >&2 # the last line: number of runs, files and bytes

say "2 of 3: capturing into $out_dir, a folder a quant type (qcollect sweep --all --baseline${*:+ $*})"
"$qcollect" sweep --all --baseline "${with_out[@]}" "$@"

say "3 of 3: what is there (qcollect status $out_dir --once)"
"$qcollect" status "$out_dir" --once
