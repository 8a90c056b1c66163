"""From a plain model to a routed one and back, with a measured proof of identity."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError, DepthrouteError, shown
from depthroute.models.adoption import plain_class
from depthroute.models.architecture import architecture_for
from depthroute.models.configuration import RoutedConfigMixin
from depthroute.models.families import routed_family
from depthroute.models.model import RoutedCausalLM, RoutedModel, plan_for
from depthroute.models.modes import evaluating
from depthroute.nn import Sites

PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Lists of a configuration that say something of every layer."""


def from_config(config: Any, routing: RoutingConfig, **kwargs: Any) -> Any:
    """A routed model from scratch. ``config`` is any supported Hugging Face configuration.

    With ``routing.loops = R`` the configuration's layers are run R times; the routed configuration
    then counts every visit in ``num_hidden_layers``, which is what caches must hold.
    """
    return routed_family(architecture_for(config)).causal_lm._from_config(
        routed_config(config, routing), **kwargs
    )


def routed_config(config: Any, routing: RoutingConfig, *, converting: bool = False) -> Any:
    """``config`` with its routing section, ``init`` made explicit so that files say what ran."""
    check_is_routing(routing)
    architecture = architecture_for(config)
    values = config.to_dict()
    if routing.loops > 1:
        count = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        for name in (count, *PER_LAYER):
            if values.get(name):
                values[name] = values[name] * routing.loops
    for name in ("architectures", "transformers_version", "model_type"):
        values.pop(name, None)
    config = _same_implementations(config, routed_family(architecture).config.from_dict(values))
    plan = plan_for(config, routing, converting=converting)
    config.routing = replace(routing, init=plan.init).to_dict()
    config.architectures = [f"Routed{architecture.causal_lm}"]
    return config


def check_is_routing(routing: Any) -> None:
    if not isinstance(routing, RoutingConfig):
        raise ConfigError(
            f"routing is {shown(routing)}; give a RoutingConfig, such as RoutingConfig('delta'), "
            "or RoutingConfig.from_dict of an object"
        )


def converted_config(config: Any, routing: RoutingConfig) -> Any:
    """The configuration that :func:`convert` gives a model of ``config``, or why it cannot."""
    check_is_routing(routing)
    if routing.loops > 1:
        raise ConfigError(
            f"routing.loops={routing.loops} changes what a pretrained model computes; build "
            "looped models with from_config"
        )
    return routed_config(config, routing, converting=True)


def _same_implementations(old: Any, new: Any) -> Any:
    """Which attention and expert kernels run is no part of a configuration's dictionary."""
    for name in ("_attn_implementation", "_experts_implementation"):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))
    return new


def convert(
    model: Any,
    routing: RoutingConfig,
    *,
    verify: Tensor | None = None,
    tolerance: float = 1e-3,
) -> Any:
    """A routed model that shares ``model``'s parameters; ``model`` itself is left as it is.

    A missing ``routing.init`` means identity here. ``verify=input_ids`` measures the largest logit
    difference on those tokens and refuses above ``tolerance``; the report is kept in
    ``routed.identity``. In bf16 only ``init="centered"`` is exact to the bit: others differ by the
    rounding of the dtype, so verify in fp32 or allow for it.

    Training one of the two models trains the shared parameters of both; deep-copy ``model`` first
    to keep an untouched one.
    """
    check_is_plain(model)
    config = converted_config(model.config, routing)
    routed = _routed_like(model).adopting(_share(model), config)
    config.architectures = [type(routed).__name__]
    if verify is not None:
        routed.identity = identity_report(model, routed, verify)
        if not routed.identity.max_difference <= tolerance:  # NaN must not pass
            raise IdentityError(routed.identity, tolerance, routed.plan.init)
    return routed


def check_is_plain(model: Any) -> None:
    """Whether :func:`convert` takes ``model`` at all."""
    if isinstance(model, RoutedModel):
        raise ConfigError(
            f"the model is already routed (method {model.plan.method!r}); revert it first"
        )
    if not hasattr(model, "config"):
        raise ConfigError(f"convert takes a Hugging Face model, not {type(model).__name__}")
    _routed_like(model)


