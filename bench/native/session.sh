#!/usr/bin/env bash
# Records what docs/native.md and the shipped tapes need of the Megatron model, on one idle H200, and checks the adapters:
#   bench/native/session.sh OUT CACHES [STAGE ...]        stages in this order unless named:
#     adapters  grouped adapters of any rank against float64, then their products by rank   ->  h200-lora.json
#     grid      ever-new sizes in fresh processes; leaves warm kernel caches in CACHES       ->  h200-grid.json
#     ranks     whole steps by rank                                                         ->  h200-lora.json
#     pairs     our step beside the same step by hand                                       ->  h200-pairs.json
#     tapes     steps of 4 and 8 layers, host-held, and plans of several subforwards        ->  tapes/*.json.gz
#     learning  repeats and a memorised batch, any kernels and kernels that repeat          ->  h200-learning*.json
#     model     speed and memory at 4, 16 and 40 layers                                     ->  h200-megatron.json
#     deep      steps of 16 and 40 layers                                                   ->  tapes/*.json.gz
# A stage that fails or overruns its limit is named and the next one begins; the exit code counts them.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(mkdir -p "$1" && cd "$1" && pwd) caches=$(mkdir -p "$2" && cd "$2" && pwd); shift 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
failed=0

within() { # SECONDS COMMAND...
  local limit=$1 began=$SECONDS; shift
  timeout --signal=TERM --kill-after=20 "$limit" "$@"; local code=$?
  echo "== exit $code after $((SECONDS - began)) s: $*"
  [ "$code" -eq 0 ] || failed=$((failed + 1))
}

warm() { # the caches that the grid experiment leaves
  local settings
  settings=$(python3 -c 'import pathlib, sys; from bench.native.grid import cache_environment
for each in cache_environment(pathlib.Path(sys.argv[1])).items(): print("export %s=%r" % each)' "$caches/grid") || exit 99
  eval "$settings"
}

for stage in "${@:-adapters grid ranks pairs tapes learning model deep}"; do for each in $stage; do
  [ "$each" = grid ] || [ "$each" = adapters ] || warm
  case $each in
    adapters)
      within 90 python3 -m pytest -q -m gpu tests/trainer_rank/megatron/test_megatron_cuda.py -k "float64 or nothing"
      within 120 python3 -m bench.native.lora "$out/h200-lora.json" products ;;
    grid) within 560 python3 -m bench.native.grid "$out/h200-grid.json" "$caches" ;;
    ranks) within 200 python3 -m bench.native.lora "$out/h200-lora.json" steps ;;
    pairs) within 200 python3 -m bench.native.pairs "$out/h200-pairs.json" 4 ;;
    tapes)
      within 240 python3 -m bench.native.tapes "$out/tapes" \
        "8:2x2048,2x8192,ragged4096,ragged8192,ragged8192+2x2048,2x2048+ragged8192+ragged4096:device,rerun,host"
      within 180 python3 -m bench.native.tapes "$out/tapes" "4:2x2048,2x32768,ragged16384:device,rerun" ;;
    learning)
      within 150 python3 -m bench.native.learning "$out/h200-learning.json"
      within 150 env NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 \
        python3 -m bench.native.learning "$out/h200-learning-deterministic.json" ;;
    model) within 240 python3 -m bench.native.megatron "$out/h200-megatron.json" ;;
    deep) within 200 python3 -m bench.native.tapes "$out/tapes" "16:2x2048,ragged8192" "40:2x2048,ragged8192:device" ;;
    *) echo "no stage $each"; failed=$((failed + 1)) ;;
  esac
done; done
exit "$failed"
