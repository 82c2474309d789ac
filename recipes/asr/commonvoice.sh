#!/usr/bin/env bash
# GRPO of Qwen3-ASR on several languages of Common Voice, in fixed shares of every batch, metrics by language.
# For one node of 8 GPUs with 80 GB or more.
#
#   CORPUS=/data/cv-corpus-17.0-2024-03-15 LANGUAGES="de fr it" ./run_train.sh recipes/asr/commonvoice.sh
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-ASR-0.6B}                 # hub id or folder
CORPUS=${CORPUS:-corpora/cv-corpus-17.0-2024-03-15} # the folder that holds one folder a language
LANGUAGES=${LANGUAGES:-de fr es}                    # as the corpus names them
SHARES=${SHARES:-}                                  # of a batch, such as "2 1 1"; by size if empty
DATA=${DATA:-runs/data/commonvoice}                 # manifests
RUN=${RUN:-runs/commonvoice}
GPUS=${GPUS:-8}
ADDRESS=${ADDRESS:-}                                # of a Ray cluster to join; a private one if empty
STEPS=${STEPS:-400}                                 # of 128 utterances with 8 samples each

read -ra languages <<< "$LANGUAGES"
read -ra shares <<< "$SHARES"
trained=() dev=() test=()
for language in "${languages[@]}"; do
  python data/prepare_commonvoice.py "$CORPUS/$language" --out "$DATA/$language" --on_error skip
  trained+=("$DATA/$language/train.jsonl")
  dev+=("$language=$DATA/$language/dev.jsonl")
  test+=("$language=$DATA/$language/test.jsonl")
done
speechrl manifest stats --manifest "${trained[@]}" --png "$DATA/train.png"

engines=(--actor.num_ranks "$GPUS" --vllm.num_engines "$GPUS" --vllm.gpu_memory_utilization 0.5
  --ray.address "$ADDRESS")
train=(
  --actor.model_name_or_path "$MODEL" --actor.freeze encoder
  --actor.adam.lr 1e-6 --actor.lr_scheduler cosine --actor.lr_warmup_ratio 0.05
  --data.prompt_dataset "${trained[@]}" --data.max_duration_s 20 --data.on_error skip
  --rollout.engine vllm --train.colocate_all "${engines[@]}"
  --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 128
  --algo.advantage.estimator group_norm --algo.dynamic_filtering_enable --algo.kl.init_coef 0.001
  --reward.remote_url rewards/asr.yaml
  --train.max_steps "$STEPS" --train.max_tokens_per_micro_batch 16384
  --eval.dataset "${dev[@]}" --eval.steps 50 --eval.max_new_tokens 128 --eval.best_metric "eval/${languages[0]}/wer"
  --ckpt.output_dir "$RUN" --ckpt.save_steps 50 --ckpt.resume
)
if [ "${#shares[@]}" -gt 0 ]; then train+=(--data.probabilities "${shares[@]}"); fi
speechrl check "${train[@]}" "$@"
speechrl train "${train[@]}" "$@"

speechrl eval --model base="$MODEL" grpo="$RUN/hf/best" --eval.dataset "${test[@]}" \
  --eval.engine vllm "${engines[@]}" \
  --data.on_error skip --eval.group_by gender accents duration --eval.max_new_tokens 128 --ds.param_dtype bf16 \
  --output_dir "$RUN/eval"
for language in "${languages[@]}"; do
  speechrl compare "$RUN/eval/base/$language" "$RUN/eval/grpo/$language" --out "$RUN/eval/compare_$language"
done
