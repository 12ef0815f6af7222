"""lab/needle_data.py: the needle's task as sequences of which the answer counts."""

import pytest
from conftest import check_dataset, write_dataset

from data.dataset import TokenStream
from data.tokenizer import get_tokenizer
from infra.cli import UserError
from lab import needle, needle_data

BYTES = get_tokenizer("bytes")
LENGTH = 256


@pytest.fixture
def texts(tmp_path):
    """A dataset whose training text is "ab" and whose validation text "cd", over and over."""
    texts = {"val": "cd" * 400, "train": "ab" * 400}
    splits = {split: [BYTES.eot_token, *text.encode()] for split, text in texts.items()}
    return write_dataset(tmp_path / "texts", splits, 10**6)


def test_a_sequence_is_the_tests_task_with_its_answer(texts, tmp_path, call):
    out = tmp_path / "needle"
    call(needle_data, texts, "--seq-len", LENGTH, "--sequences", 200, "--out", out)
    check_dataset(out)
    places = set()
    for split, letters in (("train", "ab"), ("val", "cd")):
        stream = TokenStream(out, split)
        assert stream.mask is not None
        for start in range(0, 200 * LENGTH, LENGTH):
            tokens = stream.read(start, LENGTH)
            learned = stream.mask.read(start, LENGTH).nonzero()[0]
            answer = BYTES.decode(tokens[learned[:-1]].tolist())
            text = BYTES.decode(tokens[1 : learned[0]].tolist())
            city = text.rpartition("The special magic ")[2].partition(" number is: ")[0]
            assert tokens[learned[-1]] == BYTES.eot_token and not tokens[learned[-1] + 1 :].any()
            assert (
                len(answer) == 7
                and text.count(f"The special magic {city} number is: {answer}.") == 1
            )
            assert text.endswith(f"Answer: The special magic {city} number is: ")
            assert set(text.partition("\nThe special")[0]) <= {*letters}
            places.add(text.index("The special"))
    assert len(places) > 90  # percent of the text


def test_another_text_in_the_same_folder_is_not_found_before(texts, tmp_path, call):
    command = (
        needle_data,
        texts,
        "--seq-len",
        LENGTH,
        "--sequences",
        4,
        "--out",
        tmp_path / "needle",
    )
    call(*command)
    splits = {
        split: [BYTES.eot_token, *letters * 400]
        for split, letters in (("val", b"cd"), ("train", b"ef"))
    }
    write_dataset(texts, splits, 10**6)
    with pytest.raises(UserError, match="holds a finished dataset of other settings"):
        call(*command)


def test_the_tests_own_numbers_are_not_among_them(texts):
    haystack = needle.Haystack(TokenStream(texts, "val"), BYTES)
    asked = {needle.make_trial(haystack, LENGTH, 50, i).number for i in range(500)}
    first = needle_data.FIRST["train"]
    learned = {needle.make_trial(haystack, LENGTH, 50, first + i).number for i in range(500)}
    assert len(asked) == len(learned) == 500 and len(asked & learned) < 3  # of 9 million


def test_a_length_without_room_is_one_line(texts, tmp_path, call):
    with pytest.raises(UserError, match="expected at least"):
        call(needle_data, texts, "--seq-len", 64, "--out", tmp_path / "needle")
    assert not (tmp_path / "needle" / "dataset.json").exists()
