"""Small folders on disk, with a tokenizer, as the commands read them."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support import plain_model, routed_model

TEXT = "the model reads what every layer said before it\n" * 12


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: every text has tokens, and no file is needed."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i + 2 for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def save(path: Path, method: str | None = "delta", **kwargs) -> str:
    """A model with its tokenizer; ``method=None`` is a plain one."""
    kwargs = {"vocab_size": 320} | kwargs
    model = plain_model(**kwargs) if method is None else routed_model(method, **kwargs)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)
