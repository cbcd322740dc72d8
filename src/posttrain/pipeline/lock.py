"""One process at a time for a pipeline's folder, including the training that it started.

The training inherits the lock. If the pipeline is killed while its training is still saving, the next run waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from posttrain.checkpointing import durable
from posttrain.errors import FolderHeld, InputError, place_and_reason
from posttrain.locks import Holder, LockHeld, locked

LOCK_FILE = ".lock"
_POLL_S = 0.1


@contextmanager
def only_runner(home: Path, say: Callable[[str], None]) -> Iterator[int]:
    """Yields the descriptor that holds the lock, for a child to inherit."""
    with ExitStack() as held:
        said = False
        while True:
            try:
                durable.make_folder(home)
                descriptor = held.enter_context(locked(home / LOCK_FILE, wait_s=0))
                break
            except LockHeld as busy:
                if not _has_ended(busy.holder):
                    raise FolderHeld(
                        f"{home}: another process is running this pipeline ({busy.holder or 'not known'}); "
                        "`posttrain pipeline status` shows its progress"
                    ) from None
            except OSError as error:
                raise InputError(f"pipeline.folder: {home} cannot be written ({place_and_reason(error)})") from error
            if not said:
                say("the run before was killed and its training is still saving; waiting for it")
                said = True
            time.sleep(_POLL_S)
        yield descriptor


def _has_ended(holder: Holder | None) -> bool:
    """Its training has the lock then."""
    return holder is not None and holder.is_on_this_machine and holder.is_alive is False
