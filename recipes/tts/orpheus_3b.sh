#!/usr/bin/env bash
# GRPO of Orpheus-3B (seven SNAC tokens per frame of 85 ms) in its named voices.
# Not run here: this machine has neither the weights nor a GPU. Two GPUs of 80 GB or more are meant.
#
#   MODEL=/models/orpheus-3b CODEC=/models/snac_24khz ASR=/models/whisper-large-v3 TRAIN=train.jsonl DEV=dev.jsonl \
#     ./run_train.sh recipes/tts/orpheus_3b.sh [flags of `speechrl train`]
#
# A line of the manifests: {"text": ..., "language": "English", "voice": "tara"}. With "speaker_audio", a recording of
# that voice, the reward also judges the voice. SNAC needs the package snac.
set -euo pipefail

RUN=${RUN:-runs/orpheus_3b}
MODEL=${MODEL:-/models/orpheus-3b}
CODEC=${CODEC:-/models/snac_24khz}
TRAIN=${TRAIN:-train.jsonl}
DEV=${DEV:-dev.jsonl}
export SPEECHRL_TTS_ASR=${ASR:-/models/whisper-large-v3} SPEECHRL_TTS_DEVICE=${SPEECHRL_TTS_DEVICE:-cuda}
export SPEECHRL_TTS_SPEAKER=${SPEECHRL_TTS_SPEAKER:-resemblyzer} SPEECHRL_TTS_MOS=${SPEECHRL_TTS_MOS:-dnsmos}

model=(--data.speech_style orpheus --codec.name_or_path "$CODEC" --codec.device cuda)

speechrl train "${model[@]}" \
  --actor.model_name_or_path "$MODEL" --actor.num_ranks 2 --actor.adam.lr 1e-6 --actor.lr_warmup_ratio 0.05 \
  --actor.gradient_checkpointing --ds.zero_stage 2 \
  --data.prompt_dataset "$TRAIN" \
  --rollout.engine vllm --train.colocate_all --vllm.num_engines 2 --vllm.gpu_memory_utilization 0.4 \
  --vllm.max_model_len 2560 \
  --rollout.batch_size 32 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 1800 \
  --algo.advantage.estimator gdpo --algo.kl.init_coef 0.01 --algo.overlong_buffer_len 210 --algo.mask_truncated \
  --algo.correction.method tis --train.max_tokens_per_micro_batch 16384 \
  --reward.remote_url rewards/tts.py --ckpt.save_steps 50 --ckpt.output_dir "$RUN/grpo" --ckpt.save_hf "$@"

speechrl eval "${model[@]}" --model before="$MODEL" after="$RUN/grpo/hf/last" --eval.dataset dev="$DEV" \
  --eval.engine vllm --vllm.max_model_len 2560 --eval.temperature 0.6 --eval.max_new_tokens 1800 \
  --reward.remote_url rewards/tts.py --output_dir "$RUN/eval"
