#!/usr/bin/env bash
# Where the time of a GRPO step of speech synthesis goes, with vLLM on one GPU: a model of speech tokens of 0.44 B weights,
# taught for 80 steps to speak, then 12 steps of GRPO; the numbers are in OUT/grpo/metrics.jsonl.
#
#   benchmarks/speech_step.sh OUT LISTENER    # LISTENER: an export of recipes/asr/quickstart.sh, or any recogniser
set -euo pipefail

out=$1
export SPEECHRL_TTS_ASR=$2
corpus=$out/corpus
common=(--data.speech_style llasa --ds.param_dtype bf16 --ds.zero_stage 2 --ckpt.overwrite)

speechrl synth --task tts --out "$corpus" --model_out "$out/small"
python benchmarks/make_speaker.py "$out/small" "$out/model"
speechrl sft "${common[@]}" --actor.model_name_or_path "$out/model" --data.prompt_dataset "$corpus/sft_train.jsonl" \
  --actor.adam.lr 3e-4 --actor.lr_scheduler cosine --actor.lr_warmup_ratio 0.08 \
  --train.batch_size 64 --train.max_tokens_per_micro_batch 32768 --train.max_steps 80 --ckpt.output_dir "$out/sft"
speechrl train "${common[@]}" --actor.model_name_or_path "$out/sft/hf/last" --data.prompt_dataset "$corpus/rl_train.jsonl" \
  --codec.name_or_path "$corpus/codec" --codec.num_workers 8 --actor.adam.lr 1e-5 --actor.max_norm 1.0 \
  --rollout.engine vllm --train.colocate_all --vllm.no_enable_sleep --ds.no_enable_sleep \
  --vllm.gpu_memory_utilization 0.35 --vllm.max_model_len 1024 \
  --rollout.batch_size 32 --rollout.n_samples_per_prompt 16 --rollout.max_new_tokens 128 \
  --algo.overlong_buffer_len 16 --algo.advantage.estimator gdpo --reward.remote_url rewards/tts.py \
  --train.max_tokens_per_micro_batch 65536 --train.max_steps 12 --ckpt.output_dir "$out/grpo"
