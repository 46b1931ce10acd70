"""Draw the strategy map: models upwards, devices to the right, in each field what the fastest plan that fits is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from simulator.advisor.reasons import words_of
from simulator.advisor.strategies import STRATEGIES, MapCell
from simulator.units import capitalised, counted, format_s, percent
from simulator.viz.drawing.pen import LEGEND_LINE_IN, legend_lines, sheet
from simulator.viz.drawing.picture import Picture
from simulator.viz.drawing.plot import put_title
from simulator.viz.drawing.style import FAINT, IDLE, SMALL_PT, TEXT_PT, WIDTH_IN, KindStyle, LegendBox, text_colour

STYLES: Mapping[str, KindStyle] = MappingProxyType(
    {
        "one device": KindStyle("#DDCC77", "1", "one device: do not distribute"),
        "data": KindStyle("#88CCEE", "D", "data parallel"),
        "ZeRO-1": KindStyle("#56B4E9", "Z1", "data parallel with ZeRO-1"),
        "ZeRO-2": KindStyle("#44AA99", "Z2", "data parallel with ZeRO-2"),
        "FSDP": KindStyle("#0072B2", "F", "FSDP (ZeRO-3)"),
        "tensor": KindStyle("#D55E00", "T", "tensor"),
        "pipeline": KindStyle("#E69F00", "P", "pipeline"),
        "tensor and pipeline": KindStyle("#882255", "TP", "tensor and pipeline"),
    }
)
NOTHING = LegendBox(IDLE, FAINT, "", "does not fit, or does not divide")
TOP_IN, ROW_IN, LEFT_IN, RIGHT_IN, AXIS_IN = 1.05, 0.66, 1.75, 0.3, 0.75
assert tuple(STYLES) == STRATEGIES


def draw_strategy_map(cells: Sequence[MapCell]) -> Picture:
    """Draw a field for each model and number of devices: the strategy's letter, its degrees and its MFU.

    Args:
        cells: what `strategy_map` returned.

    Raises:
        ValueError: there is no cell.
    """
    if not cells:
        raise ValueError("there is no field to draw; pass what strategy_map returned")
    models, counts = list(dict.fromkeys(cell.model for cell in cells)), sorted({cell.num_devices for cell in cells})
    used = [name for name in STRATEGIES if any(cell.strategy == name for cell in cells)]
    boxes = [LegendBox(STYLES[name].colour, "white", STYLES[name].letter, STYLES[name].words) for name in used]
    boxes += [NOTHING] if any(not cell.strategy for cell in cells) else []
    low = AXIS_IN + LEGEND_LINE_IN * len(legend_lines(boxes))
    figure, pen = sheet(TOP_IN + ROW_IN * len(models) + low)
    wide = (WIDTH_IN - LEFT_IN - RIGHT_IN) / len(counts)
    for row, model in enumerate(models):
        pen.words((LEFT_IN - 0.12, low + ROW_IN * (row + 0.5)), model, size=SMALL_PT, side="right")
    for column, count in enumerate(counts):
        pen.words((LEFT_IN + wide * (column + 0.5), low - 0.18), f"{count:,}", size=SMALL_PT)
    pen.words((LEFT_IN + wide * len(counts) / 2, low - 0.45), "GPUs", size=TEXT_PT)
    for cell in cells:
        x, y = LEFT_IN + wide * counts.index(cell.num_devices), low + ROW_IN * models.index(cell.model)
        fill = STYLES[cell.strategy].colour if cell.strategy else IDLE
        pen.box((x, y), wide, ROW_IN, fill, line=2.0)
        if cell.choice is not None:
            ink = text_colour(fill)
            letter = f"{STYLES[cell.strategy].letter}  {percent(cell.choice.step.mfu)}"
            pen.words((x + wide / 2, y + 0.43), letter, size=TEXT_PT, bold=True, colour=ink)
            pen.words((x + wide / 2, y + 0.18), _degrees(cell), size=SMALL_PT - 0.5, colour=ink)
    pen.legend(boxes)
    pen.flush()
    put_title(figure, _takeaway(cells), _setting(cells))
    return Picture(figure, _say(cells))


def _say(cells: Sequence[MapCell]) -> str:
    """Say each field in a line."""
    lines = [f"{_takeaway(cells)}. {_setting(cells)}"]
    for cell in cells:
        where = f"{cell.model} on {counted(cell.num_devices, 'GPU')}: "
        if cell.choice is None:
            lines.append(f"{where}{NOTHING.words}.")
            continue
        step, words = cell.choice.step, STYLES[cell.strategy].words
        plan = words_of(cell.choice.plan, cell.choice.microbatch)
        lines.append(f"{where}{words} ({plan}), {format_s(step.steady_s)} a step, MFU {percent(step.mfu)}.")
    return "\n".join(lines)


def _degrees(cell: MapCell) -> str:
    """Write the degrees above one: d for data, t for tensor, p for pipeline."""
    assert cell.choice is not None, "the field has a plan"
    plan = cell.choice.plan
    degrees = {axis[0]: getattr(plan, axis) for axis in ("data", "tensor", "pipeline")}
    return " ".join(f"{letter}{degree}" for letter, degree in degrees.items() if degree > 1)


def _takeaway(cells: Sequence[MapCell]) -> str:
    found = [cell.strategy for cell in cells if cell.strategy]
    if not found:
        return "No plan fits any of these"
    most = max(STRATEGIES, key=found.count)
    words, kinds = capitalised(STYLES[most].words), len(set(found))
    return f"{words} is fastest in {found.count(most)} of {len(found)} fields; {kinds} strategies win somewhere"


def _setting(cells: Sequence[MapCell]) -> str:
    chosen = next((cell.choice for cell in cells if cell.choice), None)
    if chosen is None:
        return ""
    question = chosen.question
    name, wire = question.cluster.name, question.cluster.inter_node.name
    return f"{question.batch_size} samples per step, {name}, {wire} between nodes; MFU and degrees of the fastest plan."
