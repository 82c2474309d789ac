#!/usr/bin/env bash
# The quickstart: synthetic speech -> SFT of a small Qwen3-ASR-shaped model on clean voices -> GRPO on noisy speech in
# other voices, encoder frozen -> both evaluated on the same held-out sets -> export reloaded by transformers alone.
# About 8 minutes on two idle CPU cores, twice that on slow or busy ones. No hub, no GPU.
#
#   ./run_train.sh                                         # this recipe
#   ./run_train.sh recipes/asr/quickstart.sh --control     # also SFT continued on the noisy utterances, same time
#   SEED=1 RUN=runs/quickstart_1 ./run_train.sh            # another corpus
#   ./run_train.sh recipes/asr/quickstart.sh --algo.kl.init_coef 0.01    # flags of `speechrl train`
set -euo pipefail

RUN=${RUN:-runs/quickstart}
SEED=${SEED:-0}          # of corpus, weights, data order and sampling
SCALE=${SCALE:-1.0}      # of the corpus
SFT_STEPS=${SFT_STEPS:-600}
GRPO_STEPS=${GRPO_STEPS:-200}
RANKS=${RANKS:-2}        # one CPU process each

control=no
flags=()
for argument in "$@"; do
  if [ "$argument" = --control ]; then control=yes; else flags+=("$argument"); fi
done

mkdir -p "$RUN"
: > "$RUN/seconds.tsv"
stage() {  # stage NAME COMMAND...: run it, say so, note its seconds
  local name=$1 started=$SECONDS
  shift
  echo "== $name"
  "$@"
  printf '%s\t%s\n' "$name" "$((SECONDS - started))" >> "$RUN/seconds.tsv"
}

ranks=(--actor.num_ranks "$RANKS" --actor.device cpu --ds.param_dtype fp32 --ds.zero_stage 0 --train.seed "$SEED")
sft=(--actor.adam.weight_decay 0.01 --actor.adam.betas 0.9 0.98 --actor.lr_scheduler cosine --actor.lr_warmup_ratio 0.08
  --train.batch_size 32 --train.micro_batch_size 16 --tracking.sample_steps 50 --ckpt.overwrite)
corpus=$RUN/corpus

stage synth speechrl synth --out "$corpus" --seed "$SEED" --scale "$SCALE" --model_out "$RUN/model"

# from scratch: the CTC loss teaches the encoder to align, its head is thrown away
stage sft speechrl sft "${ranks[@]}" "${sft[@]}" \
  --actor.model_name_or_path "$RUN/model" --actor.freeze --actor.adam.lr 3e-3 \
  --data.prompt_dataset "$corpus/sft_train.jsonl" --sft.ctc_weight 0.5 \
  --train.max_steps "$SFT_STEPS" --ckpt.output_dir "$RUN/sft"

# clean prompts among the noisy ones, so that clean speech is not forgotten
stage grpo speechrl train "${ranks[@]}" \
  --actor.model_name_or_path "$RUN/sft/hf/last" --actor.freeze encoder \
  --actor.adam.lr 2e-4 --actor.lr_scheduler linear --actor.lr_warmup_ratio 0.1 \
  --data.prompt_dataset "$corpus/rl_train_noisy.jsonl" "$corpus/rl_train_clean.jsonl" --data.probabilities 0.8 0.2 \
  --rollout.batch_size 16 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 48 --rollout.micro_batch_size 8 \
  --train.micro_batch_size 64 --train.max_steps "$GRPO_STEPS" \
  --algo.advantage.estimator group_norm --reward.remote_url rewards/asr.py \
  --tracking.sample_steps 40 --ckpt.output_dir "$RUN/grpo" --ckpt.overwrite "${flags[@]}"

models=(sft="$RUN/sft/hf/last" grpo="$RUN/grpo/hf/last")
if [ "$control" = yes ]; then
  seconds=$(awk '$1 == "grpo" { print $2 }' "$RUN/seconds.tsv")
  stage control speechrl sft "${ranks[@]}" "${sft[@]}" \
    --actor.model_name_or_path "$RUN/sft/hf/last" --actor.freeze encoder --actor.adam.lr 5e-4 \
    --data.prompt_dataset "$corpus/rl_train_noisy.jsonl" "$corpus/rl_train_clean.jsonl" --data.probabilities 0.8 0.2 \
    --train.max_seconds "$seconds" --ckpt.output_dir "$RUN/control"
  models+=(control="$RUN/control/hf/last")
fi

stage eval speechrl eval --model "${models[@]}" \
  --eval.dataset noisy="$corpus/test_noisy.jsonl" clean="$corpus/test_clean.jsonl" \
  --eval.max_new_tokens 48 --eval.batch_size 128 --reward.remote_url rewards/asr.py \
  --actor.num_ranks "$RANKS" --actor.device cpu --output_dir "$RUN/eval" --seed "$SEED"

stage compare speechrl compare "$RUN/eval/sft" "$RUN/eval/grpo" --out "$RUN/eval" --show 3 --seed "$SEED"

# a new process with nothing but transformers and soundfile reads the export and transcribes
stage reload python recipes/asr/reload_export.py "$RUN/grpo/hf/last" "$corpus/audio/test_noisy/00000.flac" \
  --expect "$RUN/eval/grpo/noisy/hypotheses.jsonl"

python recipes/asr/quickstart_summary.py "$RUN" --seed "$SEED"
