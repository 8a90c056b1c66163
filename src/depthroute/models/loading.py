"""The one place that loads models and tokenizers, from a folder or a hub.

What is loaded may come from anyone: it is judged first, it never runs code unless that was asked
for, it is never replaced by something else, and whatever is wrong with it is said in one line.
"""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.hub import cached_file

from depthroute.errors import CheckpointError, ConfigError
from depthroute.models import adapter, folder
from depthroute.models.architecture import ARCHITECTURES, architecture_for
from depthroute.models.configuration import MODEL_TYPE, RoutedConfigMixin, check_routing
from depthroute.models.loaded import check_tensors, first_line, in_one_line

_HUB_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_plain(base: Any, **options: Any) -> Any:
    """A plain model of a supported family, whole; one clear error for anything else.

    ``options`` are those of transformers' ``from_pretrained``. The family's own class is used
    whatever the checkpoint brings, so no code of a stranger runs.
    """
    plain_config(base, **options)
    return _load(base, **options | {"trust_remote_code": False})


def plain_config(base: Any, **options: Any) -> Any:
    """The configuration of what :func:`load_plain` would load, before any weight is read."""
    options = options | {"trust_remote_code": False}
    if _judge(base, options, is_base=True)["model_type"] == MODEL_TYPE:
        raise CheckpointError(
            f"{str(base)!r} is already routed; give the plain checkpoint it was made from, or what "
            "`depthroute revert` makes of it"
        )
    config = _config(base, **options)
    architecture_for(config)
    return config


def model_config(name: Any, **options: Any) -> Any:
    """The configuration of a plain or routed model, judged with its folder before any weight is
    read."""
    if adapter.is_adapter(name):
        raise CheckpointError(
            f"{str(name)!r} holds the routing alone; write the whole model with "
            "depthroute.from_pretrained(...).save_pretrained(...) and give that"
        )
    _judge(name, options)
    return _config(name, **options)


def load_model(name: Any, **options: Any) -> Any:
    """Whatever the folder or hub id holds: a plain model, a routed one, or an adapter."""
    if adapter.is_adapter(name):
        return from_pretrained(name, **options)
    _judge(name, options)
    return _load(name, **options)


def from_pretrained(path: Any, **options: Any) -> Any:
    """A routed checkpoint from a folder or the hub, as ``AutoModelForCausalLM`` loads it.

    An adapter folder is attached to the base it names, a hub id or a path (a relative one as seen
    from the working directory); to another copy of the base with :func:`load_adapter`.
    """
    if adapter.is_adapter(path):
        return adapter.load_adapter(_base_of(path, **options), path)
    config = model_config(path, **options)
    if not isinstance(config, RoutedConfigMixin):
        raise CheckpointError(
            f"{str(path)!r} holds a plain {config.model_type!r} model, which routes nothing; "
            "convert it first (depthroute.convert, or `depthroute convert`)"
        )
    return _load(path, **{"config": config} | options)


