#!/usr/bin/env bash
# What only a GPU can show, on one device: scripts/gpu_proof.sh [PART ...]
#
# Needs a CUDA PyTorch with numpy, scipy, psutil and pytest, and this checkout: no Horovod, no installation. The parts
# are tests curve stopwatch memory unequal overhead beside, by default all of them, and horovod, which needs a Horovod with NCCL
# (see benchmarks/gpu). Each takes a few minutes at most and can be run alone. Tables go to benchmarks/results/gpu. With
# GPU_PROOF_DEVICE=cpu all but the curve runs in small without a GPU, and nothing is stored. GPU_PROOF_BACKEND is what two
# ranks talk by: gloo, or, with NCCL 2.30 or later, cpu:gloo,cuda:nccl.
set -u
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
device="${GPU_PROOF_DEVICE:-cuda}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
options=(--device "$device" --backend "${GPU_PROOF_BACKEND:-gloo}")
[ "$device" = cuda ] && options+=(--write)
[ $# = 0 ] && set -- tests curve stopwatch memory unequal overhead beside

failed=()
for part in "$@"; do
    begin=$SECONDS
    case "$part" in
        curve) [ "$device" = cpu ] || "$python" benchmarks/gpu/curve.py --write ;;
        *) "$python" benchmarks/gpu/proof.py "$part" "${options[@]}" ;;
    esac || failed+=("$part")
    echo "$part: $((SECONDS - begin)) s"
done
echo "gpu proof on $device: ${#failed[@]} of $# parts failed ${failed[*]}"
[ ${#failed[@]} = 0 ]