def _routed_like(model: Any) -> Any:
    """The routed class that a plain model becomes one of."""
    architecture = architecture_for(model.config)
    names = {cls.__name__: cls for cls in routed_family(architecture).models}
    if f"Routed{type(model).__name__}" not in names:
        known = ", ".join(name.removeprefix("Routed") for name in names)
        raise ConfigError(
            f"convert takes {known} for model_type {architecture.model_type!r}, not "
            f"{type(model).__name__}"
        )
    return names[f"Routed{type(model).__name__}"]


def revert(routed: Any) -> Any:
    """The plain model back: same parameters, bit for bit if they were not trained."""
    if not isinstance(routed, RoutedModel):
        raise ConfigError(f"revert takes a routed model, not {type(routed).__name__}")
    family = plain_class(type(routed.config), RoutedConfigMixin)
    config = family.from_dict(routed.config.base_dict())
    return _share(routed).reverted(_same_implementations(routed.config, config))


def _share(model: nn.Module) -> Any:
    """A copy of the module tree that holds the very same parameters and buffers."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(t): t for t in tensors})


class IdentityError(DepthrouteError):
    """A conversion changed the model by more than was allowed."""

    def __init__(self, report: IdentityReport, tolerance: float, init: str) -> None:
        super().__init__(
            f"the conversion is not an identity: {report} against a tolerance of {tolerance:g} "
            f"(init {init!r}). Leave init out for an exact conversion, or accept the change "
            "(--allow-drift on the command line, no verify in Python)"
        )
        self.report = report


@dataclass(frozen=True)
class IdentityReport:
    max_difference: float
    """Largest absolute difference of any logit."""
    mean_difference: float
    loss_before: float | None
    """Of a language model, which alone has one without labels."""
    loss_after: float | None
    num_tokens: int

    def __str__(self) -> str:
        difference = (
            f"identity over {self.num_tokens} tokens: max |logit difference| "
            f"{self.max_difference:.3g}, mean {self.mean_difference:.3g}"
        )
        if self.loss_before is None:
            return difference
        return f"{difference}, loss {self.loss_before:.6f} before, {self.loss_after:.6f} after"


@torch.no_grad()
def identity_report(plain: Any, routed: Any, input_ids: Tensor) -> IdentityReport:
    """How far the routed model's logits are from the plain one's on these tokens; of a decoder,
    its last states."""
    if input_ids.ndim != 2 or input_ids.shape[1] < 2:
        raise DepthrouteError(
            f"input_ids has shape {tuple(input_ids.shape)}; identity_report needs "
            "[batch, tokens] with at least 2 tokens"
        )
    results = []
    for model in (plain, routed):
        labels = {"labels": input_ids} if isinstance(routed, RoutedCausalLM) else {}
        with evaluating(model):
            results.append(model(input_ids=input_ids, **labels, use_cache=False))
    before, after = results
    # logits, the last states, or where an answer starts
    parts = [(result[1] if labels else result[0]).double() for result in results]
    difference = (parts[0] - parts[1]).abs()
    return IdentityReport(
        max_difference=difference.max().item(),
        mean_difference=difference.mean().item(),
        loss_before=before.loss.item() if labels else None,
        loss_after=after.loss.item() if labels else None,
        num_tokens=input_ids.numel(),
    )


def parameter_groups(
    model: Any, lr: float, routing_lr: float | None = None, weight_decay: float = 0.1
) -> list[dict[str, Any]]:
    """Optimiser groups: decayed matrices, undecayed vectors, and routing with its own rate.

    Routing parameters are never decayed. Published fine-tuning uses ``routing_lr = 100 * lr``.
    ``model`` may be wrapped, or be any module that holds ``nn.Sites``; where its method has no
    parameters, as in a comparison, there is no such group.
    """
    sites = [module for module in model.modules() if isinstance(module, Sites)]
    if routing_lr is not None and not sites:
        raise ConfigError(
            f"routing_lr={routing_lr} is the rate of routing parameters, and this "
            f"{type(model).__name__} is not routed; leave it out, or convert the model first"
        )
    routing = {id(p) for module in sites for p in module.parameters()}
    groups: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": [], "routing": []}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in routing:
            groups["routing"].append(parameter)
        else:
            groups["decay" if parameter.ndim > 1 else "no_decay"].append(parameter)
    rates = {"routing": lr if routing_lr is None else routing_lr}
    return [
        {
            "name": name,
            "params": parameters,
            "lr": rates.get(name, lr),
            "weight_decay": weight_decay if name == "decay" else 0.0,
        }
        for name, parameters in groups.items()
        if parameters
    ]
