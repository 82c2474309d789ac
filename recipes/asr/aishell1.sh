#!/usr/bin/env bash
# GRPO of Qwen3-ASR on AISHELL-1 (178 hours of read Mandarin): character error rate, right script, no loops.
# For one node of 8 GPUs with 80 GB or more; GPUS=1 also works, with a smaller --rollout.batch_size.
#
#   CORPUS=/data/data_aishell ./run_train.sh recipes/asr/aishell1.sh [flags of `speechrl train`]
#   MODEL=Qwen/Qwen3-ASR-1.7B RUN=runs/aishell1_large ./run_train.sh recipes/asr/aishell1.sh
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-ASR-0.6B}        # hub id or folder
CORPUS=${CORPUS:-corpora/data_aishell}     # as openslr.org/33 unpacks, the archives in wav/ too
DATA=${DATA:-runs/data/aishell1}           # manifests
RUN=${RUN:-runs/aishell1}
GPUS=${GPUS:-8}
ADDRESS=${ADDRESS:-}                       # of a Ray cluster to join; a private one if empty
STEPS=${STEPS:-400}                        # of 128 utterances with 8 samples each

python data/prepare_aishell1.py "$CORPUS" --out "$DATA"
speechrl manifest stats --manifest "$DATA/train.jsonl" --out "$DATA/train.json" --png "$DATA/train.png"

engines=(--actor.num_ranks "$GPUS" --vllm.num_engines "$GPUS" --vllm.gpu_memory_utilization 0.5
  --ray.address "$ADDRESS")
# one epoch hears an audio once, but evaluation and the next run hear it again
train=(
  --actor.model_name_or_path "$MODEL" --actor.freeze encoder
  --actor.adam.lr 1e-6 --actor.lr_scheduler cosine --actor.lr_warmup_ratio 0.05
  --data.prompt_dataset "$DATA/train.jsonl" --data.max_duration_s 20 --data.on_error skip
  --data.feature_cache "$DATA/features" --data.feature_cache_gb 200
  --rollout.engine vllm --train.colocate_all "${engines[@]}"
  --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 128
  --algo.advantage.estimator group_norm --algo.dynamic_filtering_enable --algo.kl.init_coef 0.001
  --reward.remote_url rewards/asr.yaml
  --train.max_steps "$STEPS" --train.max_tokens_per_micro_batch 16384
  --eval.dataset dev="$DATA/dev.jsonl" --eval.steps 50 --eval.max_new_tokens 128 --eval.best_metric eval/dev/cer
  --ckpt.output_dir "$RUN" --ckpt.save_steps 50 --ckpt.resume
)
speechrl check "${train[@]}" "$@"
speechrl train "${train[@]}" "$@"

speechrl eval --model base="$MODEL" grpo="$RUN/hf/best" --eval.dataset test="$DATA/test.jsonl" \
  --eval.engine vllm "${engines[@]}" --eval.max_new_tokens 128 --ds.param_dtype bf16 --output_dir "$RUN/eval"
speechrl compare "$RUN/eval/base/test" "$RUN/eval/grpo/test" --out "$RUN/eval"
