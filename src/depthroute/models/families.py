"""The routed classes of every family: configuration, decoder and decoders with a head, made when
first needed and known to transformers' Auto classes from then on."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, NamedTuple

import transformers
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING,
)

from depthroute.models.adoption import routed_class
from depthroute.models.architecture import ARCHITECTURES, Architecture
from depthroute.models.configuration import RoutedConfigMixin
from depthroute.models.depth_attention import LateNorm
from depthroute.models.model import RoutedCausalLM, RoutedDecoder, RoutedHead
from depthroute.models.recording import share_table
from depthroute.models.routed import RoutedLayer


class Family(NamedTuple):
    config: Any
    """``RoutedLlamaConfig`` for the Llama entry, and so on."""
    decoder: Any
    causal_lm: Any
    others: tuple[Any, ...]
    """With other heads, those that transformers has for the family."""

    @property
    def models(self) -> tuple[Any, ...]:
        return (self.decoder, self.causal_lm, *self.others)


HEADS = (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModelForQuestionAnswering,
)
"""Beside that of a language model."""
OF_HEADS = [r"^(lm_head|score|qa_outputs)\."]
"""Tensors that a checkpoint may hold besides, of which a model with another head is loaded."""


@cache
def routed_family(architecture: Architecture) -> Family:
    base = CONFIG_MAPPING[architecture.model_type]
    config = routed_class(base, RoutedConfigMixin)

    def made(plain: Any, mixin: Any, auto: Any) -> Any:
        cls = _model_class(plain, mixin, architecture, config)
        auto.register(config, cls, exist_ok=True)
        return cls

    decoder = made(MODEL_MAPPING[base], RoutedDecoder, AutoModel)
    causal = getattr(transformers, architecture.causal_lm)
    causal_lm = made(causal, RoutedCausalLM, AutoModelForCausalLM)
    causal_lm.base_model_prefix = decoder.base_model_prefix  # llama4's own names none of its parts
    # by its name transformers' Trainer knows that labels are to be shifted, when it smooths them
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[f"depthroute_{base.model_type}"] = causal_lm.__name__
    known = [auto for auto in HEADS if base in auto._model_mapping]
    others = [made(auto._model_mapping[base], RoutedHead, auto) for auto in known]
    for cls in (causal_lm, *others):
        cls.decoder_class = decoder
    for cls in (decoder, *others):
        ignored = cls._keys_to_ignore_on_load_unexpected or ()
        cls._keys_to_ignore_on_load_unexpected = [*ignored, *OF_HEADS]
    return Family(config, decoder, causal_lm, tuple(others))


def _model_class(base: Any, mixin: Any, architecture: Architecture, config: Any) -> Any:
    cls = routed_class(base, mixin)
    cls.architecture, cls.config_class = architecture, config
    share_table(cls, base)
    return cls


def __getattr__(name: str) -> Any:
    """Classes are made when first needed; unpickling in a new process needs them by name."""
    for architecture in ARCHITECTURES.values() if name.startswith(("Routed", "Late")) else ():
        if name == f"Routed{CONFIG_MAPPING[architecture.model_type].__name__}":
            return routed_family(architecture).config
        modeling = sys.modules[getattr(transformers, architecture.causal_lm).__module__]
        if isinstance(base := getattr(modeling, name.removeprefix("Late"), None), type):
            return routed_class(base, LateNorm)
        base = getattr(modeling, name.removeprefix("Routed"), None)
        if not isinstance(base, type) or not issubclass(base, nn.Module):
            continue
        if not issubclass(base, transformers.PreTrainedModel):
            return routed_class(base, RoutedLayer)
        for cls in routed_family(architecture).models:
            if name == cls.__name__:
                return cls
    if name.startswith("Late") and hasattr(nn, name.removeprefix("Late")):
        return routed_class(getattr(nn, name.removeprefix("Late")), LateNorm)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
