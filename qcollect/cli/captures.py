"""``qcollect ls``, ``show`` and ``verify``: captures by any field, one capture, the integrity of all."""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from qcollect.cli.console import err, fits, make_table, note, out, print_json, print_table, warn
from qcollect.cli.run import DEFAULT_OUT
from qcollect.errors import CaptureError, ExitCode, OutputError, UsageError

if TYPE_CHECKING:
    from qcollect.paths import RunPaths
    from qcollect.store.manifest import ManifestRecord
    from qcollect.store.query import Captures, Row
    from qcollect.store.verify import Action, Finding, RunFiles
    from qcollect.vocab import CaptureKey

DEFAULT_COLUMNS = (
    "rank", "iteration", "layer_idx", "module", "operation", "phase", "tensor_name", "gemm", "shape", "dtype",
    "abs_max", "bytes", "file",
)  # fmt: skip
# of captures without files
STATISTICS_COLUMNS = tuple(name for name in DEFAULT_COLUMNS if name not in ("bytes", "file"))
# what a person misses least, on a terminal that is too narrow for all
_DISPENSABLE = ("file", "dtype", "bytes", "iteration", "gemm", "shape", "abs_max", "phase")
# rich takes a tenth of a millisecond a cell
_MAX_RICH_ROWS = 1000
_NUM_VALUES_SHOWN = 8
# what takes less is not worth a word on its progress
_QUIET_S = 1.0

Directory = Annotated[str, typer.Argument(metavar="[DIR]", help="A run's folder, or one that holds runs.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


# ---------------------------------------------------------------------------------------------
# ls
# ---------------------------------------------------------------------------------------------


def ls(
    directory: Directory = DEFAULT_OUT,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            metavar="FIELD=VALUE",
            help="Only captures with this value: a,b for any of several, 0-3 for numbers, globs for text; repeatable.",
        ),
    ] = None,
    columns: Annotated[str | None, typer.Option("--columns", metavar="A,B,C", help="The fields to print.")] = None,
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="A,-B", help="Order by these fields; - for largest first.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=0, help="At most N captures.")] = None,
    json: Json = False,
) -> None:
    """List captures by any field of their metadata and tensor_info.

    Example: qcollect ls enhanced_tensor_logs/mxfp8 --where layer_idx=0-3 --where operation=backward --sort -abs_max
    """
    from qcollect.store.query import Captures, Condition

    conditions = [Condition.parse(text) for text in where or ()]
    folder = Path(directory)
    with Captures(_folders(folder)) as captures:
        _warn_of_damage(captures)
        names = [name.strip() for name in columns.split(",")] if columns else _default_columns(captures)
        fields = [captures.resolve(name) if columns else captures.find(name) or name for name in names]
        order = [(name.startswith("-"), captures.resolve(name.removeprefix("-"))) for name in _split(sort)]
        rows = captures.select(conditions, [*fields, *(field for _, field in order)])
        chosen = _take(rows, [is_reversed for is_reversed, _ in order], limit)
        if not chosen:
            asked = " and ".join(condition.text for condition in conditions)
            note(f"none of {len(captures):,} captures in {folder} has {asked}" if asked else f"no capture in {folder}")
        if json:
            print_json([dict(zip(names, row.values, strict=False)) if columns else row.describe() for row in chosen])
        elif chosen:
            _print_rows(names, [row.values[: len(names)] for row in chosen], may_drop=columns is None)


def _folders(directory: Path) -> "list[RunPaths]":
    from qcollect.store.folder import find_captures

    if directory.is_file():
        raise UsageError(f"{directory} is a file; 'qcollect show' shows one capture, this needs its folder")
    folders = find_captures(directory)
    if not folders:
        problem = "holds no captures" if directory.is_dir() else "does not exist"
        raise OutputError(
            f"{directory} {problem} (looked for .qcollect and for captures by name, in it and in the folders it "
            "holds); name the folder given to --out"
        )
    return folders


def _warn_of_damage(captures: "Captures") -> None:
    for folder in captures.folders:
        for line in folder.catalog.damaged:
            place = line.path.with_name(f"{line.path.name}:{line.number}")
            warn(f"{place}: no manifest line ({line.problem}); 'qcollect verify --repair' mends it")


