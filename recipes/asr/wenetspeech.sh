#!/usr/bin/env bash
# GRPO of Qwen3-ASR on WenetSpeech (Mandarin from the internet), on what it gets right now and then: the base model
# transcribes part of the corpus four times, `speechrl rank` says how hard each utterance is, and training starts with
# the easy ones and leaves out what is always right or hopeless (mostly wrong labels).
# For one node of 8 GPUs with 80 GB or more, or several: recipes/asr/cluster.sh.
#
#   CORPUS=/data/WenetSpeech SUBSET=M ./run_train.sh recipes/asr/wenetspeech.sh [flags of `speechrl train`]
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-ASR-1.7B}        # hub id or folder
CORPUS=${CORPUS:-corpora/WenetSpeech}      # as openslr.org/121 unpacks
SUBSET=${SUBSET:-S}                        # of the training data: S 100 h, M 1000 h, L 10000 h
DATA=${DATA:-runs/data/wenetspeech}        # manifests
RUN=${RUN:-runs/wenetspeech}
GPUS=${GPUS:-8}
ADDRESS=${ADDRESS:-}                       # of a Ray cluster to join; a private one if empty
STEPS=${STEPS:-500}                        # of 128 utterances with 8 samples each
RANKED=${RANKED:-50000}                    # utterances that the base model transcribes first

python data/prepare_wenetspeech.py "$CORPUS" --out "$DATA" --subset "$SUBSET" --min_confidence 0.95
# no text of a test set, no title that is said a thousand times, no line without time to say it
speechrl manifest filter --manifest "$DATA/train.jsonl" --out "$DATA/train_kept.jsonl" --max_per_text 3 \
  --keep 'duration_s>=0.5' 'duration_s<=20' 'characters>=2' 'characters_per_s<=12' \
  --exclude_texts_of "$DATA/dev.jsonl" "$DATA/test_net.jsonl" "$DATA/test_meeting.jsonl"

engines=(--actor.num_ranks "$GPUS" --vllm.num_engines "$GPUS" --vllm.gpu_memory_utilization 0.5
  --ray.address "$ADDRESS")
if [ ! -e "$DATA/train_ranked.jsonl" ]; then
  speechrl eval --model base="$MODEL" --eval.dataset train="$DATA/train_kept.jsonl" --data.max_samples "$RANKED" \
    --eval.engine vllm "${engines[@]}" --eval.n_samples 4 --eval.temperature 1.0 --eval.max_new_tokens 128 \
    --ds.param_dtype bf16 --output_dir "$DATA/rank"
  speechrl rank --manifest "$DATA/train_kept.jsonl" --hypotheses "$DATA/rank/base/train/hypotheses.jsonl" \
    --on_missing drop --out "$DATA/train_ranked.jsonl"
fi

train=(
  --actor.model_name_or_path "$MODEL" --actor.freeze encoder
  --actor.adam.lr 1e-6 --actor.lr_scheduler cosine --actor.lr_warmup_ratio 0.05
  --data.prompt_dataset "$DATA/train_ranked.jsonl" --data.max_duration_s 20
  --data.difficulty_range 0.02 0.8 --data.curriculum easy_first
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

speechrl eval --model base="$MODEL" grpo="$RUN/hf/best" \
  --eval.dataset net="$DATA/test_net.jsonl" meeting="$DATA/test_meeting.jsonl" \
  --eval.engine vllm "${engines[@]}" --eval.max_new_tokens 128 --ds.param_dtype bf16 --output_dir "$RUN/eval"
for name in net meeting; do
  speechrl compare "$RUN/eval/base/$name" "$RUN/eval/grpo/$name" --out "$RUN/eval/compare_$name"
done
