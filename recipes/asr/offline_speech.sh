#!/usr/bin/env bash
# Recorded human speech, no hub: a Whisper encoder (frozen) and SmolLM2-135M joined by a new projector -> SFT on nine
# languages -> GRPO on other recordings -> evaluation on texts that neither has seen. recipes/README.md has results.
# One GPU, 20 minutes; SCALE=small is the same path in English on two CPU cores, for seeing that it works.
#
#   ./run_train.sh recipes/asr/offline_speech.sh
#   ./run_train.sh recipes/asr/offline_speech.sh --control                # also SFT continued on the RL recordings
#   ./run_train.sh recipes/asr/offline_speech.sh --actor.adam.lr 1e-5     # flags of `speechrl train`
#   SCALE=small ./run_train.sh recipes/asr/offline_speech.sh
#   STAGES="grpo eval" ./run_train.sh recipes/asr/offline_speech.sh       # go on from what an earlier call left
set -euo pipefail

SCALE=${SCALE:-full}
RUN=${RUN:-runs/offline_speech_$SCALE}
DOWNLOADS=${DOWNLOADS:-runs/downloads}    # packages: 400 MB of speech, 240 MB of weights
SEED=${SEED:-0}
STAGES=${STAGES:-speech speeds model sft grpo control eval compare}
HIDE_AUDIO=${HIDE_AUDIO:-0.15} HIDE_TOKENS=${HIDE_TOKENS:-0.25}
if [ "$SCALE" = full ]; then
  LANGUAGES=${LANGUAGES:-en fr nl es it ro cs da ca}
  WHISPER=${WHISPER:-openai/whisper-base}
  SPEEDS=${SPEEDS:-0.9 1.1}               # copies of the SFT recordings
  SFT_SECONDS=${SFT_SECONDS:-420} CTC_STEPS=${CTC_STEPS:-90} SFT_LR=${SFT_LR:-6e-4}
  GRPO_STEPS=${GRPO_STEPS:-60} GRPO_LR=${GRPO_LR:-5e-5}
  EVAL_STEPS=${EVAL_STEPS:-200} EVAL_SAMPLES=${EVAL_SAMPLES:-0}
  machine=(--ds.param_dtype bf16 --ds.zero_stage 2)
  # one pass a step: at this size the time of a step goes to launching kernels, not to running them
  sft_size=(--train.batch_size 256 --train.max_tokens_per_micro_batch 65536 --data.num_workers 16)
  grpo_size=(--rollout.batch_size 64 --rollout.n_samples_per_prompt 16 --train.max_tokens_per_micro_batch 32768
    --rollout.engine vllm --train.colocate_all --vllm.no_enable_sleep --ds.no_enable_sleep
    --vllm.gpu_memory_utilization 0.35 --vllm.max_model_len 1024)
  eval_size=(--eval.batch_size 256 --ds.param_dtype bf16)
else
  LANGUAGES=${LANGUAGES:-en}
  WHISPER=${WHISPER:-openai/whisper-tiny.en}
  SPEEDS=${SPEEDS:-}
  SFT_SECONDS=${SFT_SECONDS:-420} CTC_STEPS=${CTC_STEPS:-60} SFT_LR=${SFT_LR:-4e-4}
  GRPO_STEPS=${GRPO_STEPS:-5} GRPO_LR=${GRPO_LR:-2e-5}
  EVAL_STEPS=${EVAL_STEPS:-0} EVAL_SAMPLES=${EVAL_SAMPLES:-24}
  machine=(--actor.device cpu --ds.param_dtype fp32 --ds.zero_stage 0)
  sft_size=(--train.batch_size 8 --train.max_tokens_per_micro_batch 1024)
  grpo_size=(--rollout.batch_size 4 --rollout.n_samples_per_prompt 4 --train.max_tokens_per_micro_batch 1024)
  eval_size=(--eval.batch_size 8 --ds.param_dtype fp32 --actor.device cpu)
fi

control=no
flags=()
for argument in "$@"; do
  if [ "$argument" = --control ]; then control=yes; else flags+=("$argument"); fi
done

speech=$RUN/speech
model=$RUN/model
mkdir -p "$RUN"
stage() {  # stage NAME COMMAND...: run it if STAGES names it, say so, note its seconds
  local name=$1 started=$SECONDS
  shift
  [[ " $STAGES " == *" $name "* ]] || return 0
  echo "== $name"
  "$@"
  printf '%s\t%s\n' "$name" "$((SECONDS - started))" >> "$RUN/seconds.tsv"
}

