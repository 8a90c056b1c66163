"""The routed causal language model: a family's own model class over a routed decoder."""

from __future__ import annotations

from typing import Any, ClassVar

from depthroute.models.adoption import adopted, plain_class
from depthroute.models.decoder import RoutedDecoder, family_names, plan_for
from depthroute.models.pretrained import RoutedPreTrained
from depthroute.plan import Plan


class RoutedCausalLM(RoutedPreTrained):
    """Mixed into a family's ``...ForCausalLM``; forward, loss and generate are the family's."""

    decoder_class: ClassVar[type[RoutedDecoder]]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._route(plan_for(config, config.routing_config()))
        self.post_init()

    @classmethod
    def adopting(cls, model: Any, config: Any) -> Any:
        """A routed model of what the family's ``model`` holds, with the configuration ``config``
        in place of its own."""
        routed = adopted(cls, model)
        _set_config(routed, config)
        routed._route(plan_for(config, config.routing_config()))
        return routed

    def _route(self, plan: Plan) -> None:
        decoder = self.decoder_class.adopting(self.base_model, plan)
        setattr(self, self.base_model_prefix, decoder)
        self._no_split_modules = decoder._no_split_modules | set(self._no_split_modules or ())

    def reverted(self, config: Any) -> Any:
        """The family's model of what this one holds, with the configuration ``config``."""
        plain = adopted(plain_class(type(self), RoutedCausalLM), self)
        setattr(plain, self.base_model_prefix, self.base_model.reverted())
        plain._no_split_modules = family_names(self._no_split_modules)
        _set_config(plain, config)
        return plain


def _set_config(model: Any, config: Any) -> None:
    """Point every module that holds a configuration of the model at the new one."""
    old = type(model.config)
    for module in model.modules():
        if isinstance(module.__dict__.get("config"), old):
            module.config = config
