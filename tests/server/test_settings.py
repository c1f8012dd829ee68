"""Settings: where they come from, what they refuse, how they are shown."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from server import cli, flags
from server.settings import Settings, SettingsProblem, load_settings


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("OCTAVO_")]:
        monkeypatch.delenv(name)


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text('port = 1\nhost = "1.1.1.1"\nblock_size = 8\n')
    monkeypatch.setenv("OCTAVO_PORT", "2")
    monkeypatch.setenv("OCTAVO_HOST", "2.2.2.2")
    loaded = load_settings({"port": "3"}, file)
    assert (loaded.settings.port, loaded.settings.host, loaded.settings.block_size) == (3, "2.2.2.2", 8)
    assert loaded.settings.max_num_seqs == 128
    assert [loaded.origins[name] for name in ("port", "host", "block_size", "max_num_seqs")] == [
        "flag",
        "OCTAVO_HOST",
        str(file),
        "default",
    ]


def test_lists_in_variables_have_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "a=1, b=2")
    monkeypatch.setenv("OCTAVO_SERVED_MODEL_NAME", "x")
    settings = load_settings({}).settings
    assert [key.get_secret_value() for key in settings.api_key] == ["a=1", "b=2"]
    assert settings.served_model_name == ("x",)


def test_the_cache_moves_by_flag_and_by_two_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", "/a")
    assert load_settings({}).settings.cache_dir == Path("/a")
    assert load_settings({}).origins["cache_dir"] == "OCTAVO_CACHE"
    monkeypatch.setenv("OCTAVO_CACHE_DIR", "/b")
    assert load_settings({}).settings.cache_dir == Path("/b")
    assert load_settings({"cache_dir": "/c"}).settings.cache_dir == Path("/c")


def test_sizes_have_units() -> None:
    assert load_settings({"kv_cache_memory": "2GiB"}).settings.kv_cache_memory == 2**31


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": "70000"}, "--port: .*65535"),
        ({"max_num_seqs": "0"}, "--max-num-seqs: .*greater"),
        ({"kv_cache_memory": "lots"}, "--kv-cache-memory: "),
        ({"tls_key": "k.pem"}, "--tls-certificate and --tls-key"),
        ({"root_path": "llm"}, "--root-path must begin"),
    ],
)
def test_a_wrong_value_is_refused_by_its_flag(given: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsProblem, match=message):
        load_settings(given)


def test_a_wrong_value_says_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_PORT", "x")
    with pytest.raises(SettingsProblem, match=r"--port: .* not 'x' \(from OCTAVO_PORT\)"):
        load_settings({})


def test_a_file_with_an_unknown_setting_or_broken_toml_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(SettingsProblem, match="no such setting: prot"):
        load_settings({}, file)
    file.write_text("port = \n")
    with pytest.raises(SettingsProblem, match="not valid TOML"):
        load_settings({}, file)
    with pytest.raises(SettingsProblem, match="no settings file"):
        load_settings({}, tmp_path / "none.toml")


def test_settings_are_frozen_and_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_PORT", "9")
    settings = Settings()
    assert settings.port == 8000
    with pytest.raises(ValidationError):
        settings.port = 1


def test_every_setting_explains_itself_and_has_a_group() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert isinstance(field.json_schema_extra, dict), name
        assert field.json_schema_extra["group"] in flags._GROUPS, name


def test_every_setting_is_a_flag_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in text
    assert "examples:" in text
    assert "OCTAVO_MAX_NUM_SEQS" in text


def test_config_prints_a_settings_file_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "ops=SECRET,OTHER")
    assert cli.main(["config", "--port", "9000", "--max-model-len", "512"]) == 0
    text = capsys.readouterr().out
    parsed = tomllib.loads(text)
    assert parsed["port"] == 9000
    assert parsed["max_model_len"] == 512
    assert parsed["api_key"] == ["ops=…", "…"]
    assert "SECRET" not in text
    assert "OTHER" not in text
    assert "# flag" in text
    assert "# OCTAVO_API_KEY" in text
    file = tmp_path / "again.toml"
    file.write_text(text)
    assert load_settings({}, file).settings.port == 9000


def test_a_bad_command_line_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sevre"]) == 2
    for arguments in (["serve", "--prot", "1"], ["serve", "--port", "x"], ["serve", "--dtype", "int3"]):
        with pytest.raises(SystemExit) as left:
            cli.main(arguments)
        assert left.value.code == 2
    assert "--port" in capsys.readouterr().err


LIGHT = """
import sys
from server.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as left:
    code = left.code
heavy = {"torch", "fastapi", "numpy", "uvicorn", "tokenizers"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], [], ["serve", "--help"], ["config"]])
def test_what_only_prints_imports_nothing_heavy(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_generate_takes_its_prompt_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("a letter"))
    loaded, wish = flags.parse_generate(["--system", "s", "-", "--max-tokens", "7", "--dtype", "float32"])
    assert (wish.prompt, wish.system, wish.max_tokens, wish.raw) == ("a letter", "s", 7, False)
    assert loaded.settings.dtype == "float32"