def load_tokenizer(name: Any, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or hub id, with its vocabulary."""
    path = folder.find(name, "tokenizer") or str(name)
    _judge_tokenizer(name, is_trusted=trust_remote_code)
    with in_one_line(name, "a tokenizer from "):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                path, trust_remote_code=trust_remote_code
            )
            tokenizer("a")  # what is damaged may show only in use
        except Exception as error:
            if type(error) is not Exception:  # the tokenizers library raises this very class
                raise
            raise ValueError(first_line(error)) from error
    vocabularies = sorted(type(tokenizer).vocab_files_names.values())
    if vocabularies and not any(_file(name, title, {}) for title in vocabularies):
        raise CheckpointError(
            f"cannot load a tokenizer from {str(name)!r}: it has none of "
            f"{', '.join(vocabularies)}, so the tokenizer would know no words"
        )
    return tokenizer


def tokens_of(text: str, tokenizer: Any, model: Any, **options: Any) -> torch.Tensor:
    """Ids [1, T] of a text, all of which the model knows."""
    ids = tokenizer(text, return_tensors="pt", verbose=False, **options).input_ids
    if ids.numel():
        known = model.config.get_text_config().vocab_size
        refuse_unknown_token(int(ids.max()), known, len(tokenizer))
    return ids


def refuse_unknown_token(largest: int, vocab_size: int, tokenizer_size: int) -> None:
    """A tokenizer may be larger than its model, as long as the ``largest`` token of a text is not:
    the embedding would end in an error of its own, on a GPU in a failed assertion of the device."""
    if largest >= vocab_size:
        raise ConfigError(
            f"the tokenizer makes token {largest} of this text, and the model knows the first "
            f"{vocab_size}; save it with resize_token_embeddings({tokenizer_size}), or with the "
            "tokenizer that it was trained with"
        )


def has_tokenizer(name: Any) -> bool:
    """Whether there is anything that says it is one; a damaged one is an error, not an absence."""
    return any(_file(name, title, {}) for title in ("tokenizer_config.json", *_VOCABULARIES))


def tokenizer_source(name: Any) -> Any:
    """An adapter folder has no tokenizer of its own; its base has."""
    if not adapter.is_adapter(name):
        return name
    return adapter.read_adapter(name)[0]["base_model_name_or_path"] or name


def _base_of(path: Any, **options: Any) -> Any:
    base = adapter.read_adapter(path)[0]["base_model_name_or_path"]
    if base is None:
        raise CheckpointError(
            f"the adapter in {str(path)!r} does not record its base; load that yourself and "
            "call depthroute.load_adapter(model, path)"
        )
    try:
        return load_plain(base, **options)
    except CheckpointError as error:
        raise CheckpointError(f"the base of the adapter in {str(path)!r}: {error}") from error


def _load(name: Any, **options: Any) -> Any:
    wants_info = options.pop("output_loading_info", False)
    with in_one_line(name):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder.find(name) or name,
            **{"trust_remote_code": False} | options,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # an error all the same, with the tensor's name
        )
    model, info = loaded
    if not isinstance(model.config, RoutedConfigMixin):  # which has looked itself
        check_tensors(name, model, info)
    return (model.eval(), info) if wants_info else model.eval()


def _config(name: Any, **options: Any) -> Any:
    kept = {k: v for k, v in options.items() if k in (*_HUB_OPTIONS, "trust_remote_code")}
    with in_one_line(name):
        return transformers.AutoConfig.from_pretrained(
            folder.find(name) or name, **{"trust_remote_code": False} | kept
        )


def _judge(name: Any, options: dict[str, Any], *, is_base: bool = False) -> dict[str, Any]:
    """Everything that can be known before transformers is asked; the values of config.json."""
    where = _file(name, "config.json", options)
    if _file(name, "adapter_config.json", options) is not None:
        raise CheckpointError(
            f"{str(name)!r} holds a PEFT adapter (adapter_config.json), which would be put on "
            "another model than asked for; merge it into its base (merge_and_unload), save that"
        )
    if where is None:
        raise CheckpointError(f"cannot load {str(name)!r}: it has no config.json")
    values = folder.read_object(where)
    _check_kind(values, where, is_base=is_base)
    if not options.get("trust_remote_code"):
        _check_code(values, where)
    generation = _file(name, "generation_config.json", options)
    if generation is not None:
        folder.read_object(generation)
    path = folder.find(name)
    if path is not None:
        folder.check_weights(path, values, options)
    return values


def _judge_tokenizer(name: Any, *, is_trusted: bool) -> None:
    for title in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        where = _file(name, title, {})
        values = {} if where is None else folder.read_object(where)
        kind, code = values.get("tokenizer_class"), values.get("auto_map")
        is_known = isinstance(kind, str) and hasattr(transformers, kind)
        if where is not None and code is not None and not is_known and not is_trusted:
            raise _needs_code(where, f"tokenizer_class {kind!r} and auto_map {code!r}")


def _file(name: Any, title: str, options: dict[str, Any]) -> str | None:
    """Where a file of the folder or repository is; None where it has none of that name."""
    path, inside = folder.find(name), options.get("subfolder") or ""
    if path is not None:
        file = os.path.join(path, inside, title)
        return file if os.path.lexists(file) else None
    is_first = title == "config.json"
    with in_one_line(name):
        try:
            return cached_file(
                str(name),
                title,
                _raise_exceptions_for_missing_entries=is_first,  # else no connection is none either
                _raise_exceptions_for_connection_errors=is_first,
                **{k: v for k, v in options.items() if k in _HUB_OPTIONS and v is not None},
            )
        except OSError as error:
            if isinstance(error.__cause__, LocalEntryNotFoundError):
                raise CheckpointError(
                    f"cannot load {str(name)!r}: it is no folder here, and the hub that may have "
                    "it cannot be reached"
                ) from error
            if error.__cause__ is not None or error.errno is not None:
                raise
            return None  # the hub has it, without such a file


def _check_kind(values: dict[str, Any], where: str, *, is_base: bool) -> None:
    kind, code = values.get("model_type"), values.get("auto_map")
    if not isinstance(kind, str):
        # the one other folder of ours that has a config.json
        hint = "it is a run; its trained model, if it has one, is in the folder 'model' in it"
        hint = hint if "environment" in values else "it is no model's configuration"
        raise CheckpointError(f"cannot load {where!r}: its model_type is {kind!r}; {hint}")
    if not isinstance(code, dict | None):
        raise CheckpointError(f"{where!r} has auto_map {code!r}; it must be an object")
    if kind == MODEL_TYPE:
        check_routing(values, repr(where))
    elif is_base:
        architecture_for(SimpleNamespace(model_type=kind))
    if kind in ARCHITECTURES and "routing" in values:
        raise CheckpointError(
            f"{where!r} has a routing section and model_type {kind!r}, which would ignore it; a "
            f"routed model has {MODEL_TYPE!r}, a plain one no routing"
        )


def _check_code(values: dict[str, Any], where: str) -> None:
    """Nothing in a configuration brings code along, from its own folder or from a hub."""
    kind, code = values["model_type"], values.get("auto_map")
    if code and kind not in CONFIG_MAPPING:
        raise _needs_code(where, f"model_type {kind!r}")
    for key, kernel in _implementations(values):
        raise _needs_code(where, f"{key} {kernel!r}, a kernel from a hub")


def _implementations(values: Any) -> list[tuple[str, str]]:
    """Attention and expert kernels that a configuration would fetch, wherever they are in it."""
    if isinstance(values, list):
        return [found for value in values for found in _implementations(value)]
    if not isinstance(values, dict):
        return []
    found = []
    for key, value in values.items():
        if re.search(r"(attn|experts)_implementation", key):
            named = value.values() if isinstance(value, dict) else [value]
            found += [(key, name) for name in named if isinstance(name, str) and "/" in name]
        else:
            found += _implementations(value)
    return found


def _needs_code(where: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{where!r} asks for {what}, which needs code that comes with the model or from a hub; it "
        "is not run unless you trust it: --trust-remote-code, or trust_remote_code=True"
    )
