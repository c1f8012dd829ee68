"""Errors of the engine.

EngineError
├── RequestRejected          add() refuses: this request can never run here (the client's fault)
├── ModelError               the model's files cannot be served: names file, tensor and reason
├── ConfigError              flags contradict each other or the machine; names the flag to turn
├── ProfileRefused           a profile is being taken already, or none is
└── EngineUnavailable        no engine to ask
    ├── EngineDead           the process ended
    └── EngineDraining       finishing what runs, taking nothing new
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors raised by the engine; the message is fit for an operator."""


class RequestRejected(EngineError):
    """The request can never run on this engine; the message is fit for the client."""


class ModelError(EngineError):
    """The model's files cannot be served."""


class ConfigError(EngineError):
    """The configuration cannot work; the message names the flag to turn."""


class ProfileRefused(EngineError):
    """A profile cannot be started or stopped now; the message is fit for an operator."""


class EngineUnavailable(EngineError):
    """There is no engine that could take the request now."""


class EngineDead(EngineUnavailable):
    """The engine process has ended."""


class EngineDraining(EngineUnavailable):
    """The engine finishes what runs and takes nothing new."""
