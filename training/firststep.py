"""What only a run's first step can show: which parameters get a gradient, and in which order gradients come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .errors import TrainingError


class FirstStep:
    """Watches the first backward pass of the parameters of a model (by name; only those that are trained)."""

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        self.order: list[str] = []
        """Names as their gradients came."""
        self._trained = trained
        self._hooks: list[Any] = []

    def watch(self) -> None:
        """Before the pass in which gradients are reduced."""

        def seen(name: str) -> Any:
            return lambda _: self.order.append(name)

        register: Any
        for name, parameter in self._trained.items():
            register = parameter.register_post_accumulate_grad_hook
            self._hooks.append(register(seen(name)))

    def check(self, all_needed: bool) -> None:
        """After it. With a parameter left out, DDP would leave gradients of others unreduced.

        Errors: TrainingError naming the parameters without a gradient.
        """
        for hook in self._hooks:
            hook.remove()
        gradients: dict[str, Tensor | None] = {name: p.grad for name, p in self._trained.items()}
        missing = [name for name, gradient in gradients.items() if gradient is None]
        if missing and all_needed:
            raise left_out("the first step", missing)


def left_out(step: str, names: Sequence[str]) -> TrainingError:
    """The error for parameters to which a step gave no gradient."""
    return TrainingError(
        f"{step} gave no gradient to {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}; "
        "freeze them with requires_grad_(False), or set find_unused_parameters = True on the task's class"
    )
