#!/usr/bin/env bash
# GRPO of Qwen2-Audio on LibriSpeech train-clean-100, evaluated on the clean and the other test set.
# For one node of 8 GPUs with 80 GB or more: 7 B parameters in training, in a reference and in the engines.
#
#   CORPUS=/data/LibriSpeech ./run_train.sh recipes/asr/librispeech.sh [flags of `speechrl train`]
#   MODEL=Qwen/Qwen3-ASR-1.7B RUN=runs/librispeech_qwen3 ./run_train.sh recipes/asr/librispeech.sh
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2-Audio-7B-Instruct}   # hub id or folder
CORPUS=${CORPUS:-corpora/LibriSpeech}          # as openslr.org/12 unpacks
SUBSETS=${SUBSETS:-train-clean-100 dev-clean dev-other test-clean test-other}
DATA=${DATA:-runs/data/librispeech}            # manifests
RUN=${RUN:-runs/librispeech}
GPUS=${GPUS:-8}
ADDRESS=${ADDRESS:-}                           # of a Ray cluster to join; a private one if empty
STEPS=${STEPS:-300}                            # of 64 utterances with 8 samples each

# transcripts in capitals would teach the model to shout
read -ra subsets <<< "$SUBSETS"
python data/prepare_librispeech.py "$CORPUS" --out "$DATA" --lowercase --subsets "${subsets[@]}"

engines=(--actor.num_ranks "$GPUS" --vllm.num_engines "$GPUS" --vllm.gpu_memory_utilization 0.4
  --ray.address "$ADDRESS")
# engines have half of each GPU; the optimiser's state waits in the host's memory while they sample
train=(
  --actor.model_name_or_path "$MODEL" --actor.freeze encoder
  --actor.gradient_checkpointing --actor.adam.lr 5e-7 --actor.lr_scheduler cosine --actor.lr_warmup_ratio 0.05
  --data.prompt_dataset "$DATA/train-clean-100.jsonl" --data.max_duration_s 30 --data.on_error skip
  --rollout.engine vllm --train.colocate_all "${engines[@]}"
  --rollout.batch_size 64 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 200
  --algo.advantage.estimator group_norm --algo.dynamic_filtering_enable --algo.kl.init_coef 0.001
  --reward.remote_url rewards/asr.yaml
  --ds.zero_stage 2 --train.max_steps "$STEPS" --train.max_tokens_per_micro_batch 8192
  --eval.dataset clean="$DATA/dev-clean.jsonl" other="$DATA/dev-other.jsonl"
  --eval.steps 50 --eval.max_new_tokens 200 --eval.best_metric eval/other/wer
  --ckpt.output_dir "$RUN" --ckpt.save_steps 50 --ckpt.resume
)
speechrl check "${train[@]}" "$@"
speechrl train "${train[@]}" "$@"

speechrl eval --model base="$MODEL" grpo="$RUN/hf/best" \
  --eval.dataset clean="$DATA/test-clean.jsonl" other="$DATA/test-other.jsonl" \
  --eval.engine vllm "${engines[@]}" \
  --data.max_duration_s 30 --data.on_error skip --eval.max_new_tokens 200 --ds.param_dtype bf16 --output_dir "$RUN/eval"
for name in clean other; do
  speechrl compare "$RUN/eval/base/$name" "$RUN/eval/grpo/$name" --out "$RUN/eval/compare_$name"
done
