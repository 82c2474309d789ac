"""What the options of TextRules do to real sentences; the expected texts are written by hand."""

import random
from itertools import takewhile
from pathlib import Path

import pytest

from speechrl.data.languages import LANGUAGES, name_of
from speechrl.data.normalise import OPTIONS, TextRules, normalise
from speechrl.data.text_rules import read_rules, rules_of
from speechrl.reward.alignment import align, alignment_lines
from speechrl.reward.metrics import cer, error_counts, mer, wer

SPOKEN = [
    ("zh", "今天是2024年10月5日。", "今天是二零二四年十月五日"),
    ("zh", "我有 2 个苹果，花了1,000元。", "我有两个苹果 花了一千元"),
    ("zh", "下午3:30见，涨了12%", "下午三点三十分见 涨了百分之十二"),
    ("zh", "第2个和2个", "第二个和两个"),
    ("zh", "１２３路", "一百二十三路"),
    ("zh-TW", "下午3點，我有2個蘋果", "下午三點 我有兩個蘋果"),
    ("yue", "佢有2個仔，今年18歲。", "佢有兩個仔 今年十八歲"),
    ("ja", "3時30分に1,000円払いました。", "三時三十分に千円払いました"),
    ("ja", "2024年10月5日", "二千二十四年十月五日"),
    ("ru", "Мне 25 лет, температура 3,5 градуса.", "мне двадцать пять лет температура три целых пять десятых градуса"),
    ("ru", "население 2 000 000", "население два миллиона"),
    ("fr", "En 2024, j’ai payé 3,50 €.", "en deux mille vingt quatre j'ai payé trois virgule cinquante"),
    ("fr", "12,05", "douze virgule zéro cinq"),
    ("fr", "71 et 99", "soixante et onze et quatre vingt dix neuf"),
    (
        "de",
        "1984 kamen 1.000.000 Gäste und 3,25 Prozent.",
        "neunzehnhundertvierundachtzig kamen eine million gäste und drei komma zwei fünf prozent",
    ),
    ("de", "21 Grad", "einundzwanzig grad"),
    (
        "vi",
        "Năm 2024 có 105.000 người và 15 con mèo",
        "năm hai nghìn không trăm hai mươi bốn có một trăm lẻ năm nghìn người và mười lăm con mèo",
    ),
    ("vi", "1005", "một nghìn không trăm lẻ năm"),
    ("th", "มี 2 คน 21 บาท 101 วัน", "มี สอง คน ยี่สิบเอ็ด บาท หนึ่งร้อยเอ็ด วัน"),
    ("th", "ราคา3.5บาท", "ราคาสามจุดห้าบาท"),
    ("hi", "२५ किताबें और 1,00,000 रुपये", "पच्चीस किताबें और एक लाख रुपये"),
    ("hi", "2.5 किलो", "दो दशमलव पाँच किलो"),
    ("id", "Saya punya 125 buku, 1.000 halaman", "saya punya seratus dua puluh lima buku seribu halaman"),
    ("fr", "007, 5g et 1234567890123456", "007 5g et 1234567890123456"),  # codes and names stay
]


@pytest.mark.parametrize(("language", "text", "expected"), SPOKEN)
def test_numbers_in_words(language, text, expected):
    assert normalise(text, TextRules(language, numbers="words")) == expected
    assert normalise(expected, TextRules(language, numbers="words")) == expected


WRITTEN = [
    ("en", "Twenty-one guests came in two thousand and four.", "21 guests came in 2004"),
    ("en", "twenty twenty four", "2024"),
    ("en", "It costs $1,250.50, or twelve hundred fifty dollars!", "it costs 1250 50 or 1250"),
    ("en", "one apple and 1 pear", "one apple and one pear"),
    ("en", "three point five percent", "3 5"),
    ("en", "the second of May, 10:30", "the 2nd of may 10 30"),
    ("fr", "J’ai vingt et un ans et un chat", "j'ai 21 ans et un chat"),
    ("fr", "quatre-vingt-dix-neuf, deux mille vingt-quatre", "99 2024"),
    ("fr", "10 000 euros", "10000 euros"),
    ("de", "Ich bin einundzwanzig und zahle zweitausendvierundzwanzig Euro", "ich bin 21 und zahle 2024 euro"),
    ("de", "Ein Mann, neunzehnhundertneunundneunzig Euro und 1.000", "ein mann 1999 euro und 1000"),
    ("es", "Tengo veintiún años y treinta y cinco libros", "tengo 21 años y 35 libros"),
    ("it", "ventuno gatti", "21 gatti"),
    ("pt", "vinte e um gatos", "21 gatos"),
    ("nl", "eenentwintig katten", "21 katten"),
]


