#!/usr/bin/env python3
"""Load an exported Qwen3-ASR folder with transformers alone and transcribe one sound file. Imports nothing of speechrl.

    python recipes/asr/reload_export.py FOLDER FILE [--expect HYPOTHESES.jsonl]

With --expect, the transcript must equal that file's first one.
"""

import argparse
import json
import sys

import soundfile
from transformers import AutoModelForMultimodalLM, AutoProcessor

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("folder")
parser.add_argument("file", help="16 kHz mono")
parser.add_argument("--expect", help="hypotheses of `speechrl eval`, whose first line is this file's")
arguments = parser.parse_args()

processor = AutoProcessor.from_pretrained(arguments.folder, local_files_only=True)
model = AutoModelForMultimodalLM.from_pretrained(arguments.folder, local_files_only=True).eval()
samples, rate_hz = soundfile.read(arguments.file, dtype="float32")
chat = [{"role": "user", "content": [{"type": "audio"}]}]
text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
inputs = processor(text=[text], audio=[samples], sampling_rate=rate_hz, return_tensors="pt")
ids = model.generate(**inputs, max_new_tokens=64, do_sample=False)[0, inputs["input_ids"].shape[1] :]
transcript = processor.tokenizer.decode(ids, skip_special_tokens=True).rpartition("<asr_text>")[2].strip()
print(f"{arguments.file}: {transcript}")
if arguments.expect:
    with open(arguments.expect, encoding="utf-8") as handle:
        expected = json.loads(handle.readline())["text"]
    if transcript != expected:
        sys.exit(f"the reloaded export says {transcript!r}, speechrl eval said {expected!r}")
