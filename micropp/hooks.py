"""Forward hooks that fire once a micro-batch, although re-materialization calls each layer twice.

A hook that only looks (collects activations, counts calls) must not see a micro-batch twice. A hook
that takes part (changes an output, or, as weight norm does, sets the layer's weight) must run in both
passes, or the recomputation would compute something else. Which of the two a hook is shows when it runs.
"""

from contextlib import contextmanager

import torch
from torch import nn

_KINDS = ("_forward_pre_hooks", "_forward_hooks")


class ForwardHooks:
    """The forward hooks of some modules, over one run."""

    def __init__(self, modules: list[nn.Module]):
        self.modules = [module for module in modules if any(getattr(module, kind) for kind in _KINDS)]
        self.taking_part = set()  # the keys of the hooks that changed something

    @contextmanager
    def _replaced(self, replacement):
        """`replacement(hooks)` in place of each dict of hooks; a hook may still remove itself from the real one."""
        found = [(module, kind, getattr(module, kind)) for module in self.modules for kind in _KINDS]
        try:
            for module, kind, hooks in found:
                module.__dict__[kind] = replacement(hooks)
            yield
        finally:
            for module, kind, hooks in found:
                module.__dict__[kind] = hooks

    def watched(self):
        """First pass: every hook runs, and it shows which of them take part."""
        return self._replaced(lambda hooks: type(hooks)((key, self._watch(key, hook)) for key, hook in hooks.items()))

    def repeated(self):
        """Recomputation: only the hooks that take part run again."""
        return self._replaced(
            lambda hooks: type(hooks)((key, hook) for key, hook in hooks.items() if key in self.taking_part)
        )

    def _watch(self, key, hook):
        def watching(module, *arguments):
            attributes, versions = dict(module.__dict__), _versions(arguments)
            result = hook(module, *arguments)
            # `is not`, key by key: comparing the values themselves would compare tensors.
            same = attributes.keys() == module.__dict__.keys() and all(
                module.__dict__[name] is value for name, value in attributes.items()
            )
            if result is not None or not same or versions != _versions(arguments):
                self.taking_part.add(key)
            return result

        return watching


def _versions(arguments) -> list[int]:
    """How often each tensor among a hook's arguments has been changed in place."""
    flat = []
    for argument in arguments:
        flat.extend(argument if isinstance(argument, (tuple, list)) else [argument])
    return [tensor._version for tensor in flat if isinstance(tensor, torch.Tensor) and not tensor.is_inference()]
