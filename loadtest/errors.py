"""The one exception that a user of the bench should see as a sentence, not as a traceback."""


class BenchError(Exception):
    """The run cannot go on; the message says what is wrong and, where possible, what to do."""