@pytest.mark.parametrize(("language", "text", "expected"), WRITTEN)
def test_numbers_in_digits(language, text, expected):
    assert normalise(text, TextRules(language, numbers="digits")) == expected
    assert normalise(expected, TextRules(language, numbers="digits")) == expected


def test_numbers_stay_without_the_option():
    assert normalise("今天是2024年", "zh") == "今天是2024年"
    assert normalise("twenty one, 21", "English") == "twenty one 21"


@pytest.mark.parametrize(
    ("language", "han", "text", "expected"),
    [
        ("zh", "simplified", "頭髮長得很快，皇后在後面", "头发长得很快 皇后在后面"),
        ("yue", "simplified", "佢哋聽日嚟食飯", "佢哋听日嚟食饭"),
        ("zh", "traditional", "头发长得很快，皇后在后面", "頭髮長得很快 皇后在後面"),
        ("zh", "traditional", "裡面", "裏面"),
        ("zh", "traditional", "裏面", "裏面"),
        ("zh", "keep", "裡面", "裡面"),
    ],
)
def test_one_chinese_script(language, han, text, expected):
    assert normalise(text, TextRules(language, han=han)) == expected


def test_numbers_and_script_together():
    rules = TextRules("yue", numbers="words", han="simplified")
    assert normalise("佢有2個仔", rules) == normalise("佢有两个仔", rules) == "佢有两个仔"


def test_american_spelling():
    rules = TextRules("en", spelling="american")
    assert (
        normalise("The colour’s grey in the Theatre; Archaeology!", rules)
        == "the color's gray in the theater archeology"
    )
    assert normalise("colour", "en") == "colour"


def test_vowel_marks_may_be_dropped():
    assert normalise("مُحَمَّدٌ", TextRules("Arabic", vowel_marks="drop")) == "محمد"
    assert normalise("شָׁלוֹם".replace("ش", "ש"), TextRules("he", vowel_marks="drop")) == "שלום"
    assert normalise("آمن", TextRules("ar", vowel_marks="drop")) == "آمن"  # the madda makes another letter
    assert normalise("مُحَمَّدٌ", "ar") == "مُحَمَّدٌ"


def test_more_digits_than_python_writes_stay_as_they_are():
    for loop in ("9" * 5000, "1 " * 5000):
        settled = normalise(loop, TextRules("en", numbers="digits"))
        assert settled == loop.replace(" ", "")


def test_metrics_take_rules_or_a_language():
    rules = TextRules("en", numbers="digits")
    for rate in (cer, wer, mer):
        assert rate("21 cats", "twenty one cats", rules) == 0.0
        assert rate("21 cats", "twenty one cats", "en") > 0.5
        assert rate("21 cats", "twenty one cats") > 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"language": "ko", "numbers": "words"},
            r"numbers='words' is not there for language 'ko', but for German \(de\)",
        ),
        ({"language": "zh", "numbers": "digits"}, r"for language 'zh', but for .*English \(en\)"),
        ({"language": "Arabic", "numbers": "words"}, "for language 'Arabic'"),
        ({"language": "en", "numbers": "words"}, "for language 'en'"),
        ({"language": "ja", "han": "simplified"}, r"but for Cantonese \(yue\), Chinese \(zh\)"),
        ({"language": None, "spelling": "american"}, r"for language None, but for English \(en\)"),
        ({"language": "Klingon", "vowel_marks": "drop"}, "for language 'Klingon', but for Arabic"),
        ({"language": "en", "numbers": "word"}, "numbers='word' is none of 'keep', 'words', 'digits'"),
        ({"language": "en", "han": True}, "han=True is none of 'keep', 'simplified', 'traditional'"),
    ],
)
def test_an_option_that_a_language_lacks(arguments, message):
    with pytest.raises(ValueError, match=message):
        TextRules(**arguments)


