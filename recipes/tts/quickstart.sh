#!/usr/bin/env bash
# The synthesis quickstart: synthetic speech of two voices -> a codec made in seconds -> SFT of a small language model
# that writes speech tokens -> GRPO with a recogniser, speaker similarity and duration as rewards -> both evaluated on
# held-out texts, with sound files of both. About 10 minutes on two CPU cores. No hub, no GPU.
#
#   ./run_train.sh recipes/tts/quickstart.sh
#   ./run_train.sh recipes/tts/quickstart.sh --scorer models/whisper-tiny.en    # another recogniser as the reward
#   JUDGE=models/whisper-tiny.en ./run_train.sh recipes/tts/quickstart.sh       # and one that the policy never met
#   ./run_train.sh recipes/tts/quickstart.sh --algo.kl.init_coef 0.01           # flags of `speechrl train`
#
# Without --scorer the recogniser is the ASR quickstart's export, which is made first if it isn't there.
set -euo pipefail

RUN=${RUN:-runs/tts_quickstart}
ASR_RUN=${ASR_RUN:-runs/quickstart}
JUDGE=${JUDGE:-}          # a recogniser for the final numbers alone, such as a Whisper folder
SEED=${SEED:-0}           # of corpus, weights, data order and sampling
SCALE=${SCALE:-1.0}       # of the corpus, at most 1
SFT_STEPS=${SFT_STEPS:-150}    # more of them learns the texts by heart
GRPO_STEPS=${GRPO_STEPS:-40}
RANKS=${RANKS:-2}         # one CPU process each

scorer=$ASR_RUN/grpo/hf/last
flags=()
while [ $# -gt 0 ]; do
  if [ "$1" = --scorer ]; then scorer=$2; shift 2; else flags+=("$1"); shift; fi
done

if [ "$scorer" = "$ASR_RUN/grpo/hf/last" ] && [ ! -d "$scorer" ]; then
  echo "== no recogniser in $scorer: running the ASR quickstart first"
  RUN=$ASR_RUN bash recipes/asr/quickstart.sh
fi

mkdir -p "$RUN"
: > "$RUN/seconds.tsv"
stage() {  # stage NAME COMMAND...: run it, say so, note its seconds
  local name=$1 started=$SECONDS
  shift
  echo "== $name"
  "$@"
  printf '%s\t%s\n' "$name" "$((SECONDS - started))" >> "$RUN/seconds.tsv"
}

corpus=$RUN/corpus
ranks=(--actor.num_ranks "$RANKS" --actor.device cpu --ds.param_dtype fp32 --ds.zero_stage 0 --train.seed "$SEED")
speech=(--data.speech_style llasa --codec.name_or_path "$corpus/codec" --codec.num_workers "$RANKS")
export SPEECHRL_TTS_ASR=$scorer

stage synth speechrl synth --task tts --out "$corpus" --seed "$SEED" --scale "$SCALE" --model_out "$RUN/model"

stage sft speechrl sft "${ranks[@]}" \
  --actor.model_name_or_path "$RUN/model" --data.speech_style llasa --data.prompt_dataset "$corpus/sft_train.jsonl" \
  --actor.adam.lr 3e-3 --actor.adam.weight_decay 0.01 --actor.adam.betas 0.9 0.98 \
  --actor.lr_scheduler cosine --actor.lr_warmup_ratio 0.08 \
  --train.batch_size 32 --train.micro_batch_size 16 --train.max_steps "$SFT_STEPS" \
  --tracking.sample_steps 50 --ckpt.output_dir "$RUN/sft" --ckpt.overwrite

# Each part of the reward is normalised inside its group before the sum: gdpo. The norms' gains train alone: of the whole
# model's gradient 128 completions leave next to nothing but noise (docs/tts.md).
stage grpo speechrl train "${ranks[@]}" "${speech[@]}" \
  --actor.model_name_or_path "$RUN/sft/hf/last" --data.prompt_dataset "$corpus/rl_train.jsonl" \
  --actor.freeze matrices --actor.adam.lr 3e-2 --actor.lr_scheduler linear --actor.lr_warmup_ratio 0.05 \
  --rollout.batch_size 8 --rollout.n_samples_per_prompt 16 --rollout.max_new_tokens 80 --algo.overlong_buffer_len 16 \
  --algo.advantage.estimator gdpo --reward.remote_url rewards/tts.py \
  --train.micro_batch_size 64 --train.max_steps "$GRPO_STEPS" \
  --tracking.sample_steps 20 --ckpt.output_dir "$RUN/grpo" --ckpt.overwrite "${flags[@]}"

# sampled as speech is: at temperature 1, the policy that was trained; four times, and metrics are means over them
evaluate=(speechrl eval "${speech[@]}" --model sft="$RUN/sft/hf/last" grpo="$RUN/grpo/hf/last"
  --eval.dataset test="$corpus/test.jsonl" --eval.max_new_tokens 80 --eval.temperature 1 --eval.batch_size 64
  --reward.remote_url rewards/tts.py --actor.num_ranks "$RANKS" --actor.device cpu --seed "$SEED")
stage eval "${evaluate[@]}" --eval.n_samples 4 --output_dir "$RUN/eval"
if [ -n "$JUDGE" ]; then
  SPEECHRL_TTS_ASR=$JUDGE stage judge "${evaluate[@]}" --output_dir "$RUN/judge"
fi

stage compare speechrl compare "$RUN/eval/sft" "$RUN/eval/grpo" --out "$RUN/eval" --show 3 --seed "$SEED"

python recipes/tts/quickstart_summary.py "$RUN" --seed "$SEED"