def _default_columns(captures: "Captures") -> list[str]:
    first = next(captures.select([], ["file"]), None)
    columns = [*(["run"] if len(captures.folders) > 1 else [])]
    if first is None or first.values[0] is not None:
        return [*columns, *DEFAULT_COLUMNS]
    return [*columns, *STATISTICS_COLUMNS, *(name for name in captures.fields if name.endswith(".sqnr_db"))]


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _take(rows: "Iterator[Row]", is_reversed: Sequence[bool], limit: int | None) -> "list[Row]":
    """The rows in order, by the last values of each, those without a value last."""
    from itertools import islice

    if not is_reversed:
        return list(islice(rows, limit))
    ordered = list(rows)
    for i in reversed(range(len(is_reversed))):
        place = i - len(is_reversed)
        ordered.sort(key=lambda row: _order(row.values[place]), reverse=is_reversed[i])
        ordered.sort(key=lambda row: row.values[place] is None)
    return ordered[:limit]


def _order(value: Any) -> tuple[int, Any]:
    """Numbers before texts before the rest."""
    from qcollect.store.query import show

    if isinstance(value, int | float):
        return (0, value)
    return (1, value) if isinstance(value, str) else (2, show(value))


def _print_rows(names: Sequence[str], rows: Sequence[Sequence[Any]], *, may_drop: bool) -> None:
    cells = [[_cell(value) for value in row] for row in rows]
    if not out.is_terminal or len(rows) > _MAX_RICH_ROWS:
        _print_plain(names, cells)
        return
    kept = list(range(len(names)))
    dropped = []
    for name in _DISPENSABLE if may_drop else ():
        if fits(_table(names, cells, kept)):
            break
        dropped.append(name)
        kept = [i for i in kept if names[i] != name]
    table = _table(names, cells, kept)
    if fits(table):
        print_table(table)
    else:  # lines the terminal wraps can be copied, cells that are cut cannot
        _print_plain(names, cells)
        return
    if dropped:
        note(f"left out, as the terminal is narrow: {', '.join(dropped)}; --columns chooses")


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int]) -> Any:
    table = make_table(*(_cell(names[i]) for i in kept))
    for row in rows:
        table.add_row(*(Text(row[i]) for i in kept))
    return table