RULES = [TextRules(code, **{name: value}) for (name, value), codes in OPTIONS.items() for code in codes]
ENGLISH = "one two twenty thirty hundred oh point double half and second dollars percent colour theatre"
OTHERS = "un deux vingt mille virgule premier ein zwei einundzwanzig hundert komma مُ שָׁ"
FIGURES = "0 1 2 05 007 12 2024 1000 1,000 1.000 3.5 3,5 10:30 5g １２"
CHARACTERS = "年月个個点第時分裡乾著薴瀋彌は円-.,%$½²Ⅷ३٣๒👍'\ud800\u0301\0"
PIECES = [*ENGLISH.split(), *OTHERS.split(), *FIGURES.split(), *CHARACTERS]


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: f"{rules.language}-{rules.numbers}-{rules.han}")
def test_twice_is_once_and_nothing_crashes(rules):
    rng = random.Random(0)
    for _ in range(60):
        text = "".join(rng.choice(PIECES) + rng.choice(["", " "]) for _ in range(rng.randrange(12)))
        once = normalise(text, rules)
        assert normalise(once, rules) == once, text


def test_every_row_is_a_language_of_the_table():
    assert {code for codes in OPTIONS.values() for code in codes} <= set(LANGUAGES)


# --- docs/normalisation.md ------------------------------------------------------------------------------------------

DOCS = (Path(__file__).resolve().parent.parent / "docs" / "normalisation.md").read_text(encoding="utf-8")


def rows_below(header: str) -> list[list[str]]:
    """Cells of the table that follows the line of its header."""
    lines = DOCS.partition(header + "\n")[2].splitlines()[1:]
    table = list(takewhile(lambda line: line.startswith("|"), lines))
    assert table, header
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_table_of_options_is_true():
    documented = rows_below('| language | numbers="words" | numbers="digits" | han | spelling | vowel_marks |')
    expected = []
    for code in sorted({code for codes in OPTIONS.values() for code in codes}, key=LANGUAGES.__getitem__):
        there = [option for option, codes in OPTIONS.items() if code in codes]
        named = [", ".join(v for n, v in there if n == name) for name in ("han", "spelling", "vowel_marks")]
        numbers = ["yes" if ("numbers", value) in there else "" for value in ("words", "digits")]
        expected.append([name_of(code), *numbers, *named])
    assert documented == expected


def test_the_examples_are_true():
    examples = rows_below("| language | option | text | compared as |")
    assert len(examples) == 16
    for language, option, text, expected in examples:
        assert normalise(text, TextRules(language, **dict([option.split("=")]))) == expected


def test_what_always_happens_is_true():
    steps = rows_below("| step | example |")
    pairs = [pair.split(" -> ") for _, example in steps for pair in example.split(", ") if "->" in pair]
    assert len(pairs) == 8
    assert [(text, normalise(text)) for text, _ in pairs] == [tuple(pair) for pair in pairs]


def test_the_counts_of_units_are_true():
    header = "| measure | counts | Korean 한국 사람 | 我用 iPhone 手机 |"
    for measure, _, korean, mixed in rows_below(header):
        for text, expected in (("한국 사람", korean), ("我用 iPhone 手机", mixed)):
            assert error_counts(measure.strip("`"), [text], [text])[0].reference_length == int(expected)


def test_the_alignment_is_true():
    lines = alignment_lines(align("我用安卓手", "我用 iPhone 手", measure="mer"))
    assert "\n".join(f"    {line}" for line in lines) in DOCS


def test_a_book_of_rules():
    book = read_rules(["zh.numbers=words", "English.spelling=american", "zh.han=simplified"], "--eval.text_rules")
    assert book == {
        "zh": TextRules("zh", numbers="words", han="simplified"),
        "en": TextRules("en", spelling="american"),
    }
    assert rules_of("Chinese", book) == book["zh"] and rules_of("fr", book) == "fr" and rules_of(None, book) is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("numbers=words", r"--eval\.text_rules numbers=words: give LANGUAGE\.OPTION=VALUE"),
        ("zh.numbers=", "give LANGUAGE"),
        ("zh.figures=words", "--eval.text_rules zh.figures=words: .*figures"),
        ("ko.numbers=words", "not there for language 'ko', but for"),
        ("zh.han=both", "is none of 'keep', 'simplified', 'traditional'"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(entry: str, message: str):
    with pytest.raises(ValueError, match=message):
        read_rules([entry], "--eval.text_rules")
