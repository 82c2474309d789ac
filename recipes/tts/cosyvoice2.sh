#!/usr/bin/env bash
# GRPO of the language model of CosyVoice 2, in its Hugging Face form (text between <|sos|> and <|task_id|>, tokens
# <|s_0|> to <|s_6560|>, <|eos1|> at the end); flow matching and vocoder stay behind a server of yours.
# Not run here: this machine has neither the weights nor a GPU.
#
#   MODEL=/models/cosyvoice2-llm-hf DECODER=http://127.0.0.1:8090/decode ASR=/models/whisper-large-v3 \
#     TRAIN=train.jsonl DEV=dev.jsonl ./run_train.sh recipes/tts/cosyvoice2.sh [flags of `speechrl train`]
#
# The server gets {"codes": [[[c], [c], ...], ...], "speakers": [base64 of a wav or null, ...]} and answers
# {"sounds": [base64 of a wav, ...]}: docs/tts.md. A line of the manifests: {"text": ..., "language": "Chinese",
# "speaker_audio": ...}; the voice is the decoder's business.
set -euo pipefail

RUN=${RUN:-runs/cosyvoice2}
MODEL=${MODEL:-/models/cosyvoice2-llm-hf}
DECODER=${DECODER:-http://127.0.0.1:8090/decode}
TRAIN=${TRAIN:-train.jsonl}
DEV=${DEV:-dev.jsonl}
export SPEECHRL_TTS_ASR=${ASR:-/models/whisper-large-v3} SPEECHRL_TTS_DEVICE=${SPEECHRL_TTS_DEVICE:-cuda}
export SPEECHRL_TTS_SPEAKER=${SPEECHRL_TTS_SPEAKER:-resemblyzer} SPEECHRL_TTS_MOS=${SPEECHRL_TTS_MOS:-dnsmos}

model=(--data.speech_style cosyvoice2 --codec.name_or_path "$DECODER")

speechrl train "${model[@]}" \
  --actor.model_name_or_path "$MODEL" --actor.adam.lr 1e-6 --actor.lr_warmup_ratio 0.05 --ds.zero_stage 2 \
  --data.prompt_dataset "$TRAIN" \
  --rollout.engine vllm --train.colocate_all --vllm.gpu_memory_utilization 0.4 --vllm.max_model_len 1536 \
  --rollout.batch_size 64 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 750 \
  --algo.advantage.estimator gdpo --algo.kl.init_coef 0.01 --algo.overlong_buffer_len 100 --algo.mask_truncated \
  --algo.correction.method tis --train.max_tokens_per_micro_batch 16384 \
  --reward.remote_url rewards/tts.py --ckpt.save_steps 50 --ckpt.output_dir "$RUN/grpo" "$@"

speechrl eval "${model[@]}" --model before="$MODEL" after="$RUN/grpo/hf/last" --eval.dataset dev="$DEV" \
  --eval.engine vllm --vllm.max_model_len 1536 --eval.temperature 0.8 --eval.max_new_tokens 750 \
  --reward.remote_url rewards/tts.py --output_dir "$RUN/eval"
