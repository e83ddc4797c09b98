"""Pictures of a pipeline, drawn from a Timeline: a row a stage, a box an action.

No picture touches matplotlib's global state, so a notebook's own figures are left alone, and none needs a display.
"""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from micropp.schedule import KINDS, gpipe
from micropp.timeline import Timeline, simulate

# Okabe and Ito's palette, which colour-blind readers can tell apart; the three also differ in lightness.
COLOURS = {"F": "#0072B2", "R": "#F0E442", "B": "#D55E00"}
INK = {"F": "white", "R": "black", "B": "white"}
FONT_SIZE = 7  # points, of the micro-batch numbers
DIGIT_WIDTH = 0.7  # of the font size, generously


def plot_pipeline_schedule(n_partitions: int, n_microbatches: int, output_dir: str | Path) -> Path:
    """Draws GPipe's schedule, simulated with a backward that costs two forwards; returns the PNG's path.

    An SVG stands beside it. `output_dir` is made if it is not there.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    timeline = simulate(gpipe(n_partitions, n_microbatches), forward=1, backward=2)
    name = f"gpipe_{n_partitions}_partitions_{n_microbatches}_microbatches"
    return plot_timeline(timeline, folder / name, unit="forwards")[0]


def plot_timeline(timeline: Timeline, path_without_suffix: str | Path, unit: str = "s") -> list[Path]:
    """Draws a Timeline as a Gantt chart, in two files.

    Args:
        timeline: recorded or simulated; an empty one gives empty rows.
        path_without_suffix: `.png` and `.svg` are added to it; its directory must exist.
        unit: of the timeline's times. Seconds are drawn as milliseconds.

    Returns:
        the two paths, PNG first.
    """
    figure = draw_timeline(timeline, unit)
    paths = [Path(f"{path_without_suffix}.{suffix}") for suffix in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths


def draw_timeline(timeline: Timeline, unit: str = "s") -> Figure:
    """The figure that `plot_timeline` saves."""
    scale, shown_unit = (1e3, "ms") if unit == "s" else (1, unit)
    width, height = 10, 1.5 + 0.4 * timeline.n_stages  # inches
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    total = float(timeline.makespan) * scale
    points_a_unit = 0.9 * width * 72 / (total or 1)  # the axes take about 90 % of the figure's width
    for stage, row in enumerate(timeline.rows()):
        for kind in KINDS:
            spans = [
                (float(span.start - timeline.start) * scale, float(span.end - span.start) * scale, span.action)
                for span in row
                if span.action.kind == kind
            ]
            axes.broken_barh(
                [(start, length) for start, length, _ in spans],
                (stage - 0.4, 0.8),
                facecolors=COLOURS[kind],
                edgecolors="white",
                linewidth=0.3,
            )
            for start, length, action in spans:
                text = str(action.microbatch)
                if length * points_a_unit >= len(text) * FONT_SIZE * DIGIT_WIDTH:
                    axes.text(
                        start + length / 2,
                        stage,
                        text,
                        ha="center",
                        va="center",
                        fontsize=FONT_SIZE,
                        color=INK[kind],
                        clip_on=True,
                    )
    axes.set_xlim(0, total or 1)
    axes.set_ylim(timeline.n_stages - 0.5, -0.5)  # stage 0 on top, as in the grids
    axes.set_yticks(range(timeline.n_stages), [f"stage {k}" for k in range(timeline.n_stages)])
    axes.set_xlabel(f"time ({shown_unit})")
    axes.spines[["top", "right"]].set_visible(False)
    found = "Simulated" if timeline.simulated else "Measured"
    axes.set_title(f"{found}: {total:.4g} {shown_unit}, bubble {float(timeline.bubble()):.1%}", loc="left")
    drawn = {span.action.kind for span in timeline.spans}
    handles = [Patch(color=COLOURS[kind], label=f"{kind}  {name}") for kind, name in KINDS.items() if kind in drawn]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure
