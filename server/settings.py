"""What the operator decides: flags over OCTAVO_* variables over a TOML file over defaults, as one frozen object.

`Settings` is built from values alone and never looks at the environment; `load_settings` composes the sources and
remembers which of them each value came from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

DEFAULT_MODEL = "smollm2-135m-instruct"
ENV_PREFIX = "OCTAVO_"


class SettingsProblem(Exception):
    """The settings cannot be used; the message names the flag, its source and what it accepts."""


def _field(default: Any, group: str, description: str, **constraints: Any) -> Any:
    return Field(default, description=description, json_schema_extra={"group": group}, **constraints)


def _default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "octavo"


class Settings(BaseSettings):
    """Every setting: its default, its unit in its name, its meaning in one line."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_ignore_empty=True, protected_namespaces=()
    )

    model: str = _field(
        DEFAULT_MODEL,
        "model",
        "folder in Hugging Face layout, .gguf file, Hub id (org/name), or a name from the list below",
    )
    served_model_name: tuple[str, ...] = _field(
        (), "model", "name clients use for the model; repeat for aliases [the model's own name]"
    )
    cache_dir: Path = Field(
        default_factory=_default_cache_dir,
        description="where downloaded models are kept (also OCTAVO_CACHE)",
        json_schema_extra={"group": "model"},
    )
    packed_cache: bool = _field(
        True, "model", "keep the weights as the kernels have packed them: later starts map them into memory"
    )
    packed_cache_dir: Path | None = _field(
        None, "model", "where they are kept; `octavo cache` lists and clears them [packed in --cache-dir]"
    )
    load_format: Literal["auto", "dummy"] = _field(
        "auto", "model", "dummy: random weights of the model's shapes, to measure without the model"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = _field("auto", "model", "compute type")
    quantization: Literal["auto", "none", "int8", "int4"] = _field(
        "auto", "model", "bits of the weights; auto keeps those of the file, none takes the compute type"
    )
    quantization_group: int = _field(128, "model", "inputs that share a scale, with int4: 32, 64 or 128", ge=32, le=128)
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = _field(
        "auto", "model", "what keys and values are kept in; auto: the compute type, int8: half of bfloat16"
    )
    max_model_len: int | None = _field(
        None, "model", "longest prompt plus answer, in tokens [the model's own context]", ge=1
    )
    chat_template: Path | None = _field(None, "model", "file with a Jinja chat template to use instead of the model's")

    device: Literal["auto", "cpu", "cuda"] = _field("auto", "engine", "where the model runs")
    kernels: Literal["auto", "torch", "native", "triton"] = _field("auto", "engine", "implementation of the arithmetic")
    batch_invariant: bool = _field(
        False, "engine", "on a GPU: a request's tokens never depend on its neighbours, at some cost; on a CPU always so"
    )
    max_num_seqs: int = _field(128, "engine", "most sequences in one step", ge=1)
    max_num_batched_tokens: int | None = _field(
        None, "engine", "token budget of one step: bounds the gap between tokens [by device, --max-step-ms]", ge=1
    )
    max_step_ms: int = _field(
        80, "engine", "on a CPU: how long steps with prompts may take, if --max-num-batched-tokens is not given", ge=1
    )
    block_size: int = _field(16, "engine", "tokens in a block of KV cache", ge=1, le=256)
    kv_cache_memory: ByteSize | None = _field(
        None, "engine", "KV cache memory, e.g. 2GiB [a share of what is free]", ge=1
    )
    host_kv_memory: ByteSize | None = _field(
        None, "engine", "memory for KV that has to leave the KV cache, e.g. 4GiB [0, beside a GPU up to 4GiB]", ge=0
    )
    preemption: Literal["auto", "recompute", "swap"] = _field(
        "auto", "engine", "KV of requests that give way: computed again, kept in --host-kv-memory, or what costs less"
    )
    prefix_cache: bool = _field(True, "engine", "reuse the KV of prompts that begin alike")
    fast_forward: bool = _field(True, "engine", "take tokens that a grammar forces without computing each")
    batching: Literal["continuous", "static"] = _field(
        "continuous", "engine", "static: a batch is filled only when it is empty, for comparison"
    )
    scheduling_policy: Literal["fcfs", "sjf", "priority", "fair", "lpm"] = _field(
        "fcfs",
        "engine",
        "who goes first: the first to come, the shortest job, the lowest priority, the key served least, "
        "the longest cached prefix",
    )
    max_queue_wait_steps: int = _field(
        2000, "engine", "under all policies but fcfs: who has waited so many steps goes first", ge=1
    )
    threads: int | None = _field(None, "engine", "threads of the engine [all that can help]", ge=1)
    step_timeout_seconds: float = _field(
        120.0, "engine", "a step that takes longer means that the engine is stuck: it is restarted", gt=0
    )
    first_step_timeout_seconds: float = _field(
        600.0, "engine", "the same for its first step, in which kernels may be compiled", gt=0
    )
    flight_record_steps: int = _field(256, "engine", "steps that are remembered for /debug/engine and dumps", ge=1)
    flight_record_dir: Path | None = _field(
        None, "engine", "where they are written when the engine dies [flight-records in --cache-dir]"
    )
    executor: Literal["local", "fake"] = _field(
        "local", "engine", "fake: scripted tokens instead of a model, to test clients"
    )
    fake_step_seconds: float = _field(0.0, "engine", "how long a step of the fake executor takes", ge=0)

    host: str = _field("127.0.0.1", "http", "address to listen on")
    port: int = _field(8000, "http", "port to listen on; 0 takes a free one", ge=0, le=65535)
    root_path: str = _field("", "http", "path prefix that a proxy in front strips, e.g. /llm")
    cors_origin: tuple[str, ...] = _field((), "http", "origin whose pages may call the API; repeat, or *")
    tls_certificate: Path | None = _field(None, "http", "PEM file with the certificate chain: serve https")
    tls_key: Path | None = _field(None, "http", "PEM file with the certificate's private key")
    ui: bool = _field(True, "http", "the page at /: a chat, and the engine at work")
    metrics_port: int | None = _field(None, "http", "a second port for /metrics, without a key", ge=0, le=65535)
    metrics_host: str = _field("127.0.0.1", "http", "address of the metrics port")
    http_keep_alive_seconds: int = _field(75, "http", "how long an idle connection stays open", ge=1)
    drain_timeout_seconds: float = _field(30.0, "http", "how long running answers may take after SIGTERM", ge=0)

    api_key: tuple[SecretStr, ...] = _field((), "access", "key clients must send, as KEY or NAME=KEY; repeat for more")
    api_key_file: Path | None = _field(None, "access", "file with one key a line, as KEY or NAME=KEY; # comments")
    requests_per_minute: int | None = _field(None, "access", "requests a minute per key", ge=1)
    tokens_per_minute: int | None = _field(None, "access", "tokens a minute per key, prompt and answer", ge=1)
    max_streams_per_key: int | None = _field(None, "access", "requests at once per key", ge=1)

    max_queued_requests: int = _field(512, "limits", "requests waiting before new ones get 429", ge=1)
    max_body_bytes: ByteSize = _field(ByteSize(16 << 20), "limits", "largest request body, e.g. 16MiB", ge=1024)
    request_timeout_seconds: float | None = _field(
        None, "limits", "how long a request may take, from its arrival to its last token [no limit]", gt=0
    )
    max_prompts: int = _field(64, "limits", "prompts in one completions request", ge=1)
    max_inputs: int = _field(2048, "limits", "inputs in one embeddings request", ge=1)
    max_choices: int = _field(128, "limits", "choices of one request: prompts × n, or × best_of", ge=1)
    max_stop_sequences: int = _field(4, "limits", "stop strings of one request", ge=1)
    max_stop_chars: int = _field(1024, "limits", "length of one stop string in characters", ge=1)
    max_logit_bias: int = _field(1024, "limits", "entries in logit_bias", ge=1)
    max_grammar_bytes: ByteSize = _field(
        ByteSize(512 << 10), "limits", "largest JSON schema or grammar, all tools of a request together", ge=1024
    )
    grammar_timeout_seconds: float = _field(10.0, "limits", "how long a grammar may wait and take to compile", gt=0)
    max_head_bytes: ByteSize = _field(ByteSize(64 << 10), "limits", "largest request line with headers", ge=1024)
    head_timeout_seconds: float = _field(20.0, "limits", "how long the headers of a request may take to arrive", gt=0)
    strict_fields: bool = _field(False, "limits", "refuse unknown request fields instead of naming them in a header")
    trust_request_chat_template: bool = _field(False, "limits", "let requests bring their own chat template")

    stream_comment_seconds: float = _field(
        15.0, "streams", "a comment goes out when a stream was silent this long", gt=0
    )
    slow_reader_seconds: float = _field(
        60.0, "streams", "a client that reads nothing for this long is disconnected", gt=0
    )
    log_level: Literal["debug", "info", "warning", "error"] = _field("info", "logging", "how much to say on stderr")
    log_format: Literal["console", "json"] = _field("console", "logging", "json: every line is one object")
    access_log: bool = _field(True, "logging", "one line a request")
    slow_request_seconds: float = _field(
        30.0, "logging", "a request that runs longer is logged as a warning and counted", gt=0
    )
    log_prompts: bool = _field(False, "logging", "put the text of prompts into the request's line")

    otlp_endpoint: str | None = _field(
        None, "logging", "collector of traces (OTLP over HTTP), e.g. http://127.0.0.1:4318 [no traces]"
    )
    trace_sample_ratio: float = _field(
        1.0, "logging", "share of the requests that are traced, where the caller has not decided", ge=0, le=1
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    @field_validator("served_model_name", "cors_origin", "api_key", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        """Environment variables hold lists with commas."""
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator(
        *(
            "cache_dir",
            "packed_cache_dir",
            "chat_template",
            "flight_record_dir",
            "tls_certificate",
            "tls_key",
            "api_key_file",
        ),
        mode="after",
    )
    @classmethod
    def _expand_home(cls, value: Path | None) -> Path | None:
        return value.expanduser() if value is not None else None

    @property
    def packed_cache_folder(self) -> Path | None:
        """Where packed models are kept; None: nowhere."""
        return (self.packed_cache_dir or self.cache_dir / "packed") if self.packed_cache else None

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("--tls-certificate and --tls-key go together")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError("--otlp-endpoint must begin with http:// or https://")
        if self.root_path and not self.root_path.startswith("/"):
            raise ValueError("--root-path must begin with /")
        return self


@dataclass(frozen=True)
class LoadedSettings:
    """The settings in force, and for each field where its value came from."""

    settings: Settings
    origins: Mapping[str, str]  # field → "flag", "OCTAVO_PORT", "octavo.toml" or "default"


class _EnvSource(EnvSettingsSource):
    """Lists in variables are comma-separated, not JSON; the field validators split them."""

    def prepare_field_value(self, field_name: str, field: Any, value: Any, value_is_complex: bool) -> Any:
        return value


def load_settings(flags: Mapping[str, Any], config_file: Path | None = None) -> LoadedSettings:
    """Settings from flags (only those given), the environment and a TOML file, strongest first.

    Raises SettingsProblem.
    """
    layers: list[tuple[dict[str, Any], str]] = []
    if config_file is not None:
        layers.append((_read_file(config_file), str(config_file)))
    try:
        environment = _EnvSource(Settings)()
    except SettingsError as error:
        raise SettingsProblem(str(error)) from error
    if cache := os.environ.get("OCTAVO_CACHE"):
        environment.setdefault("cache_dir", cache)
    layers.append((environment, "environment"))
    layers.append((dict(flags), "flag"))
    values: dict[str, Any] = {}
    origins = dict.fromkeys(Settings.model_fields, "default")
    for layer, origin in layers:
        values |= layer
        origins |= {name: _variable(name) if origin == "environment" else origin for name in layer}
    try:
        return LoadedSettings(Settings(**values), origins)
    except ValidationError as error:
        raise SettingsProblem(_explain(error, origins)) from error


def _variable(name: str) -> str:
    variable = f"{ENV_PREFIX}{name.upper()}"
    return "OCTAVO_CACHE" if name == "cache_dir" and variable not in os.environ else variable


def _read_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise SettingsProblem(f"there is no settings file {path}")
    try:
        values = TomlConfigSettingsSource(Settings, path)()
    except ValueError as error:
        raise SettingsProblem(f"{path} is not valid TOML: {error}") from error
    if unknown := sorted(set(values) - set(Settings.model_fields)):
        raise SettingsProblem(f"{path}: no such setting: {', '.join(unknown)}. `octavo config` lists them all")
    return values


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:
            lines.append(message)
            continue
        name = str(problem["loc"][0])
        origin = origins.get(name, "flag")
        source = "" if origin == "flag" else f" (from {origin})"
        lines.append(f"--{name.replace('_', '-')}: {message}, not {problem['input']!r}{source}")
    return "\n".join(lines)
