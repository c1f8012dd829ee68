"""Array operations of the engine: one interface, several implementations (torch reference, native C++, Triton)."""

# A well-known package has the same name and transformers probes for its version when it is importable.
__version__ = "0.0.0"
