"""What a worker thread takes over from the thread it works for.

Grad mode, inference mode, autocast, dispatch and function modes, CUDA streams and the number of
intra-op threads all belong to one thread in PyTorch; a new thread starts with the defaults. A
pipeline that ignored this would compute in float32 inside `torch.autocast`, or build graphs inside
`torch.no_grad()`.
"""

import threading
from contextlib import ExitStack, contextmanager

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode


@contextmanager
def pushed(mode):
    """One dispatch mode on this thread's own stack.

    `with mode:` would do the same, but also saves and restores a process-wide flag, which threads
    that enter and leave in another order would leave set.
    """
    _push_mode(mode)
    try:
        yield mode
    finally:
        _pop_mode()


@contextmanager
def _pushed_function_mode(mode):
    _push_function_mode(mode)
    try:
        yield
    finally:
        _pop_function_mode()


class Autocast:
    """The autocast state of the thread that creates it, to be brought back in another thread, or later."""

    def __init__(self, cache_enabled: bool = True):
        device_types = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        self.state = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types]
        self.cache_enabled = cache_enabled and torch.is_autocast_cache_enabled()

    def restored(self):
        """A context manager that computes in this state; next to free where nothing has to change."""
        changes = ExitStack()
        for device_type, enabled, dtype in self.state:
            if enabled or torch.is_autocast_enabled(device_type):
                changes.enter_context(
                    torch.autocast(device_type, dtype, enabled=enabled, cache_enabled=self.cache_enabled)
                )
        return changes


class CallerContext:
    """The calling thread's state, taken when this is created and entered by each worker."""

    def __init__(self):
        self.autocast = Autocast()
        self.grad_enabled = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.thread = threading.get_ident()
        self.dispatch_modes = _get_current_dispatch_mode_stack()
        self.function_modes = _get_current_function_mode_stack()
        # A caller who works on a stream of their own has the pipeline's kernels queued behind theirs.
        self.streams = (
            [torch.cuda.current_stream(i) for i in range(torch.cuda.device_count())]
            if torch.cuda.is_available() and torch.cuda.is_initialized()
            else []
        )

    @contextmanager
    def entered(self, device: torch.device | None = None):
        """This state, in the thread that enters it, with `device` as the current CUDA device."""
        with ExitStack() as stack:
            if threading.get_ident() != self.thread:  # the caller itself has them already
                for mode in self.function_modes:
                    stack.enter_context(_pushed_function_mode(mode))
                for mode in self.dispatch_modes:
                    stack.enter_context(pushed(mode))
            for stream in self.streams:
                stack.enter_context(torch.cuda.stream(stream))
            if device is not None and device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            stack.enter_context(self.autocast.restored())
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            yield


@contextmanager
def shared_intra_op_threads(n_workers: int):
    """Divides the intra-op threads among `n_workers`; yields what a worker must call first.

    The count is kept by PyTorch both for each thread and for threads yet to come, so the caller's own
    is put back at the end, whatever happened.
    """
    found = torch.get_num_threads()
    share = max(1, found // n_workers)
    try:
        yield (lambda: torch.set_num_threads(share)) if share != found else (lambda: None)
    finally:
        torch.set_num_threads(found)
