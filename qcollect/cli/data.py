"""``qcollect data prepare``."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from qcollect.cli.console import err, note, print_json

app = typer.Typer(no_args_is_help=True, help="Prepare training data.", rich_markup_mode=None)


@app.callback()
def _group() -> None:
    pass


@app.command("prepare")
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SRC...", help="Wikipedia XML dumps (.xml.bz2), .jsonl, .txt; also as .bz2 or .gz."),
    ],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="DIR", help="The model's folder, or 'bytes'.", show_default=False)
    ],
    out_prefix: Annotated[
        str, typer.Option("--out", metavar="PREFIX", help="Writes PREFIX.bin, PREFIX.idx and PREFIX.json.")
    ],
    text_field: Annotated[str, typer.Option("--text-field", help="Of JSON lines.")] = "text",
    append_eos: Annotated[bool, typer.Option(help="End every document with the end-of-text token.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing output.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Tokenize Wikipedia (or any text) into Megatron's indexed .bin/.idx.

    Example: qcollect data prepare enwiki-latest-pages-articles.xml.bz2 --tokenizer model/llama3.2-1b
    --out dataset/wikipedia_processed/wikipedia_processed_text_document
    """
    from qcollect.cli.progress import PrepareDisplay
    from qcollect.data.prepare import prepare as prepare_data

    with PrepareDisplay(err) as display:
        report = prepare_data(
            sources,
            tokenizer,
            Path(out_prefix),
            append_eos=append_eos,
            text_field=text_field,
            overwrite=overwrite,
            progress=display.update,
        )
    if json:
        print_json({key: [str(p) for p in value] if key == "paths" else value for key, value in asdict(report).items()})
        return
    typer.echo(
        f"{report.num_documents:,} documents ({report.num_skipped:,} empty ones left out), "
        f"{report.num_tokens:,} tokens as {report.dtype}, {report.num_bytes:,} bytes in {report.duration_s:.1f} s"
    )
    for path in report.paths:
        typer.echo(str(path))
    prefix = Path(report.paths[0]).with_suffix("")
    model = "--recipe tiny" if tokenizer == "bytes" else f"--set {shlex.quote(f'model.checkpoint={tokenizer}')}"
    note(f"next: qcollect run mxfp8 {model} --set {shlex.quote(f'data.path={prefix}')}")
