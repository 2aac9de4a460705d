"""What has become of captures so far."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Counted by whoever takes captures and has them written.

    Args:
        num_taken: on the training thread; the last of them may not be on disk yet.
        num_bytes_taken: what those come to on disk, as far as that is known.
        num_written, num_bytes: files or lines, and what they come to.
        num_deduped, deduped_bytes: of what was written, references to other files, and what that left unwritten.
        num_missing, first_missing: what could not be written, and why the first of it.
    """

    num_taken: int = 0
    num_bytes_taken: int = 0
    num_written: int = 0
    num_bytes: int = 0
    num_deduped: int = 0
    deduped_bytes: int = 0
    num_missing: int = 0
    first_missing: str | None = None
