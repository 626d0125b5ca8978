"""Warnings that are said once a process."""

from __future__ import annotations

import functools
import logging

log = logging.getLogger("qkvpass")


@functools.cache
def log_once(message: str) -> None:
    """Log a warning, the first time that it is given."""
    log.warning("qkvpass: %s", message)
