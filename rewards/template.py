"""A reward file to start from: copy it, change `score`, and train with --reward.remote_url path/to/your_file.py.

`reward_func` is called once per batch. All arguments are lists of the same length, one entry per completion, and the
completions of one prompt stand next to each other. The same file works behind `speechrl serve-reward FILE`.
"""


def reward_func(queries, prompts, labels, **kwargs):
    # queries: prompt + completion as text; prompts: the prompt alone; labels: the reference texts.
    # By keyword, if you take **kwargs (or name those that you want):
    #   responses    the completions alone: transcripts, without the model's tags
    #   languages    language of the reference, or None
    #   keywords     list of keywords of the utterance, maybe empty
    #   metadata     dict with what else the manifest says
    #   audio_paths  sound file, or None;  durations_s  seconds, or None
    #   generated_audio  what a model that speaks said (docs/tts.md), or None;  speaker_paths  the voice asked for
    #   finish_reasons  "stop", "length" (cut off), or None;  raw_responses  completions with the model's tags
    rewards = [score(response, label) for response, label in zip(kwargs["responses"], labels, strict=True)]

    # One float per completion. None: the reward does not apply here, and the completion is left out of its group.
    # If a reward can't be computed, raise an exception: the run stops and says where. NaN is refused.
    return {
        "rewards": rewards,
        # Optional, for the logs: components by name, each as long as rewards, and the weight of each in the reward
        # (which --algo.advantage.estimator gdpo needs) ...
        "parts": {"exact": rewards},
        "weights": {"exact": 1.0},
        # ... and any other numbers (of a list, the mean is logged).
        "extra_logs": {"response_chars": [len(response) for response in kwargs["responses"]]},
    }


def score(response, label):
    """1 for exactly the reference, else 0; None without a reference."""
    if not label:
        return None
    return float(response.strip() == label.strip())
