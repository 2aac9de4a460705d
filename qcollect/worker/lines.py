"""Lines of the manifest for statistics, from numbers: what stays the same at a site is encoded once.

A line is ``LineTemplate.text % (moment, numbers ...)``: ``moment`` is what all lines of a micro-batch share
(``encode_moment``), the numbers are those of one record. Encoding and filling take the interpreter's lock, which the
training thread needs: some microseconds a line.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qcollect.formats.error_stats import ERRORS, NUM_TOTALS, derive_errors
from qcollect.formats.resolved import Quantizer
from qcollect.store.capture import plain
from qcollect.store.summary import FIELDS, STATISTICS, derive
from qcollect.vocab import Gemm

# of the measurements in a table, in float64 numbers: 80 bytes keep every row at a multiple of 16, as kernels need it
ROW_SIZE = 10
# of the metadata, what all records of a micro-batch share
MOMENT_FIELDS = (
    "sample_idx", "num_samples", "batch_idx", "sequence_idx", "iteration", "micro_batch", "token_hash", "save_time",
)  # fmt: skip
# of the entry in ``consumers``, what is found when an operand is quantized
USE_FIELDS = ("scale", "amax", "seed", "num_saturated")
# how a tensor is stored that is not
NOT_STORED: dict[str, Any] = {"storage": None, "storage_note": None, "stored_rows": None, "consumers": []}
_HEAD = '{"file": null, "bytes": null, "xxh3_128": null, "metadata": {%s, '


@dataclass(frozen=True, slots=True, kw_only=True)
class LineTemplate:
    """The lines of one site.

    Args:
        number: its place among all.
        text: a ``%`` format.
        want: module, tensor name and gemm.
        num_elements: of the tensor.
        num_types: quant types whose errors it has; 0: it has a tensor's statistics.
        is_quantized: whether the first of them is the gemm's own.
        quantizer: whose scale of the whole tensor follows from an abs max; None: there is none.
    """

    number: int
    text: str
    want: tuple[str, str, Gemm | None]
    num_elements: int
    num_types: int = 0
    is_quantized: bool = False
    quantizer: Quantizer | None = None


# a template's number, rows of the measurements, the place of an abs max and its scale, a seed
Record = tuple[int, tuple[int, ...], int | None, int | None]


@dataclass(slots=True, eq=False)
class Measured:
    """What was measured in a micro-batch.

    Args:
        moment: ``encode_moment``.
        numbers: float64, row by row, ``ROW_SIZE`` each.
        amaxes, scales: of uses that have them.
    """

    records: Sequence[Record]
    moment: str
    numbers: bytes
    amaxes: Sequence[float] = ()
    scales: Sequence[float] = ()

    def lines(self, templates: Sequence[LineTemplate]) -> list[str]:
        """A line for each record, in their order."""
        numbers, lines = memoryview(self.numbers).cast("d").tolist(), []
        for number, rows, place, seed in self.records:
            template = templates[number]
            if template.num_types == 0:
                start = ROW_SIZE * rows[0]
                lines.append(tensor_line(template, self.moment, numbers[start : start + len(FIELDS)]))
            else:
                totals = [numbers[ROW_SIZE * row : ROW_SIZE * row + NUM_TOTALS] for row in rows]
                amax, scale = (None, None) if place is None else (self.amaxes[place], self.scales[place])
                lines.append(operand_line(template, self.moment, totals, scale=scale, amax=amax, seed=seed))
        return lines


def encode_moment(metadata: dict[str, Any]) -> str:
    """The part of a line that a micro-batch's records share."""
    return _members({name: metadata[name] for name in MOMENT_FIELDS})


def tensor_text(metadata: dict[str, Any], info: dict[str, Any]) -> str:
    """The format of lines with a tensor's statistics: the moment, then what ``STATISTICS`` names.

    Args:
        metadata: as a capture's.
        info: of ``tensor_info`` what is no statistic.
    """
    return f'{_HEAD}{_static(metadata)}}}, "tensor_info": {{{_escaped(_members(info))}, {_blanks(STATISTICS)}}}}}\n'


def operand_text(
    metadata: dict[str, Any], consumer: dict[str, Any], info: dict[str, Any], quant_types: Sequence[str]
) -> str:
    """The format of lines with an operand's errors: the moment, ``USE_FIELDS``, and by type what ``ERRORS`` names.

    Args:
        metadata, info: as above.
        consumer: the gemm's entry in ``consumers``; of ``USE_FIELDS`` nothing is read.
        quant_types: that were measured.
    """
    use = {name: value for name, value in consumer.items() if name not in USE_FIELDS}
    errors = ", ".join(f"{_escaped(json.dumps(name))}: {{{_blanks(ERRORS)}}}" for name in quant_types)
    static = _static(metadata, without=("consumers",))
    return (
        f'{_HEAD}{static}, "consumers": [{{{_escaped(_members(use))}, {_blanks(USE_FIELDS)}}}]}}, '
        f'"tensor_info": {{{_escaped(_members(info))}}}, "errors": {{{errors}}}}}\n'
    )


def tensor_line(template: LineTemplate, moment: str, summary: Sequence[float]) -> str:
    """The line of a tensor from what ``store.summary`` counted."""
    return template.text % (moment, *_nulls(derive(summary)))


def operand_line(
    template: LineTemplate,
    moment: str,
    totals: Sequence[Sequence[float]],
    *,
    scale: float | None,
    amax: float | None,
    seed: int | None,
) -> str:
    """The line of an operand from what ``formats.error_stats`` counted, type by type."""
    num_elements = template.num_elements
    numbers: tuple[float | None, ...] = ()
    for counted in totals:
        numbers += derive_errors(counted, num_elements)
    num_saturated = int(totals[0][4]) if template.is_quantized else 0
    use = (_number(scale), _number(amax), "null" if seed is None else seed, num_saturated)
    return template.text % (moment, *use, *_nulls(numbers))


def _static(metadata: dict[str, Any], without: tuple[str, ...] = ()) -> str:
    """What a site's metadata are in every micro-batch."""
    left_out = (*MOMENT_FIELDS, *without)
    return _escaped(_members({name: value for name, value in metadata.items() if name not in left_out}))


def _members(fields: dict[str, Any]) -> str:
    return json.dumps(plain(fields), allow_nan=False)[1:-1]


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _blanks(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}": %s' for name in names)


def _number(value: float | None) -> str:
    return "null" if value is None else json.dumps(plain(value))


def _nulls(numbers: tuple[float | None, ...]) -> tuple[float | str, ...]:
    if None in numbers:
        return tuple("null" if number is None else number for number in numbers)
    return numbers  # type: ignore[return-value]
