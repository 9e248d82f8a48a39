"""Files, vocabularies, examples and batches: nothing lost, nothing twice, and one sentence for what is wrong."""

import gzip
import json
from collections import Counter

import pytest
import torch

from tfm_kernels import training
from tfm_kernels.training import text_file, vocabulary
from tfm_kernels.training.loss import IGNORED
from tfm_kernels.training.vocabulary import END, MASK, PAD, START, UNKNOWN

LINES = ["the cat sat on the mat", "the dog sat on the log", "hällo wörld ☃", "a cat and a dog"] * 5


@pytest.fixture
def characters():
    return training.CharacterVocabulary("".join(LINES))


@pytest.mark.parametrize("max_tokens", [40, 100, 10_000])
def test_an_epoch_has_each_example_once_in_batches_that_fit(max_tokens):
    lengths = torch.randint(1, 40, (997,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = training.TokenBatches(lengths, max_tokens, seed=3)
    orders = [batches.epoch(0), batches.epoch(1)]
    for order in orders:
        assert sorted(example for batch in order for example in batch) == list(range(997))
        assert all(len(batch) * max(lengths[at] for at in batch) <= max_tokens for batch in order)
    assert orders[0] == training.TokenBatches(lengths, max_tokens, seed=3).epoch(0)
    assert orders[0] != training.TokenBatches(lengths, max_tokens, seed=4).epoch(0)
    assert orders[0] != orders[1]
    if max_tokens <= 100:  # many batches: other neighbours, too, not only another order
        assert {tuple(sorted(batch)) for batch in orders[0]} != {tuple(sorted(batch)) for batch in orders[1]}
    filled = sum(lengths) / sum(len(batch) * max(lengths[at] for at in batch) for batch in orders[0])
    assert filled > 0.9 or max_tokens > 100  # neighbours in length: little padding


def test_a_position_resumes_within_and_between_epochs():
    batches = training.TokenBatches([1] * 10, 3, seed=0)
    run = batches.after(training.Position())
    seen = [next(run) for _ in range(11)]
    for at in (0, 2, 3, 6):
        again = batches.after(seen[at][2])
        assert [next(again) for _ in range(4)] == seen[at + 1 : at + 5]
    assert Counter(example for epoch, batch, _ in seen if epoch == 1 for example in batch) == Counter(range(10))


def test_no_examples_and_too_long_ones_are_refused():
    with pytest.raises(ValueError, match="^TokenBatches: lengths must hold at least one example, got none$"):
        training.TokenBatches([], 10, 0)
    with pytest.raises(ValueError, match="^TokenBatches: max_tokens must be at least the longest example, 12, got 10$"):
        training.TokenBatches([3, 12], 10, 0)
    assert max(map(len, training.TokenBatches([1] * 10, 100, 0, max_examples=4).epoch(0))) == 4


def test_characters_are_sorted_and_special_numbers_are_stable(characters, tmp_path):
    assert characters.characters == sorted(set("".join(LINES)))
    assert [characters.token(at) for at in range(5)] == ["<pad>", "<start>", "<end>", "<unk>", "<mask>"]
    assert characters.encode("cX") == [5 + characters.characters.index("c"), UNKNOWN]
    assert characters.decode([START, *characters.encode("hällo"), END, PAD]) == "hällo"
    characters.save(tmp_path / "vocabulary.json")
    assert vocabulary.load(tmp_path / "vocabulary.json").characters == characters.characters


def test_byte_pairs_give_every_text_back(tmp_path):
    pytest.importorskip("tokenizers")
    pairs = training.BytePairVocabulary.train(LINES, 300)
    again = training.BytePairVocabulary.train(LINES, 300)
    assert pairs.size <= 300 and pairs.encode(LINES[0]) == again.encode(LINES[0])
    assert len(pairs.encode(LINES[0])) < len(LINES[0]) / 2
    pairs.save(tmp_path / "vocabulary.json")
    loaded = vocabulary.load(tmp_path / "vocabulary.json")
    for text in ("the cat", "  two  spaces ", "<mask> is a word, <pad> too", "日本語\tß"):
        ids = loaded.encode(text)
        assert ids == pairs.encode(text) and min(ids) > MASK and loaded.decode([START, *ids, END]) == text
    with pytest.raises(training.InputError, match="at least 261, got 100"):
        training.BytePairVocabulary.train(LINES, 100)


def test_a_foreign_vocabulary_is_one_sentence(tmp_path):
    pytest.importorskip("tokenizers")
    path = tmp_path / "vocabulary.json"
    specials = list(vocabulary.SPECIALS)
    foreign = [
        {"specials": ["a"], "kind": "character", "content": []},
        {"specials": specials, "kind": "character", "content": [1, 2]},
        {"specials": specials, "kind": "byte-pair", "content": {}},  # tokenizers raises a bare Exception
    ]
    for content in ("{", "[]", *map(json.dumps, foreign)):
        path.write_text(content)
        with pytest.raises(training.InputError, match="is not a vocabulary of this library"):
            vocabulary.load(path)


def test_translation_examples(characters):
    examples = training.TranslationExamples(
        [("cat", "dog"), ("a", "on the"), ("x" * 30, "a")], characters, characters, 10
    )
    assert examples.left_out == 1 and examples.lengths == [5, 8]
    (source, target), wanted = examples.batch([0, 1], 0)
    assert source.tolist() == [[*characters.encode("cat"), END], [*characters.encode("a"), END, PAD, PAD]]
    assert target.tolist()[1] == [START, *characters.encode("on the")]
    assert wanted.tolist() == [[*characters.encode("dog"), END, *[IGNORED] * 3], [*characters.encode("on the"), END]]
    with pytest.raises(training.InputError, match="all 1 pairs have a sentence of more than 3 tokens"):
        training.TranslationExamples([("cat", "dog")], characters, characters, 3)


def test_labelled_examples(characters):
    rows = [("cat", "good"), ("a dog and", "bad")]
    examples = training.LabelledExamples(rows, characters, ["bad", "good"], 6)
    assert examples.cut == 1
    (ids,), labels = examples.batch([0, 1], 0)
    assert labels.tolist() == [1, 0] and ids[0].tolist() == [START, *characters.encode("cat"), END, PAD]
    assert ids[1].tolist() == [START, *characters.encode("a do"), END]
    with pytest.raises(training.InputError, match="dev.tsv has the unknown label 'fine'; known are bad, good"):
        training.LabelledExamples([("cat", "fine")], characters, ["bad", "good"], 6, "dev.tsv")


def test_masks_depend_on_the_example_and_the_epoch_not_on_the_batch(characters):
    examples = training.MaskedExamples(LINES, characters, 64, seed=0)
    (together,), hidden = examples.batch([0, 1], 0)
    (alone,), wanted = examples.batch([1], 0)
    assert torch.equal(together[1, : alone.shape[1]], alone[0]) and torch.equal(hidden[1, : alone.shape[1]], wanted[0])
    whole = [examples.batch(range(len(LINES)), epoch) for epoch in (0, 1)]
    assert not torch.equal(whole[0][1], whole[1][1])
    assert (whole[0][0][0] == MASK).any() and (whole[0][0][0][:, 0] == START).all()


def test_lines_and_streams_predict_the_next_token(characters):
    lines = training.LineExamples(["cat", "a"], characters, 64)
    (ids,), wanted = lines.batch([0, 1], 0)
    assert ids[0].tolist() == [START, *characters.encode("cat")]
    assert wanted.tolist() == [[*characters.encode("cat"), END], [*characters.encode("a"), END, IGNORED, IGNORED]]
    cat = characters.encode("cat")
    assert lines.cut == 0 and training.LineExamples(["cat"], characters, 4).batch([0], 0)[1].tolist() == [[*cat, END]]
    lines = training.LineExamples(["cat"], characters, 3)  # <end> does not follow on a cut
    assert lines.cut == 1 and lines.lengths == [3] and lines.batch([0], 0)[1].tolist() == [cat]
    stream = training.StreamExamples(range(100), 10, seed=1)
    seen = [stream.batch(range(len(stream.lengths)), epoch)[0][0] for epoch in (0, 1)]
    assert len(stream.lengths) == 9 and seen[0].shape == (9, 10) and seen[0][0, 0] != seen[1][0, 0]
    (ids,), wanted = stream.batch([3], 0)
    assert torch.equal(ids + 1, wanted)
    still = training.StreamExamples(range(101), 10, seed=None)
    (ids,), wanted = still.batch(range(10), 5)
    assert torch.equal(ids.flatten(), torch.arange(100)) and wanted[-1, -1] == 100


@pytest.mark.parametrize(("seed", "least"), [(1, 20), (None, 11)])
def test_a_stream_needs_as_many_tokens_as_its_sentence_says(seed, least):
    shortest = training.StreamExamples(range(least), 10, seed)
    assert shortest.lengths == [10]
    for epoch in range(40):  # every beginning fits
        (ids,), wanted = shortest.batch([0], epoch)
        assert ids.shape == (1, 10) and torch.equal(ids + 1, wanted)
    with pytest.raises(training.InputError, match=f"^its end must have at least {least} tokens, got {least - 1}$"):
        training.StreamExamples(range(least - 1), 10, seed, "its end")


def test_files_are_read_as_users_write_them(tmp_path):
    plain, packed = tmp_path / "a.txt", tmp_path / "b.txt.gz"
    plain.write_bytes("\ufeffone\r\ntwo\u2028still two\n\nthree".encode())
    packed.write_bytes(gzip.compress(b"eins\nzwei\n\ndrei\n"))
    assert text_file.read_lines(plain) == ["one", "two\u2028still two", "", "three"]
    assert text_file.read_parallel(plain, packed) == [
        ("one", "eins"),
        ("two\u2028still two", "zwei"),
        ("three", "drei"),
    ]
    assert text_file.read_sentences(packed) == ["eins", "zwei", "drei"]
    rows = tmp_path / "rows.tsv"
    rows.write_text("a good\tone\t1\n\nbad\t0\n")
    assert text_file.read_labelled(rows) == [("a good\tone", "1"), ("bad", "0")]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("absent.txt", None, "cannot be read (No such file or directory)"),
        ("latin1.txt", "fine\nh\xe4llo\n".encode("latin1"), "must be UTF-8 text, got byte 0xe4 in line 2"),
        ("empty.txt", b"", "holds no text"),
        ("blank.txt", b" \n\n", "holds no text"),
        ("cut.gz", gzip.compress(b"hello" * 100)[:20], "cannot be read ("),
        ("not.gz", b"hello", "cannot be read ("),
    ],
    ids=["absent", "latin1", "empty", "blank", "cut", "not_gzip"],
)
def test_a_bad_file_is_one_sentence(tmp_path, name, content, sentence):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(training.InputError) as caught:
        text_file.read_text(path)
    assert sentence in str(caught.value) and name in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_do_not_fit_are_one_sentence(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("a\nb\n")
    other.write_text("a\nb\nc\n")
    with pytest.raises(training.InputError, match="one has 2 lines but .*other has 3; line n of one must translate"):
        text_file.read_parallel(one, other)
    other.write_text("\nx\n")
    one.write_text("a\n\n")
    with pytest.raises(training.InputError, match="have no line in common"):
        text_file.read_parallel(one, other)
    for bad in ("no tab", "\t1", "text\t"):
        one.write_text(f"fine\t1\n{bad}\n")
        with pytest.raises(training.InputError, match="a text, a tab and a label in each line, got line 2"):
            text_file.read_labelled(one)