def _print_plain(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A line a row with as much room as it needs, as ``print_table`` does it, a thousand times as fast."""
    from rich.cells import cell_len

    lines = [[_cell(name) for name in names], *rows]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write("  ".join(padded).rstrip() + "\n")


def _cell(value: Any) -> str:
    from qcollect.monitor.render import printable
    from qcollect.store.query import show

    text = show(value)
    return text if text.isascii() and text.isprintable() else printable(text)


# ---------------------------------------------------------------------------------------------
# show
# ---------------------------------------------------------------------------------------------


def show(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A capture's .pt file, an older one too.")],
    json: Json = False,
) -> None:
    """Show what a capture says of itself, whether its manifest line agrees, and its first values.

    Example: qcollect show enhanced_tensor_logs/mxfp8/20241201_143022_0001_iter000_..._rank0_sample0_query.pt
    """
    described = _describe_file(Path(file))
    if json:
        print_json(described)
        return
    for name, value in described.items():
        if isinstance(value, dict):
            typer.echo(f"{_cell(name)}:" if value else f"{_cell(name)}: none")
            for key, item in value.items():
                _echo_field(key, item)
        elif name == "values_shown":
            typer.echo(f"first values: {' '.join(map(_exact, value)) or 'none'}")
        else:
            typer.echo(f"{_cell(name)}: {_exact(value)}")


def _echo_field(key: str, value: Any) -> None:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        typer.echo(f"  {_cell(key)}:")
        for item in value:
            typer.echo(f"    {_cell(item)}")
    else:
        typer.echo(f"  {_cell(key)}: {_exact(value)}")


def _exact(value: Any) -> str:
    """As ``_cell``, with all digits, and ``none`` for what a file does not say."""
    if value is None:
        return "none"
    return repr(value) if isinstance(value, float) else _cell(value)


def _describe_file(path: Path) -> dict[str, Any]:
    from qcollect.store.capture import plain, resolve
    from qcollect.store.compact import restore
    from qcollect.store.examine import hash_file, load_whole
    from qcollect.store.folder import parse_name

    if path.is_dir():
        raise UsageError(f"{path} is a folder; 'qcollect ls' lists its captures, this shows one file")
    try:
        num_bytes, digest, is_zip = hash_file(path)
    except OSError as error:
        raise CaptureError(f"{path}: cannot be read: {error.strerror or error}; 'qcollect ls' lists files") from error
    try:
        content = load_whole(path, num_bytes, is_zip)
    except CaptureError as error:
        raise CaptureError(f"{path}: is torn or no capture: {error}; 'qcollect verify' checks its folder") from error
    metadata, tensor_info = plain(content["metadata"]), plain(content["tensor_info"])
    try:
        tensor = restore(resolve(path, content, mmap=is_zip))
    except CaptureError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise CaptureError(f"{path}: {reason}; 'qcollect verify' checks its folder") from error
    name = parse_name(path.name)
    return {
        "file": str(path),
        "bytes": num_bytes,
        "xxh3_128": digest,
        "manifest": _describe_line(path, num_bytes, digest, metadata, tensor_info),
        "name": {} if name is None else {key: getattr(name, key) for key in name.__dataclass_fields__},
        "metadata": metadata,
        "tensor_info": tensor_info,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "values_shown": _first_values(tensor),
    }


def _describe_line(
    path: Path, num_bytes: int, digest: str, metadata: dict[str, Any], tensor_info: dict[str, Any]
) -> str:
    record = _find_line(path)
    if record is None:
        return "no line for this file"
    compared = {
        "bytes": record.bytes == num_bytes,
        "xxh3_128": record.xxh3_128 == digest,
        "metadata": record.metadata == metadata,
        "tensor_info": record.tensor_info == tensor_info,
    }
    differing = [name for name, is_same in compared.items() if not is_same]
    return f"says otherwise: {', '.join(differing)}" if differing else "agrees"


def _find_line(path: Path) -> "ManifestRecord | None":
    from qcollect.paths import RunPaths
    from qcollect.store.catalog import Catalog
    from qcollect.store.folder import run_dir_of

    path = path.absolute()
    run_dir = run_dir_of(path)
    with Catalog(RunPaths(run_dir)) as catalog:
        return catalog.find(path.relative_to(run_dir).as_posix())


def _first_values(tensor: Any) -> list[Any]:
    from qcollect.store.capture import plain

    tensor = tensor if str(tensor.layout) == "torch.strided" else tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    first = tensor.flatten()[:_NUM_VALUES_SHOWN]
    # float8 has no tolist of its own everywhere
    first = first.float() if first.is_floating_point() and first.element_size() < 4 else first
    values: list[Any] = plain(first.tolist())
    return values


# ---------------------------------------------------------------------------------------------
# verify
# ---------------------------------------------------------------------------------------------


def verify(
    directory: Directory = DEFAULT_OUT,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="List whole files, drop lines without one, move torn files to .qcollect/torn, first."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Check every capture: whole, as it was written, listed once, named right, and as planned. Exit 4 if not.

    Example: qcollect verify enhanced_tensor_logs --repair
    """
    folders = _folders(Path(directory))
    for paths in folders if repair else ():
        _refuse_active(paths)
    reports = [_verify_folder(paths, repair, json) for paths in folders]
    if json:
        print_json(reports)
    if any(report["findings"] for report in reports):
        raise typer.Exit(ExitCode.WORKER)


def _verify_folder(paths: "RunPaths", repair: bool, json: bool) -> dict[str, Any]:
    from qcollect.store.examine import statistics_records
    from qcollect.store.verify import after_repair, count_planned, judge

    planned, fault = _read_plan(paths)
    if not repair:
        is_active = _is_active(paths)
        found, actions = _examine(paths), list[Any]()
    else:
        is_active = False
        found, actions = _repair(paths)
        found = after_repair(found)
    findings = [*([] if fault is None else [fault]), *judge(found, planned, is_active=is_active)]
    report = {
        "run_dir": str(paths.run_dir),
        "is_active": is_active,
        "num_files": len(found.files),
        "num_statistics": len(statistics_records(found.lines)),
        "num_bytes": found.num_bytes,
        "num_strangers": found.num_strangers,
        "target": None if planned is None else len(planned),
        "num_planned": None if planned is None else count_planned(found, planned),
        "repaired": [{"path": str(action.path), "what": action.what} for action in actions],
        "findings": [finding.to_dict() for finding in findings],
    }
    if not json:
        _print_report(report, actions, findings)
    return report


def _print_report(report: dict[str, Any], actions: "Sequence[Action]", findings: "Sequence[Finding]") -> None:
    for line in (*actions, *findings):
        typer.echo(_cell(str(line)))
    target = "" if report["target"] is None else f", {report['num_planned']:,} of {report['target']:,} planned"
    verdict = f"{len(findings):,} finding(s)" if findings else "all is well"
    active = " so far (the run goes on)" if report["is_active"] else ""
    lines = f", {report['num_statistics']:,} lines of statistics" if report["num_statistics"] else ""
    files = f"{report['num_files']:,} files, {report['num_bytes']:,} bytes{lines}{target}"
    typer.echo(_cell(f"{report['run_dir']}: {files}: {verdict}{active}"))
    if report["num_strangers"]:
        note(f"{report['run_dir']}: left alone {report['num_strangers']:,} .pt file(s) that have no capture's name")


def _examine(paths: "RunPaths") -> "RunFiles":
    from qcollect.cli.progress import Display
    from qcollect.store.verify import examine_run

    started = float("inf")
    with Display(err) as display:

        def show_progress(done: int, count: int, num_bytes: int) -> None:
            nonlocal started
            started = min(started, time.monotonic())  # not before torch is imported
            elapsed_s = time.monotonic() - started
            if elapsed_s > _QUIET_S:
                rate = num_bytes / 1e6 / elapsed_s
                display.show(
                    f"{paths.run_dir.name}: {done:,} of {count:,} files read, {rate:,.0f} MB/s", key=done == count
                )

        return examine_run(paths, show_progress)


def _repair(paths: "RunPaths") -> "tuple[RunFiles, list[Action]]":
    from qcollect.store.files import locked_folder
    from qcollect.store.verify import repair_run

    try:
        with locked_folder(paths.run_dir) as is_alone:
            if not is_alone:
                warn(f"{paths.run_dir} is on a file system without locks; start no run in it before this ends")
            _refuse_active(paths)
            found = _examine(paths)
            return found, repair_run(found)
    except OSError as error:
        raise OutputError(
            f"{paths.run_dir} cannot be repaired: {error.strerror or error} ({error.filename})"
        ) from error


def _refuse_active(paths: "RunPaths") -> None:
    if _is_active(paths):
        raise OutputError(f"{paths.run_dir} is in use by a run; let it end, or end it with 'qcollect stop'")


def _is_active(paths: "RunPaths") -> bool:
    from qcollect.monitor.run_record import read_run_record

    record = read_run_record(paths)
    if record is None or not record.state.is_active:
        return False
    from qcollect.launch.claim import is_alive  # needs Linux, which a finished run does not

    return is_alive(record, paths, time.time())


def _read_plan(paths: "RunPaths") -> "tuple[frozenset[CaptureKey] | None, Finding | None]":
    """The captures of the plan, None without one; or what is wrong with it."""
    from qcollect.plan.keys import planned_keys
    from qcollect.plan.record import Plan
    from qcollect.plan.trigger import read_event
    from qcollect.store.verify import Finding, Problem

    if not paths.plan_path.exists():
        return None, None
    try:
        event = read_event(paths)
        start = 0 if event is None else event.start
        return planned_keys(Plan.read(paths.plan_path).schedule, start=start), None
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        what = f"cannot be read ({type(error).__name__}: {error}), so nothing was compared with the plan"
        advice = "begin anew with 'qcollect run --overwrite', or put back the file"
        return None, Finding(path=paths.plan_path, problem=Problem.PLAN, what=what, advice=advice)