read -ra languages <<< "$LANGUAGES"
read -ra speeds <<< "$SPEEDS"
if [ ! -f "$speech/test.jsonl" ]; then
  stage speech python data/prepare_offline_speech.py --out "$speech" --cache "$DOWNLOADS" --languages "${languages[@]}"
fi
sft_data=("$speech/sft_train.jsonl")
if [ ${#speeds[@]} -gt 0 ]; then
  [ -f "$speech/speed/sft_train.jsonl" ] || stage speeds python data/speed_copies.py "$speech/sft_train.jsonl" \
    --speeds "${speeds[@]}" --out "$speech/speed" --processes "$(nproc)"
  sft_data+=("$speech/speed/sft_train.jsonl")
fi
[ -f "$model/config.json" ] || stage model python data/assemble_speech_llm.py --out "$model" --whisper "$WHISPER" \
  --cache "$DOWNLOADS" --param_dtype bf16 --seed "$SEED"

common=("${machine[@]}" --actor.freeze encoder --actor.max_norm 1.0 --train.seed "$SEED"
  --data.feature_cache "$RUN/features" --tracking.sample_steps 20 --ckpt.overwrite)
watch=() best=last
if [ "$EVAL_STEPS" -gt 0 ]; then
  best=best
  watch=(--eval.dataset dev="$speech/dev.jsonl" --eval.steps "$EVAL_STEPS" --eval.best_metric eval/dev/cer
    --eval.max_new_tokens 128 --eval.batch_size 640)
fi
# CTC over characters puts what the projector makes of speech near the language model's embeddings of its letters, first
# alone, then beside the transcripts. Parts of what the model hears, and of the words it writes on from, are hidden:
# 5 hours are soon known by heart.
sft=("${common[@]}" "${sft_size[@]}" "${watch[@]}" --actor.adam.betas 0.9 0.98 --actor.adam.weight_decay 0.05
  --actor.lr_scheduler cosine --actor.lr_warmup_ratio 0.05 --sft.hide_audio "$HIDE_AUDIO" --sft.hide_tokens "$HIDE_TOKENS"
  --sft.ctc_weight 0.3 --sft.ctc_units characters)

stage sft speechrl sft "${sft[@]}" --actor.model_name_or_path "$model" --data.prompt_dataset "${sft_data[@]}" \
  --actor.adam.lr "$SFT_LR" --sft.projector_lr 2e-3 --sft.ctc_warmup_steps "$CTC_STEPS" \
  --train.max_seconds "$SFT_SECONDS" --ckpt.output_dir "$RUN/sft"

[ "$EVAL_STEPS" -eq 0 ] || watch+=(--eval.steps 20)  # the last of a flag counts
stage grpo speechrl train "${common[@]}" "${grpo_size[@]}" "${watch[@]}" \
  --actor.model_name_or_path "$RUN/sft/hf/$best" --actor.adam.lr "$GRPO_LR" --actor.lr_scheduler linear \
  --actor.lr_warmup_ratio 0.05 --data.prompt_dataset "$speech/rl_train.jsonl" --rollout.max_new_tokens 96 \
  --train.max_steps "$GRPO_STEPS" --algo.advantage.estimator group_norm --reward.remote_url rewards/asr.py \
  --ckpt.output_dir "$RUN/grpo" "${flags[@]}"

models=(sft="$RUN/sft/hf/$best" grpo="$RUN/grpo/hf/$best")
if [ "$control" = yes ]; then
  # as long as GRPO trained, its start-up not counted
  seconds=$(awk -F '"time/step_s": ' '{ total += $2 + 0 } END { print int(total + 1) }' "$RUN/grpo/metrics.jsonl")
  stage control speechrl sft "${sft[@]}" --actor.model_name_or_path "$RUN/sft/hf/$best" \
    --data.prompt_dataset "$speech/rl_train.jsonl" --actor.adam.lr 1e-4 \
    --train.max_seconds "$seconds" --ckpt.output_dir "$RUN/control"
  models+=(control="$RUN/control/hf/$best")
fi

stage eval speechrl eval --model "${models[@]}" --eval.dataset test="$speech/test.jsonl" --eval.max_new_tokens 128 \
  "${eval_size[@]}" --data.max_samples "$EVAL_SAMPLES" --eval.group_by language source --data.feature_cache "$RUN/features" \
  --reward.remote_url rewards/asr.py --output_dir "$RUN/eval" --seed "$SEED"
stage compare speechrl compare "$RUN/eval/sft" "$RUN/eval/grpo" --out "$RUN/eval" --show 5 --seed "$SEED"
