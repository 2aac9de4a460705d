"""Tokenizers are used as they are: nothing added, nothing downloaded."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qcollect.data.tokenizer import ByteTokenizer, encode_document, load_tokenizer, require_eos
from qcollect.errors import DatasetError

BOS, EOS = 256, 257


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer as Llama 3's: begins each text with a token, has no pad token."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", BOS)]
    )
    path = tmp_path_factory.mktemp("tokenizer")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>", model_max_length=8
    ).save_pretrained(path)
    return path


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bytes_are_their_own_ids(text: str) -> None:
    assert bytes(ByteTokenizer().encode(text)).decode() == text


def test_the_built_in_tokenizer_ends_documents_with_256() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (257, 256, None)
    assert encode_document(tokenizer, "é", append_eos=True) == [0xC3, 0xA9, 256]
    assert encode_document(tokenizer, "é", append_eos=False) == [0xC3, 0xA9]


def test_a_folder_keeps_its_vocabulary_and_gets_no_pad_token(folder: Path) -> None:
    # huggingface/transformers issue 22794: a token added for padding resizes the embedding.
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (258, EOS, BOS)


def test_a_document_begins_as_the_tokenizer_begins_texts_and_ends_once(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    ids = encode_document(tokenizer, "a text longer than model_max_length", append_eos=True)
    assert ids[0] == BOS and ids.count(BOS) == 1
    assert ids[-1] == EOS and ids.count(EOS) == 1
    assert len(ids) == 2 + len("a text longer than model_max_length")


def test_special_tokens_spelled_out_in_a_text_are_text(folder: Path) -> None:
    assert EOS not in load_tokenizer(folder).encode("about <|end_of_text|> tokens")


def test_an_end_the_tokenizer_adds_itself_is_not_doubled() -> None:
    class Ending(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [*text.encode(), 256]

    assert encode_document(Ending(), "a", append_eos=True) == [97, 256]


def test_a_tokenizer_without_an_end_token_cannot_append_one() -> None:
    with pytest.raises(DatasetError, match="no end token"):
        require_eos(ByteTokenizer(eos_id=None))


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no such tokenizer folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(DatasetError, match=r"no tokenizer in this folder; looked for tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_git_lfs_pointer_is_called_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(DatasetError, match=r"tokenizer\.json: is a Git LFS pointer"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer_is_refused_with_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_text("garbage")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(DatasetError, match="the tokenizer cannot be loaded: ") as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_called_bytes_can_be_named_by_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bytes").mkdir()
    with pytest.raises(DatasetError, match="no tokenizer in this folder"):
        load_tokenizer(Path("bytes"))
