"""The progress bar of training: loss, accuracy, images/s and the remaining time. Without a terminal, only lines."""

from __future__ import annotations

import sys


class Progress:
    def __init__(self, images: int, done: int, quiet: bool) -> None:
        from tqdm import tqdm

        self.quiet = quiet
        self._write = tqdm.write
        self._bar = tqdm(
            total=images,
            initial=done,
            unit=" images",
            unit_scale=True,
            dynamic_ncols=True,
            leave=False,
            disable=quiet or not sys.stderr.isatty(),
        )

    def advance(self, images: int) -> None:
        self._bar.update(images)

    def show(self, loss: float, accuracy: float) -> None:
        self._bar.set_postfix_str(f"loss {loss:.4f}, accuracy {accuracy:.1%}", refresh=False)

    def say(self, line: str) -> None:
        if not self.quiet:
            self._write(line)
            sys.stdout.flush()

    def close(self) -> None:
        self._bar.close()
