"""The routed decoder: a family's own (``LlamaModel``) over routed layers, with its routing."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError
from depthroute.models import depth_attention
from depthroute.models.adoption import adopted, plain_class
from depthroute.models.architecture import Architecture, architecture_for
from depthroute.models.pretrained import RoutedPreTrained
from depthroute.models.routed import LoopedLayers, plain_layer, routed_layer
from depthroute.nn import Sites
from depthroute.plan import Plan


class RoutedDecoder(RoutedPreTrained):
    """Mixed into a family's decoder; its forward is the family's."""

    routing: Sites

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._route(plan_for(config, config.routing_config()))
        self.post_init()

    @classmethod
    def adopting(cls, decoder: Any, plan: Plan) -> Any:
        """A routed decoder of what the family's ``decoder`` holds."""
        refuse_replaced_forwards(decoder, cls.architecture)
        routed = adopted(cls, decoder)
        routed._route(plan)
        return routed

    def _route(self, plan: Plan) -> None:
        spec, config = self.architecture, self.config
        plain = [*getattr(self, spec.layers)][: plan.num_layers // plan.loops]
        attentions = [getattr(layer, spec.attention.module) for layer in plain]
        _refuse_linear(attentions, plan, spec)
        if plan.method == "depth_attention":
            depth_attention.enable(attentions, config)
        if plan.key_norm == "after_rope":
            depth_attention.delay_key_norms(attentions, spec.model_type)
        layers = [routed_layer(layer, spec, config) for layer in plain]
        layers[0].decoder = (self,)
        listed = LoopedLayers(layers, plan.loops) if plan.loops > 1 else nn.ModuleList(layers)
        setattr(self, spec.layers, listed)
        weight = next(filter(_is_wide, self.parameters()))
        sites = Sites(plan, config.hidden_size)
        self.routing = sites.to(device=weight.device, dtype=weight.dtype)
        names = {type(layer).__name__ for layer in layers}
        self._no_split_modules = names | set(self._no_split_modules or ())

    def reverted(self) -> Any:
        """The family's decoder of what this one holds."""
        spec = self.architecture
        refuse_replaced_forwards(self, spec)
        if self.plan.loops > 1:
            raise ConfigError(
                "a looped model has no plain counterpart: its layers are run "
                f"{self.plan.loops} times with the same weights"
            )
        plain = adopted(plain_class(type(self), RoutedDecoder), self)
        layers = [plain_layer(layer) for layer in getattr(self, spec.layers)]
        depth_attention.restore_key_norms([getattr(x, spec.attention.module) for x in layers])
        setattr(plain, spec.layers, nn.ModuleList(layers))
        del plain.routing
        plain._no_split_modules = family_names(self._no_split_modules)
        return plain


def family_names(names: Any) -> set[str]:
    """Of modules that a device map keeps whole, without those of routed ones."""
    return {name for name in names or () if not name.startswith("Routed")}


def plan_for(config: Any, routing: RoutingConfig, *, converting: bool = False) -> Plan:
    """The plan of a Hugging Face configuration whose ``num_hidden_layers`` counts every visit."""
    spec = architecture_for(config)
    return routing.resolve(
        config.num_hidden_layers,
        width=config.hidden_size,
        eps=getattr(config, spec.eps),
        converting=converting,
        sublayers=spec.sublayers(config),
    )


def refuse_replaced_forwards(decoder: Any, spec: Architecture) -> None:
    """Where somebody has put a ``forward`` on a module itself, another class is in vain.

    The one that was put there would go on calling the class's of before.
    """
    for part in (decoder, *getattr(decoder, spec.layers)):
        if "forward" in vars(part):
            raise ConfigError(
                f"the model's {type(part).__name__} has a forward of its own, as accelerate gives "
                "it for a device_map over several devices, and patches do; convert or revert the "
                "model first, then spread, offload or patch it (a routed model that was saved is "
                "loaded with device_map like any other)"
            )


def _is_wide(parameter: Tensor) -> bool:
    """Whether routing can be kept in its dtype; quantised weights are bytes or whole numbers."""
    return parameter.is_floating_point() and parameter.element_size() > 1


def _refuse_linear(attentions: list[Any], plan: Plan, spec: Architecture) -> None:
    linear = ", ".join(str(i) for i, a in enumerate(attentions) if spec.is_linear(a))
    where = f"layers {linear} of this {spec.model_type} model are linear attention"
    if linear and plan.method == "depth_attention":
        raise ConfigError(
            f"depth attention mixes the values of softmax attention, and {where}; use "
            "method='attnres' or 'delta'"
        )
    if linear and plan.loops > 1:
        raise ConfigError(
            f"routing.loops={plan.loops} needs a cache with keys and values of every visit, and "
            f"{where}, whose one state the visits would overwrite; leave loops out"
        )
