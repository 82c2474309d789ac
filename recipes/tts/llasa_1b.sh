#!/usr/bin/env bash
# GRPO of Llasa-1B (one X-codec 2 token per 20 ms) with vLLM rollouts and a Whisper as the listener.
# Not run here: this machine has neither the weights nor a GPU. One GPU of 80 GB or more is meant.
#
#   MODEL=/models/Llasa-1B CODEC=/models/xcodec2-hf ASR=/models/whisper-large-v3 TRAIN=train.jsonl DEV=dev.jsonl \
#     ./run_train.sh recipes/tts/llasa_1b.sh [flags of `speechrl train`]
#
# A line of the manifests: {"text": ..., "language": ..., "speaker_audio": ..., "speaker_text": ...}
set -euo pipefail

RUN=${RUN:-runs/llasa_1b}
MODEL=${MODEL:-/models/Llasa-1B}
CODEC=${CODEC:-/models/xcodec2-hf}   # in transformers' layout
TRAIN=${TRAIN:-train.jsonl}
DEV=${DEV:-dev.jsonl}
export SPEECHRL_TTS_ASR=${ASR:-/models/whisper-large-v3} SPEECHRL_TTS_DEVICE=${SPEECHRL_TTS_DEVICE:-cuda}
export SPEECHRL_TTS_SPEAKER=${SPEECHRL_TTS_SPEAKER:-resemblyzer} SPEECHRL_TTS_MOS=${SPEECHRL_TTS_MOS:-dnsmos}

mkdir -p "$RUN"
# the speakers' codes stand in the prompt; they are made once
for name in train dev; do
  from=$TRAIN
  [ "$name" = dev ] && from=$DEV
  speechrl encode-speech --manifest "$from" --out "$RUN/$name.jsonl" --codec "$CODEC" --device cuda
done

speechrl train \
  --actor.model_name_or_path "$MODEL" --actor.adam.lr 1e-6 --actor.lr_warmup_ratio 0.05 \
  --actor.gradient_checkpointing --ds.zero_stage 2 \
  --data.prompt_dataset "$RUN/train.jsonl" --data.speech_style llasa --codec.name_or_path "$CODEC" --codec.device cuda \
  --rollout.engine vllm --train.colocate_all --vllm.gpu_memory_utilization 0.4 --vllm.max_model_len 2560 \
  --rollout.batch_size 32 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 1500 \
  --algo.advantage.estimator gdpo --algo.kl.init_coef 0.01 --algo.overlong_buffer_len 200 --algo.mask_truncated \
  --algo.correction.method tis --train.max_tokens_per_micro_batch 16384 \
  --reward.remote_url rewards/tts.py \
  --eval.dataset dev="$RUN/dev.jsonl" --eval.steps 50 --eval.temperature 0.8 --eval.max_new_tokens 1500 \
  --eval.best_metric eval/dev/cer \
  --ckpt.save_steps 50 --ckpt.output_dir "$RUN/grpo" "$@"
