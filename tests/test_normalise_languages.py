"""Real sentences in twelve languages: what is compared, and the errors of a plausible recogniser, counted by hand."""

from dataclasses import dataclass

import pytest

from speechrl.data.normalise import Rules, TextRules, normalise
from speechrl.reward.metrics import char_counts, mixed_counts, word_counts


@dataclass(frozen=True)
class Case:
    """chars, words, mixed: (errors, units of the reference)."""

    rules: Rules
    ref: str
    compared: str
    hyp: str
    chars: tuple[int, int]
    words: tuple[int, int]
    mixed: tuple[int, int]


CASES = {
    # chars: the apostrophe and the space of "a m"; words: don't, "a m" against "am" is 2
    "English": Case(
        "en",
        "Don’t forget: the train to New York leaves at 7:45 a.m.!",
        "don't forget the train to new york leaves at 7 45 a m",
        "dont forget the train to new york leaves at 7:45 am",
        (2, 53),
        (3, 13),
        (3, 13),
    ),
    # 气 for 汽, 走走 inserted; one clause less is a word less, and neither clause is right
    "Mandarin": Case(
        "Chinese",
        "今天天气很好，我们去公园散步吧。",
        "今天天气很好 我们去公园散步吧",
        "今天天汽很好我们去公园走走散步吧",
        (3, 14),
        (2, 2),
        (3, 14),
    ),
    # 哋 as 地, 會 left out
    "Cantonese": Case(
        "yue", "佢哋聽日會嚟我屋企食飯。", "佢哋聽日會嚟我屋企食飯", "佢地聽日嚟我屋企食飯", (2, 11), (1, 1), (2, 11)
    ),
    # half-width katakana; ー lost, す as した
    "Japanese": Case(
        "ja", "明日はｶﾚｰを食べます。", "明日はカレーを食べます", "明日はカレを食べました", (3, 11), (1, 1), (3, 11)
    ),
    # 갑습니다 against 가워요: 3 wrong, 1 lost
    "Korean": Case(
        "Korean",
        "안녕하세요, 만나서 반갑습니다.",
        "안녕하세요 만나서 반갑습니다",
        "안녕하세요 만나서 반가워요",
        (4, 15),
        (1, 3),
        (1, 3),
    ),
    # न् as an anusvara (1 wrong, 1 lost), and the anusvara of हैं lost
    "Hindi": Case("hi", "क्या आप हिन्दी बोलते हैं?", "क्या आप हिन्दी बोलते हैं", "क्या आप हिंदी बोलते है", (3, 24), (2, 5), (2, 5)),
    # ร lost; by letters with their marks ค รั against คั
    "Thai": Case("Thai", "สวัสดีครับ ยินดีต้อนรับ!", "สวัสดีครับ ยินดีต้อนรับ", "สวัสดีคับยินดีต้อนรับ", (1, 22), (2, 2), (2, 15)),
    # tanwin lost, the article ال lost
    "Arabic": Case(
        "ar", "مرحبًا، كيف حالك اليوم؟", "مرحبًا كيف حالك اليوم", "مرحبا كيف حالك يوم", (3, 21), (2, 4), (2, 4)
    ),
    "Arabic without vowel marks": Case(
        TextRules("ar", vowel_marks="drop"),
        "مرحبًا، كيف حالك اليوم؟",
        "مرحبا كيف حالك اليوم",
        "مرحبا كيف حالك يوم",
        (2, 20),
        (1, 4),
        (1, 4),
    ),
    # ё as е, "в " lost
    "Russian": Case(
        "ru",
        "Ёлка стоит в углу комнаты.",
        "ёлка стоит в углу комнаты",
        "елка стоит углу комнаты",
        (3, 25),
        (2, 5),
        (2, 5),
    ),
    # é as er (1 wrong, 1 inserted), 'î as il
    "French": Case(
        "fr",
        "L’été dernier, j’ai visité l’Île-de-France.",
        "l'été dernier j'ai visité l'île de france",
        "l'été dernier j'ai visiter lille de france",
        (4, 41),
        (2, 7),
        (2, 7),
    ),
    # one space inserted; ß is ss
    "German": Case(
        "de",
        "Die Straße ist wegen Bauarbeiten gesperrt.",
        "die strasse ist wegen bauarbeiten gesperrt",
        "die Strasse ist wegen Bau Arbeiten gesperrt",
        (1, 42),
        (2, 6),
        (2, 6),
    ),
    # y as i, a tone lost
    "Vietnamese": Case(
        "vi", "Hôm nay trời đẹp quá!", "hôm nay trời đẹp quá", "hôm nai trơi đẹp quá", (2, 20), (2, 5), (2, 5)
    ),
    # code-switched: 用 lost, iphone wrong
    "Mandarin and English": Case(
        "zh", "我用 iPhone 15 手机。", "我用 iphone 15 手机", "我 iphones 15 手机", (2, 13), (2, 4), (2, 6)
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_by_hand(case):
    assert normalise(case.ref, case.rules) == case.compared
    for counts, expected in ((char_counts, case.chars), (word_counts, case.words), (mixed_counts, case.mixed)):
        found = counts(case.hyp, case.ref, case.rules)
        assert (found.errors, found.reference_length) == expected
        assert counts(case.ref, case.ref, case.rules).errors == 0


def test_how_a_character_is_encoded_does_not_count():
    assert char_counts("\u1112\u1161\u11ab\u1100\u116e\u11a8", "한국").errors == 0  # jamo
    assert char_counts("cafe\u0301", "café").errors == 0
    assert char_counts("นํ้า เเล้ว", "น้ำ แล้ว", "th").errors == 0  # sara am and sara ae, typed in two
