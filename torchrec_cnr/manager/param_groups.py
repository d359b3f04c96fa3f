"""The hyperparameters of TorchRec's optimizers, so that a resumed job goes on with the learning rate that it had.

A scheduler writes its rate into the ``param_groups`` of an optimizer. TorchRec's optimizers leave them out of their
state dict. With ``save_param_groups(True)`` they include them, but as one object that lists the parameters of this
rank: DCP saves the object of one rank only, and other ranks cannot load it. So this module saves them by parameter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from torchrec_cnr.arguments import check_type
from torchrec_cnr.errors import ConfigurationError, StateMismatchError
from torchrec_cnr.human_text import count_text

_NAME = "param_groups"
_KERNEL_RATE = "kernel_lr"


@dataclass(frozen=True)
class ParamGroups:
    """The ``param_groups`` of a TorchRec optimizer, as a ``Stateful`` to save together with the model.

    The values of a group, such as learning rate and weight decay, are saved by the names of its parameters. So they
    load under any sharding. Optimizers of ``torch.optim`` need no such object: their state dict contains the groups.

    Attributes:
        optimizer: The optimizer, such as ``model.fused_optimizer``.

    Raises:
        ConfigurationError: It is no optimizer of TorchRec.
            Or, while saving, a group has a value that a checkpoint cannot contain.
        StateMismatchError: While loading, if the groups of a parameter are missing.

    Examples:
        >>> from torchrec.optim.keyed import KeyedOptimizer
        >>> weight = torch.zeros(2)
        >>> fused = KeyedOptimizer({"t": weight}, {}, [{"params": [weight], "lr": 0.1}])  # or model.fused_optimizer
        >>> cnr.ParamGroups(fused).state_dict()
        {'param_groups': {'t': (('lr', 0.1),)}}
    """

    optimizer: Optimizer

    def __post_init__(self) -> None:
        check_type("optimizer", self.optimizer, Optimizer, "an optimizer")
        if not hasattr(self.optimizer, "params"):
            raise ConfigurationError(
                "'optimizer' must be one of TorchRec, which names its parameters; other optimizers save their "
                f"param_groups themselves, so put them into the state as they are (got {type(self.optimizer).__name__})"
            )

    def __repr__(self) -> str:
        return f"ParamGroups({count_text(len(_names(self.optimizer)), 'parameter')})"

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the groups, by parameter."""
        names, kernels = _names(self.optimizer), _kernels(self.optimizer)
        saved = {}
        for group in self.optimizer.param_groups:
            values = tuple((key, _plain(key, value)) for key, value in sorted(group.items()) if key != "params")
            for param in map(id, group["params"]):
                rate = ((_KERNEL_RATE, kernels[param].get_learning_rate()),) if param in kernels else ()
                saved[names[param]] = values + rate
        return {_NAME: saved}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Write the values into the groups, and the learning rates into the kernels of fused optimizers.

        Raises:
            StateMismatchError: The values of a parameter are missing.
        """
        names, kernels = _names(self.optimizer), _kernels(self.optimizer)
        saved = state_dict.get(_NAME)
        if not isinstance(saved, Mapping):
            raise StateMismatchError(
                f"{_NAME!r} must be a mapping (got {type(saved).__name__}): load without ParamGroups"
            )
        values_of_groups = [_values(group, names, saved) for group in self.optimizer.param_groups]
        for group, values in zip(self.optimizer.param_groups, values_of_groups, strict=True):
            rate = values.pop(_KERNEL_RATE, values.get("lr"))
            for key, value in values.items():
                _write(group, key, value)
            for kernel in {id(kernel): kernel for p in group["params"] if (kernel := kernels.get(id(p)))}.values():
                if rate is not None:
                    kernel.set_learning_rate(rate)


def _values(group: Mapping[str, Any], names: Mapping[int, str], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for a group, in which its parameters must agree."""
    values: dict[str, Any] | None = None
    for name in (names[id(param)] for param in group["params"]):
        if name not in saved:
            raise StateMismatchError(f"the checkpoint has no param_groups of {name!r}: load without ParamGroups")
        if values is not None and values != dict(saved[name]):
            raise StateMismatchError(
                f"{name!r} has other values in the checkpoint than the parameters with which it shares a group now, "
                "such as another learning rate: give it a group of its own, or load without ParamGroups"
            )
        values = dict(saved[name])
    return {} if values is None else values


def _names(optimizer: Any) -> dict[int, str]:
    """Return the names of parameters, by their ``id()``."""
    names = {id(param): name for name, param in optimizer.params.items()}
    if any(id(param) not in names for group in optimizer.param_groups for param in group["params"]):
        raise ConfigurationError(
            "'optimizer' has a group with a parameter that its 'params' does not name: add it there"
        )
    return names


def _kernels(optimizer: Any) -> dict[int, Any]:
    """Return FBGEMM's kernels, which have the rate of their next backward, by the ``id()`` of their parameters.

    TorchRec copies the rate of a group into them in ``step`` and in ``zero_grad``.
    """
    found: dict[int, Any] = {}
    for _, part in getattr(optimizer, "optimizers", ()):
        found |= _kernels(part)
    wrapped, kernel = getattr(optimizer, "_optimizer", None), getattr(optimizer, "_emb_module", None)
    if wrapped is not None:
        found |= _kernels(wrapped)
    if hasattr(kernel, "get_learning_rate"):
        found |= dict.fromkeys(map(id, optimizer.params.values()), kernel)
    return found


def _plain(key: str, value: Any) -> Any:
    """Return a value of a group as a checkpoint can contain it: one that loads without running code."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple | list):
        return type(value)(_plain(key, part) for part in value)
    if not isinstance(value, bool | int | float | str | type(None)):
        raise ConfigurationError(
            f"{key!r} of a group of 'optimizer' is a {type(value).__name__}, which cannot be saved: make it a number, "
            "a text, or a tensor"
        )
    return value


def _write(group: dict[str, Any], key: str, value: Any) -> None:
    present = group.get(key)
    if isinstance(present, Tensor) and not isinstance(value, Tensor):
        present.fill_(value)  # a compiled step holds on to this tensor
    else:
        group[key] = value
