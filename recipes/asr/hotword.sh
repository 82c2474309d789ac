#!/usr/bin/env bash
# GRPO of Qwen3-ASR for hotwords: the model is told a list of words (some of them said, most not), and is rewarded for
# writing those that were said, no others, and everything else as well as before.
# For one node of 8 GPUs with 80 GB or more; GPUS=1 also works, with a smaller --rollout.batch_size.
#
#   TRAIN=train.jsonl DEV=dev.jsonl TEST=test.jsonl WORDS=names.txt ./run_train.sh recipes/asr/hotword.sh
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-ASR-0.6B}   # hub id or folder
TRAIN=${TRAIN:-data/mine/train.jsonl} # manifests of your own, or of a script in data/
DEV=${DEV:-data/mine/dev.jsonl}
TEST=${TEST:-data/mine/test.jsonl}
WORDS=${WORDS:-data/mine/words.txt}   # a word or phrase a line: names, products, places
DISTRACTORS=${DISTRACTORS:-30}        # words of the list that an utterance's audio does not hold
DATA=${DATA:-runs/data/hotword}       # manifests with lists
RUN=${RUN:-runs/hotword}
GPUS=${GPUS:-8}
ADDRESS=${ADDRESS:-}                  # of a Ray cluster to join; a private one if empty
STEPS=${STEPS:-300}                   # of 128 utterances with 8 samples each

for part in "train $TRAIN" "dev $DEV" "test $TEST"; do
  python data/add_keywords.py "${part#* }" --words "$WORDS" --distractors "$DISTRACTORS" --out "$DATA/${part%% *}.jsonl"
done

engines=(--actor.num_ranks "$GPUS" --vllm.num_engines "$GPUS" --vllm.gpu_memory_utilization 0.5
  --ray.address "$ADDRESS")
train=(
  --actor.model_name_or_path "$MODEL" --actor.freeze encoder
  --actor.adam.lr 1e-6 --actor.lr_scheduler cosine --actor.lr_warmup_ratio 0.05
  --data.prompt_dataset "$DATA/train.jsonl" --data.max_duration_s 20 --data.on_error skip
  --rollout.engine vllm --train.colocate_all "${engines[@]}"
  --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 128
  --algo.advantage.estimator gdpo --algo.dynamic_filtering_enable --algo.kl.init_coef 0.001 --algo.kl.use_loss
  --reward.remote_url rewards/asr_hotword.py
  --train.max_steps "$STEPS" --train.max_tokens_per_micro_batch 16384
  --eval.dataset dev="$DATA/dev.jsonl" --eval.steps 50 --eval.max_new_tokens 128
  --eval.best_metric eval/dev/keyword_f1 --eval.best_direction max
  --ckpt.output_dir "$RUN" --ckpt.save_steps 50 --ckpt.resume
)
speechrl check "${train[@]}" "$@"
speechrl train "${train[@]}" "$@"

# without lists, too: what hotwords gain must not be lost on everybody else
speechrl eval --model base="$MODEL" grpo="$RUN/hf/best" \
  --eval.dataset hotwords="$DATA/test.jsonl" plain="$TEST" \
  --eval.engine vllm "${engines[@]}" \
  --data.on_error skip --eval.max_new_tokens 128 --ds.param_dtype bf16 --output_dir "$RUN/eval"
for name in hotwords plain; do
  speechrl compare "$RUN/eval/base/$name" "$RUN/eval/grpo/$name" --out "$RUN/eval/compare_$name"
done
