"""The others: torchgpipe in this process, torch.distributed.pipelining in processes of its own."""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from micropp.partition import equal_counts

PATIENCE = 120.0  # seconds that one command may take before the ranks are taken for stuck


class RivalFailed(RuntimeError):
    """A rival did not run: its message, so that a failure is not taken for a slow step."""


def torchgpipe_missing() -> str | None:
    """Why torchgpipe cannot be had, or None. It is an extra, never needed by the course itself."""
    try:
        import torchgpipe  # noqa: F401
    except ImportError as error:
        return f"torchgpipe is not installed ({error}): pip install torchgpipe==0.0.7"
    return None


def torchgpipe_around(model: nn.Sequential, n_partitions: int, n_microbatches: int, use_checkpoint: bool) -> nn.Module:
    """torchgpipe.GPipe with K equal stages, all on the CPU.

    It has one worker thread a *distinct* device, so on a CPU the stages take turns; and its backward is one
    autograd graph, which a CPU walks in the caller's thread. The workers end with each forward call.
    """
    import torchgpipe

    return torchgpipe.GPipe(
        model,
        balance=equal_counts(len(model), n_partitions),
        devices=["cpu"] * n_partitions,
        chunks=n_microbatches,
        checkpoint="always" if use_checkpoint else "never",
    )


def distributed_missing() -> str | None:
    """Why torch.distributed.pipelining cannot be had, or None."""
    if not (dist.is_available() and dist.is_gloo_available()):
        return "this build of torch has no torch.distributed over gloo: install one that has"
    return None


class DistributedGPipe:
    """ScheduleGPipe over gloo: a process a stage, alive over all rounds, told through a pipe what to do.

    A context manager: at its end the processes have ended, or are killed.

    Args:
        make_model: make_model() gives the nn.Sequential, the same in every process; importable by its name.
        make_data: likewise, the batch and its target.
    """

    def __init__(self, n_partitions: int, n_microbatches: int, make_model: Callable, make_data: Callable):
        self.n_partitions = n_partitions
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        context = multiprocessing.get_context("spawn")  # fork hangs where the parent's tensor threads have run
        found = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # read when a process first imports torch
        try:
            for rank in range(n_partitions):
                mine, its = context.Pipe()
                arguments = (rank, n_partitions, n_microbatches, self._folder.name, its, make_model, make_data)
                process = context.Process(target=_rank, args=arguments, name=f"rank {rank}", daemon=True)
                process.start()
                its.close()
                self._pipes.append(mine)
                self._processes.append(process)
        except BaseException:
            self.close()
            raise
        finally:
            if found is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = found

    def step(self) -> float:
        """The slowest rank's time from one barrier to the next."""
        return max(self._all("step"))

    def gradients(self) -> list[Tensor]:
        return [torch.from_numpy(array) for arrays in self._all("gradients") for array in arrays]

    def _all(self, command: str) -> list:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(command)
            except OSError:
                pass  # it has ended; what it said last is still to be read
        deadline = time.monotonic() + PATIENCE
        return [self._answer(rank, command, deadline) for rank in range(self.n_partitions)]

    def _answer(self, rank: int, command: str, deadline: float):
        # In short steps and over all pipes: a rank that waits for a dead one should not cost us its whole timeout.
        while not self._pipes[rank].poll(0.01):
            for other, process in enumerate(self._processes):
                if not process.is_alive() and not self._pipes[other].poll():
                    raise RivalFailed(f"rank {other} ended at {command!r} with exit status {process.exitcode}")
            if time.monotonic() > deadline:
                raise RivalFailed(f"rank {rank} has not answered {command!r} in {PATIENCE:.0f} s")
        try:
            ok, value = self._pipes[rank].recv()
        except EOFError:
            raise RivalFailed(f"rank {rank} ended at {command!r}") from None
        if not ok:
            raise RivalFailed(f"rank {rank} failed at {command!r}: {value.strip().splitlines()[-1]}\n{value}")
        return value

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # a rank that reads this ends by itself
        deadline = time.monotonic() + 5
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._pipes, self._processes = [], []
        self._folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def _rank(rank: int, n_partitions: int, n_microbatches: int, folder: str, pipe, make_model, make_data) -> None:
    """The life of one process."""
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(Path(folder, "rendezvous")), n_partitions)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=n_partitions, timeout=timedelta(seconds=PATIENCE)
        )
        stage, step = _stage_and_step(rank, n_partitions, n_microbatches, make_model, make_data)
        while True:
            command = pipe.recv()
            if command == "step":
                stage.zero_grad(set_to_none=True)
                dist.barrier()
                started = time.perf_counter()
                step()
                seconds = time.perf_counter() - started
                dist.barrier()
                pipe.send((True, seconds))
            else:
                pipe.send((True, [parameter.grad.numpy() for parameter in stage.parameters()]))
    except (EOFError, KeyboardInterrupt):
        pass  # the other end is closed: the benchmark is over
    except BaseException:
        try:
            pipe.send((False, traceback.format_exc()))
        except OSError:
            pass
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads sometimes abort an orderly end of the interpreter


def _stage_and_step(rank: int, n_partitions: int, n_microbatches: int, make_model, make_data):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    layers = list(make_model())
    counts = equal_counts(len(layers), n_partitions)
    first = sum(counts[:rank])
    module = nn.Sequential(*layers[first : first + counts[rank]])
    batch, target = make_data()
    stage = PipelineStage(module, rank, n_partitions, torch.device("cpu"))
    # It divides the summed gradients by M itself, which for equal micro-batches is the mini-batch mean.
    schedule = ScheduleGPipe(stage, n_microbatches, loss_fn=nn.functional.mse_loss)
    arguments = (batch,) if rank == 0 else ()
    keywords = {"target": target} if rank == n_partitions - 1 else {}
    # Without its outputs, as a training loop that needs no more than the loss would have it.
    return module, lambda: schedule.step(*arguments, return_outputs=False, **keywords)
