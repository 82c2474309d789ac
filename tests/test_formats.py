import pytest

from speechrl.reward.formats import WHISPER_TAG, broken_characters, clean, language_tag, leftover_tags


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("", []),
        ("turn on the light", []),
        ("a < b and c > d, I <3 you", []),
        ("[sic] she said [laughing]", []),
        ("hello<|endoftext|>", ["<|endoftext|>"]),
        ("<|en|><|transcribe|>hello", ["<|en|>", "<|transcribe|>"]),
        ("language English<asr_text>hello</s>", ["<asr_text>", "</s>"]),
        ("one <unk> two [NOISE] [BLANK_AUDIO]", ["<unk>", "[NOISE]", "[BLANK_AUDIO]"]),
    ],
)
def test_leftover_tags(text, tags):
    assert leftover_tags(text) == tags
    assert clean(text) == float(not tags)


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("你好\n\tA", 0), ("caf\ufffd", 1), ("\ufffd\ufffd", 2), ("a\x00b\x07", 2), ("\x85", 1), ("\ud800", 1)],
)
def test_broken_characters(text, count):
    assert broken_characters(text) == count
    assert clean(text) == float(count == 0)


@pytest.mark.parametrize(
    ("raw", "language", "expected"),
    [
        ("language English<asr_text>hello", "English", 1.0),
        ("language English<asr_text>hello", "en", 1.0),
        (" language Chinese<asr_text>你好", "zh-CN", 1.0),
        ("language Chinese<asr_text>hello", "English", 0.0),
        ("language Klingon<asr_text>hello", "klingon", 1.0),
        ("language None<asr_text>", "English", 0.0),
        ("hello", "English", 0.0),
        ("hello language English<asr_text>", "English", 0.0),
        ("", "English", 0.0),
        ("language English<asr_text>hello", None, None),
    ],
)
def test_language_tag(raw, language, expected):
    assert language_tag(raw, language) == expected


def test_language_tag_of_another_family():
    assert language_tag("<|startoftranscript|><|de|><|transcribe|>hallo", "German", WHISPER_TAG) == 1.0
    assert language_tag("<|en|>hallo", "German", WHISPER_TAG) == 0.0
