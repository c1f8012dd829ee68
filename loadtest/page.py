"""Writes a report: report.json, report.html (self-contained) and the plots as PNG files."""

from __future__ import annotations

import base64
from importlib import resources, util
from pathlib import Path

import jinja2
import msgspec

from loadtest.machine import Machine
from loadtest.report import Report, RunReport, encode
from loadtest.tables import headline, tables


def write_report(report: Report, folder: Path) -> list[Path]:
    """Writes into `folder` (made if need be) and returns the files. Without matplotlib there are no plots, and
    the page says so."""
    folder.mkdir(parents=True, exist_ok=True)
    images = _plots(report)
    contents = {
        "report.json": encode(report),
        "report.html": html(report, images).encode(),
        **{f"{name}.png": image for name, image in images.items()},
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in contents]


def html(report: Report, images: dict[str, bytes]) -> str:
    """The page. It loads nothing from anywhere."""
    runs = [report] if isinstance(report, RunReport) else report.runs
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(resources.files("loadtest").joinpath("page.html.j2").read_text("utf-8"))
    return template.render(
        title=headline(report) if isinstance(report, RunReport) else f"octavo bench: {_kind(report)}",
        subtitle=f"{report.created} · {_machine(report.machine)}",
        tables=tables(report),
        images={name: base64.b64encode(image).decode() for name, image in images.items()},
        setup=_setups(runs),
    )


def _plots(report: Report) -> dict[str, bytes]:
    if util.find_spec("matplotlib") is None:
        return {}
    from loadtest.plots import plots

    return plots(report)


def _kind(report: Report) -> str:
    return type(report).__name__.removesuffix("Report").lower()


def _machine(machine: Machine) -> str:
    memory = f"{machine.memory_bytes / 2**30:.0f} GiB"
    return f"{machine.cpu}, {machine.num_cpus} CPUs, {memory}, {machine.system}, Python {machine.python}"


def _setups(runs: tuple[RunReport, ...] | list[RunReport]) -> str:
    """The distinct set-ups as JSON, seeds of repetitions aside."""
    seen = {run.setup.name + run.setup.workload.name: run.setup for run in runs}
    return "\n".join(msgspec.json.format(msgspec.json.encode(setup), indent=2).decode() for setup in seen.values())
