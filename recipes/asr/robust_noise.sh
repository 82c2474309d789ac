#!/usr/bin/env bash
# GRPO of Qwen3-ASR for noisy rooms and telephones: training audio is changed anew each epoch, a tenth of it is noise in
# which nobody speaks, and the reward counts characters, silence and what was made up.
# For one node of 8 GPUs with 80 GB or more; GPUS=1 also works, with a smaller --rollout.batch_size.
#
#   TRAIN=train.jsonl DEV=dev.jsonl NOISE=/data/musan/noise ./run_train.sh recipes/asr/robust_noise.sh
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-ASR-0.6B}         # hub id or folder
TRAIN=${TRAIN:-data/mine/train.jsonl}       # manifests of your own, or of a script in data/: clean speech
DEV=${DEV:-data/mine/dev.jsonl}
NOISE=${NOISE:-corpora/musan/noise}         # sound files without speech (openslr.org/17), to train with
NOISE_DEV=${NOISE_DEV:-speech}              # other noise to evaluate with: a folder, or white, pink, speech
ROOMS=${ROOMS:-synthetic}                   # or a folder of impulse responses (openslr.org/28)
DATA=${DATA:-runs/data/robust_noise}
RUN=${RUN:-runs/robust_noise}
GPUS=${GPUS:-8}
ADDRESS=${ADDRESS:-}                        # of a Ray cluster to join; a private one if empty
STEPS=${STEPS:-400}                         # of 128 utterances with 8 samples each

python data/prepare_noise.py "$NOISE" --out "$DATA" --seconds 5
python data/make_noisy.py "$DEV" --noise "$NOISE_DEV" --snr_db 0 10 --out "$DATA/dev_noisy"

engines=(--actor.num_ranks "$GPUS" --vllm.num_engines "$GPUS" --vllm.gpu_memory_utilization 0.5
  --ray.address "$ADDRESS")
# augmentation changes what the encoder hears, so its output can't be kept: no --data.feature_cache here
train=(
  --actor.model_name_or_path "$MODEL" --actor.freeze encoder
  --actor.adam.lr 1e-6 --actor.lr_scheduler cosine --actor.lr_warmup_ratio 0.05
  --data.prompt_dataset "$TRAIN" "$DATA/noise.jsonl" --data.probabilities 0.9 0.1
  --data.max_duration_s 20 --data.on_error skip
  --data.augment.speeds 0.9 1.0 1.1
  --data.augment.room "$ROOMS" --data.augment.room_share 0.3
  --data.augment.noise "$NOISE" speech --data.augment.noise_share 0.7 --data.augment.snr_db 0 20
  --data.augment.telephone_share 0.15
  --rollout.engine vllm --train.colocate_all "${engines[@]}"
  --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 128
  --algo.advantage.estimator group_norm --algo.dynamic_filtering_enable --algo.kl.init_coef 0.001
  --reward.remote_url rewards/asr_robust.py
  --train.max_steps "$STEPS" --train.max_tokens_per_micro_batch 16384
  --eval.dataset clean="$DEV" noisy="$DATA/dev_noisy/noisy.jsonl" --eval.steps 50 --eval.max_new_tokens 128
  --eval.group_by language --eval.best_metric eval/noisy/cer
  --ckpt.output_dir "$RUN" --ckpt.save_steps 50 --ckpt.resume
)
speechrl check "${train[@]}" "$@"
speechrl train "${train[@]}" "$@"

speechrl eval --model base="$MODEL" grpo="$RUN/hf/best" \
  --eval.dataset noisy="$DATA/dev_noisy/noisy.jsonl" --eval.group_by snr_db language \
  --eval.engine vllm "${engines[@]}" \
  --data.on_error skip --eval.max_new_tokens 128 --ds.param_dtype bf16 --output_dir "$RUN/eval"
speechrl compare "$RUN/eval/base/noisy" "$RUN/eval/grpo/noisy" --out "$RUN/eval"
