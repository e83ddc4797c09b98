"""The benchmark: a deep network learns hand-written digits as a pipeline, its plain twin beside it.

    python train_minimal.py --partitions 4 --micro-batches 16

Both start from the same weights and see the same mini-batches, their steps in turn, so that whatever else the machine
does slows both alike. The table at the end sets three things side by side: one device with the whole mini-batch, the
pipeline as it went on this machine, and the pipeline's own measured cells replayed on K devices, which is a simulation
and says so. `--help` lists what can be changed.
"""

import itertools
import signal
import statistics
import sys

import torch
from rich.console import Console

from micropp.schedule import split
from micropp.timeline import Timeline
from minimal import measure, report, workload
from minimal.options import Options, UsageError, parse

WARM_UP_STEPS = 2  # of each twin, on the first mini-batch; they are not counted and leave the weights alone
RECORDINGS = 5  # at least, where there are as many steps


class Interrupt:
    """Ctrl-C ends the run between two steps, with what was measured so far; a second one ends it at once."""

    def __init__(self):
        self.asked = False

    def __enter__(self):
        try:
            self._before = signal.signal(signal.SIGINT, self._ask)
        except ValueError:  # signals belong to the main thread; called from another one, there are none to handle
            self._before = None
        return self

    def __exit__(self, *exception) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _ask(self, number, frame) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> None:
        if self.asked:
            raise KeyboardInterrupt


class Benchmark:
    """One run: `results` fills up as it goes, so that it can be reported whenever the run ends."""

    def __init__(self, options: Options, console: Console, interrupt: Interrupt):
        self.options, self.console, self.interrupt = options, console, interrupt
        self.results = report.nothing_yet(options)
        self.recorded: Timeline | None = None
        self.replayed: Timeline | None = None

    def run(self) -> None:
        """Raises UsageError for sizes that do not fit the data or the memory, KeyboardInterrupt after Ctrl-C."""
        self._prepare()
        self._train()
        x, y = self._first_batch()
        self.interrupt.check()
        self.results["memory"] |= measure.memory(self.twins, self.optimizers, x, y)
        if self.options.check:
            self.interrupt.check()
            self.results["check"] |= measure.gradient_difference(self.twins, x, y)

    def _prepare(self) -> None:
        options = self.options
        self.data = workload.load_data(options)
        model = workload.build_model(options.layers, options.hidden_dim, options.seed)
        sample = split(self.data.x[: options.batch_size], options.effective_micro_batches)[0]  # (N/M, 64)
        balance = workload.choose_balance(options, model, sample)
        self.twins = measure.Twins(
            model,
            options.schedule,
            n_partitions=options.partitions,
            n_microbatches=options.micro_batches,
            use_checkpoint=options.checkpoint,
            balance=balance,
            devices=None if options.devices == ["cpu"] else options.stage_devices,
        )
        self.results["config"]["layers_per_stage"] = self.twins.pipeline.balance
        self.optimizers = {
            name: torch.optim.Adam(module.parameters(), lr=workload.LEARNING_RATE)
            for name, module in (("plain", self.twins.plain), ("pipeline", self.twins.pipeline))
        }

    def _first_batch(self):
        """The one on which everything but the training is measured: always a whole mini-batch."""
        N = self.options.batch_size
        return self.data.x[:N].to(self.twins.device), self.data.y[:N].to(self.twins.device)

    def _train(self) -> None:
        options, twins, training = self.options, self.twins, self.results["training"]
        steps = {"plain": twins.plain_step, "pipeline": twins.pipeline_step}
        x, y = self._first_batch()
        for step, _ in itertools.product(steps.values(), range(WARM_UP_STEPS)):
            self.interrupt.check()
            step(x, y)
        order = torch.Generator().manual_seed(options.seed)
        taken: dict[str, list[float]] = {"plain": [], "pipeline": []}
        n_steps = options.epochs * workload.n_batches(self.data, options.batch_size)
        recordings, apart = measure.Recordings(twins), max(1, n_steps // RECORDINGS)
        with report.TrainingProgress(self.console, n_steps, options.epochs) as progress:
            for epoch in range(1, options.epochs + 1):
                total = {"plain": 0.0, "pipeline": 0.0}
                for x, y in workload.batches(self.data, options.batch_size, order):
                    x, y = x.to(twins.device), y.to(twins.device)
                    for name, step in steps.items():
                        self.interrupt.check()
                        self.optimizers[name].zero_grad()
                        seconds, loss = measure.seconds(step, x, y, options.stage_devices)
                        self.optimizers[name].step()
                        total[name] += loss.item() * len(x) / len(self.data.x)
                        if len(x) == options.batch_size:  # a short last batch is another job
                            taken[name].append(seconds)
                    if len(x) == options.batch_size:
                        if (len(taken["plain"]) - 1) % apart == 0:
                            self.interrupt.check()
                            recordings.take(x, y)
                            self._take_recordings(recordings)
                        self._take_seconds(taken)
                    progress.step(loss.item())
                training["sequential_loss"].append(total["plain"])
                training["loss"].append(total["pipeline"])
                training["sequential_test_accuracy"] = workload.accuracy(twins.plain, self.data, twins.device)
                training["test_accuracy"] = workload.accuracy(twins.pipeline, self.data, twins.device)
                progress.epoch(epoch, total["pipeline"], training["test_accuracy"])
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    def _take_seconds(self, taken: dict[str, list[float]]) -> None:
        plain, pipeline = statistics.median(taken["plain"]), statistics.median(taken["pipeline"])
        self.results["measured"] |= {
            "step_seconds": pipeline,
            "sequential_step_seconds": plain,
            "samples_per_second": self.options.batch_size / pipeline,
            "sequential_samples_per_second": self.options.batch_size / plain,
            "speedup": plain / pipeline,
        }
        if self.replayed is not None:
            self.results["replayed"]["speedup"] = plain / self.replayed.makespan
            self.results["measured"]["overlap"] = sum(self.replayed.busy()) / pipeline

    def _take_recordings(self, recordings: measure.Recordings) -> None:
        self.recorded, self.replayed = recordings.recorded(), recordings.replayed()
        self.results["measured"] |= {"bubble": self.recorded.bubble(), "utilisation": self.recorded.utilisation()}
        makespan = self.replayed.makespan
        self.results["replayed"] |= {
            "step_seconds": makespan,
            "samples_per_second": self.options.batch_size / makespan,
            "overlap": self.replayed.speedup(),
            "bubble": self.replayed.bubble(),
            "utilisation": self.replayed.utilisation(),
        }


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status: 0, 2 for what cannot be run or written, 130 after Ctrl-C."""
    console = Console(highlight=False, markup=False)
    try:
        options = parse(argv)
        with Interrupt() as interrupt:
            benchmark, status = Benchmark(options, console, interrupt), 0
            try:
                benchmark.run()
            except KeyboardInterrupt:
                console.print("Interrupted: this is what was measured so far.")
                status = 130
            report.show(console, options, benchmark.results)
            for path in report.write(options, benchmark.results, benchmark.recorded, benchmark.replayed):
                console.print(f"wrote {path}", soft_wrap=True)
        return status
    except UsageError as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(f"{error}: nothing more can be written, make room or choose another place")
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        return _failed("the run does not fit into memory: lower --batch-size, --hidden-dim or --layers")


def _failed(message: str) -> int:
    print("train_minimal.py:", " ".join(message.split()), file=sys.stderr)  # one line, whatever was given
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before anything was measured, or a second time
        sys.exit(130)
