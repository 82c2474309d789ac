#!/usr/bin/env bash
# A tiny language model learns to sort digits: SFT until it gets some right, then GRPO with a rule reward, through the
# same loop, actors and losses as speech. About 4 minutes on two CPU cores.
#
#   ./run_train.sh recipes/text/quickstart.sh [flags of `speechrl train`]
set -euo pipefail

RUN=${RUN:-runs/text_quickstart}
SEED=${SEED:-0}
SFT_STEPS=${SFT_STEPS:-300}
GRPO_STEPS=${GRPO_STEPS:-150}

python data/make_sort_digits.py --out "$RUN/data" --seed "$SEED"

speechrl sft \
  --actor.model_name_or_path "$RUN/data/model" --actor.num_ranks 1 --actor.device cpu \
  --actor.adam.lr 3e-3 --actor.lr_scheduler cosine \
  --data.prompt_dataset "$RUN/data/train.jsonl" --eval.dataset dev="$RUN/data/dev.jsonl" \
  --eval.max_new_tokens 16 --eval.steps "$SFT_STEPS" \
  --train.batch_size 32 --train.micro_batch_size 32 --train.max_steps "$SFT_STEPS" --train.seed "$SEED" \
  --ds.param_dtype fp32 --ds.zero_stage 2 --tracking.sample_steps 50 \
  --ckpt.output_dir "$RUN/sft" --ckpt.overwrite

speechrl train \
  --actor.model_name_or_path "$RUN/sft/hf/last" --actor.num_ranks 1 --actor.device cpu \
  --actor.adam.lr 3e-4 \
  --data.prompt_dataset "$RUN/data/train.jsonl" --eval.dataset dev="$RUN/data/dev.jsonl" \
  --eval.max_new_tokens 16 --eval.steps "$GRPO_STEPS" \
  --rollout.batch_size 32 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 16 \
  --train.micro_batch_size 256 --train.max_steps "$GRPO_STEPS" --train.seed "$SEED" \
  --algo.advantage.estimator group_norm \
  --reward.remote_url rewards/text_rule.py \
  --ds.param_dtype fp32 --ds.zero_stage 2 \
  --ckpt.output_dir "$RUN/grpo" --ckpt.overwrite \
  "$@"
